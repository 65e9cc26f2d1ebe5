"""The planner's arithmetic: laws that must hold for all layouts, numbers worked out by hand, published figures."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import published
from tfgpu.errors import InputError
from tfgpu.parallel.pipeline import schedule
from tfgpu.parallel.planning import footprint, hardware, layouts, planner
from tfgpu.parallel.planning.layouts import Layout
from tfgpu.parallel.planning.planner import plan, predict
from tfgpu.parallel.planning.workload import Block, Transformer, Workload

GPT3 = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)
SMALL = Transformer(layers=6, hidden=64, heads=8, sequence=32, vocabulary=128)
# 10 parameters, of which the tensor axis cuts 8; 16 bytes kept an example, 8 of them cut; 12 bytes come in.
BLOCK = Block("block", split=8, whole=2, kept_split=8, kept_whole=8, takes=12, flops=100, reduces=24)
ROW = Workload("row", (BLOCK,) * 4, outputs=4, heads=4, segments=(0, 1, 2, 3), most_stages=4)
transformers = st.builds(
    lambda layers, each, heads, sequence, vocabulary: Transformer(layers, each * heads, heads, sequence, vocabulary),
    st.integers(1, 24),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([16, 128, 512]),
    st.integers(2, 4096),
)
slots = st.integers(0, 3)


def memory(work, layout, batch, kept=2):
    return footprint.memory(work, work.stages(layout.pipeline), layout, batch=batch, slots=kept)


def parts(work, layout, batch, kept=2):
    found = memory(work, layout, batch, kept)
    return found.parameters, found.slots, found.gradients, found.activations


def sent(work, layout, batch):
    found = footprint.sent(work, work.stages(layout.pipeline), layout, batch=batch)
    return found.data, found.pipeline, found.tensor


# Laws


@pytest.mark.slow
@settings(max_examples=60)
@given(transformers, st.sampled_from([1, 2, 6, 8, 12, 16]), st.sampled_from([16, 48]), st.sampled_from(layouts.LOSSES))
def test_every_layout_multiplies_to_the_devices_and_divides_the_model(sizes, devices, batch, loss):
    work = sizes.workload()
    sizes_of_tensor = [size for size in layouts.tensor_sizes(devices, 8) if work.along(size)]
    found = list(layouts.candidates(devices, batch, stages=dict.fromkeys(sizes_of_tensor, work.most_stages), loss=loss))
    assert len(found) == len(set(found))
    assert any(one == Layout(data=devices, loss=loss) for one in found) == (batch % devices == 0)
    for one in found:
        assert one.data * one.pipeline * one.tensor == devices
        assert sizes.heads % one.tensor == 0 and one.tensor <= 8
        assert one.pipeline <= sizes.layers + 2
        assert batch % one.parts == 0
        assert one.zero == 0 or one.data > 1
        assert one.zero < 3 or (one.pipeline == one.tensor == 1 and one.recompute)
        stages = work.stages(one.pipeline)
        assert [block for stage in stages for block in stage.blocks] == list(work.blocks)


@settings(max_examples=60)
@given(transformers, slots, st.sampled_from(["data", "pipeline", "tensor"]), st.booleans(), st.sampled_from(range(4)))
def test_bytes_a_device_never_grow_with_devices_along_an_axis(sizes, kept, axis, recompute, zero):
    work, before = sizes.workload(), None
    for count in (1, 2, 4, 8):
        layout = Layout(
            **{axis: count},
            zero=zero if axis == "data" else 0,
            microbatches=8 if axis == "pipeline" else 1,
            recompute=recompute,
        )
        if sizes.heads % layout.tensor or layout.pipeline > work.most_stages:
            break
        found = parts(work, layout, 64, kept)
        if before is not None:
            grown = [new > old * (1 + 1e-9) for new, old in zip(found, before, strict=True)]
            # Stages are as equal as can be in time, not in bytes; what they keep at once has a test of its own.
            assert not any(grown[:3] if axis == "pipeline" else grown)
        if axis == "pipeline":
            stages = work.stages(count)
            assert sum(stage.sum.parameters(1) for stage in stages) == work.parameters
        before = before if before and axis == "pipeline" else found


@given(transformers, slots, st.sampled_from([2, 4, 8, 64]))
def test_zero_spreads_what_it_says(sizes, kept, copies):
    work = sizes.workload()
    plain, first, second, third = (parts(work, Layout(data=copies, zero=zero), copies, kept) for zero in range(4))
    pieces = plain[2] / copies  # of the variables, as many as there are gradients
    assert first[:3] == pytest.approx((plain[0], plain[1] / copies + pieces, plain[2]))
    largest = 4 * max(block.parameters(1) for block in work.blocks)
    assert second[1] == first[1] and second[2] <= plain[2] / copies + largest
    assert third[0] <= plain[0] / copies + largest
    assert third[1:3] == pytest.approx((plain[1] / copies, second[2]))
    assert plain[3] == first[3] == second[3] == third[3]


@given(st.integers(1, 8), st.integers(1, 12))
def test_what_a_stage_keeps_is_what_the_schedule_leaves_under_way(stages, microbatches):
    for kind in ("1f1b", "gpipe"):
        layout = Layout(pipeline=stages, microbatches=microbatches, schedule="gpipe-kept" if kind == "gpipe" else kind)
        expected = schedule.live(schedule.training(kind, stages, microbatches))
        if stages > 1:
            assert [layout.under_way(at) for at in range(stages)] == expected
        assert layout.idle == pytest.approx(schedule.bound(stages, microbatches))


@settings(max_examples=30)
@given(transformers, st.sampled_from([4, 8]), st.sampled_from(["20MB", "200MB", "40GB"]))
def test_what_fits_comes_first_and_by_time(sizes, devices, room):
    found = plan(sizes, devices, batch=32, memory=room)
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)
    for one in found:
        assert one.fits == (one.memory.peak <= 0.9 * hardware.bytes_of(room))
        assert one.memory.peak <= sum(parts(sizes.workload(), one.layout, 32)) * (1 + 1e-9)
    seconds = [float(f"{one.step_time_s:.3g}") for one in found if one.fits]
    assert seconds == sorted(seconds)


# By hand


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # 40 parameters of 4 bytes, two slots each, gradients; 16 bytes kept by 4 blocks of 8 examples, 3 copies of 4.
        (Layout(), (160, 320, 160, 4 * 16 * 8 + 12 * 8)),
        (Layout(data=2), (160, 320, 160, 4 * 16 * 4 + 12 * 4)),
        (Layout(data=2, zero=1), (160, 240, 160, 4 * 16 * 4 + 12 * 4)),
        (Layout(data=2, zero=2), (160, 240, 80 + 40, 4 * 16 * 4 + 12 * 4)),
        (Layout(data=2, zero=3), (80 + 40, 160, 80 + 40, 4 * 16 * 4 + 12 * 4)),
        (Layout(accumulate=2), (160, 480, 160, 4 * 16 * 4 + 12 * 4)),
        # Of 10 parameters a block, 8 are cut; so are 8 of its 16 bytes, and the loss.
        (Layout(tensor=4), (4 * 4 * 4, 2 * 64, 64, 4 * 10 * 8 + 12 * 8 / 4)),
        # Four inputs of 12 bytes, and one block.
        (Layout(recompute=True), (160, 320, 160, 4 * 12 * 8 + 16 * 8 + 12 * 8)),
        # A stage of two blocks and two rows a micro-batch. The first stage has two of them under way, and most; the
        # last one has one, and the whole batch's loss. With gpipe it is the last that has most.
        (Layout(pipeline=2, microbatches=4), (80, 160, 80, 2 * 16 * 2 * 2)),
        (Layout(pipeline=2, microbatches=4, loss="microbatch"), (80, 160, 80, 2 * 16 * 2 * 2)),
        (Layout(pipeline=2, microbatches=4, schedule="gpipe"), (80, 160, 80, 2 * 16 * 2 + 12 * 8 + 12 * 8)),
        (Layout(pipeline=2, microbatches=4, schedule="gpipe-kept"), (80, 160, 80, 2 * 16 * 8 + 12 * 8)),
    ],
)
def test_memory_by_hand(layout, expected):
    assert parts(ROW, layout, 8) == pytest.approx(expected)


def test_the_peak_is_not_the_sum():
    """Gradients come as activations go: 4 blocks keep 16 bytes each, and their gradients take 40."""
    found = memory(ROW, Layout(), 1, 0)
    # The backward pass ends with all gradients and the first block's activations.
    assert found.peak == 160 + max(4 * 16 + 12, 160 + 16)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(), (0, 0, 0)),
        (Layout(data=4), (2 * 3 / 4 * 160, 0, 0)),
        (Layout(data=4, accumulate=2), (2 * 3 / 4 * 160, 0, 0)),
        (Layout(data=4, zero=1), (3 * 3 / 4 * 160, 0, 0)),
        (Layout(data=4, zero=2), (2 * 3 / 4 * 160, 0, 0)),
        (Layout(data=4, zero=3), (3 * 3 / 4 * 160, 0, 0)),
        # The gradients of each part, the parameters once.
        (Layout(data=4, zero=2, accumulate=2), (3 * 3 / 4 * 160, 0, 0)),
        # A forward and a backward pass: 4 blocks sum 24 bytes an example each time.
        (Layout(tensor=4), (0, 0, 2 * 3 / 4 * 4 * 24 * 8 * 2)),
        (Layout(tensor=4, recompute=True), (0, 0, 2 * 3 / 4 * 4 * 24 * 8 * 3)),
        # 12 bytes an example, in two forward passes and one backward pass.
        (Layout(pipeline=2, microbatches=4), (0, 12 * 8 * 3, 0)),
        (Layout(pipeline=2, microbatches=4, schedule="gpipe-kept"), (0, 12 * 8 * 2, 0)),
    ],
)
def test_bytes_sent_by_hand(layout, expected):
    assert sent(ROW, layout, 8) == pytest.approx(expected)


def test_time_by_hand():
    device = hardware.Device("slow", 1000, 100.0, 50.0, 10.0, bandwidth=1000.0, host_bandwidth=10.0)

    def seconds(layout):
        return footprint.compute_s(ROW, ROW.stages(layout.pipeline), layout, device, batch=8, efficiency=0.5)

    assert seconds(Layout()) == 8 * 400 * 3 / 5  # float32: 10 a second, half of it reached
    assert seconds(Layout(data=2, tensor=2)) == seconds(Layout()) / 4
    assert seconds(Layout(recompute=True)) == seconds(Layout()) * 4 / 3
    # 2 rows a micro-batch, 4 + 1 turns of half the blocks, twice forward and once backward.
    assert seconds(Layout(pipeline=2, microbatches=4)) == 5 * 2 * 200 * 4 / 5
    both = footprint.Sent(data=500, tensor=2000)
    assert footprint.sending_s(Layout(data=4, tensor=2), both, device, per_host=8) == 0.5 + 2
    assert footprint.sending_s(Layout(data=4, tensor=2), both, device, per_host=2) == 50 + 2


# Published


def test_gpt3_needs_stages():
    """Narayanan et al., 2021: 8 GPUs to a layer, and 12 or 16 stages; 8 GPUs alone cannot hold it."""
    staged = Layout(data=8, tensor=8, pipeline=16, microbatches=192, recompute=True, loss="microbatch")
    assert predict(GPT3, staged, batch=1536).fits
    flat = Layout(data=128, tensor=8, accumulate=12, recompute=True)
    found = predict(GPT3, flat, batch=1536)
    assert not found.fits and found.lacks_bytes > 80e9


def test_bytes_a_device_as_published_for_zero():
    """Rajbhandari et al., 2020, figure 1: 7.5 billion parameters on 64 devices, 2 + 2 + 12 bytes each."""
    blocks = (Block("block", split=75_000),) * 100_000  # small ones: what is gathered of one does not count
    work = Workload("7.5B", blocks, variable_bytes=2, segments=tuple(range(len(blocks))))
    stages = work.stages(1)
    for zero, expected in enumerate((120.0, 31.4, 16.6, 1.9)):
        found = footprint.memory(work, stages, Layout(data=64, zero=zero), batch=64, slots=6)
        assert (found.parameters + found.slots + found.gradients) / 1e9 == pytest.approx(expected, abs=0.05)


def test_parameters_as_published():
    for row in published.ROWS:
        count = published.sizes(row).workload().parameters
        # Theirs share one matrix between the tokens and the logits.
        shared = count - 51200 * (row.hidden + 1)
        assert shared / 1e9 == pytest.approx(float(row.name.split()[-1]), rel=0.01, abs=0.05)


def test_the_published_layouts_fit_and_are_as_quick_as_published():
    for row in published.ROWS:
        one = published.predicted(row)
        assert one.fits, row
        assert published.teraflops(row, one.step_time_s) / row.teraflops == pytest.approx(1, abs=0.3), row


def test_operations_as_published():
    """Narayanan et al., 2021, equation 3: with recomputation, a step has four forward passes' worth."""
    for row in published.ROWS:
        ours = published.sizes(row).workload().flops * row.batch * 4
        theirs = published.teraflops(row, 1.0) * row.gpus * 1e12
        assert ours == pytest.approx(theirs, rel=0.02)  # the logits are recomputed in ours alone


@pytest.mark.slow
def test_the_planner_finds_a_layout_for_gpt3():
    best = plan(GPT3, 1024, batch=1536, loss="microbatch")[0]
    assert best.fits and best.layout.tensor * best.layout.pipeline > 8
    ours = plan(GPT3, 1024, batch=1536)[0]  # the loss of all micro-batches at once takes more
    assert ours.fits and ours.step_time_s >= best.step_time_s
    assert not plan(GPT3, 8, batch=1536)[0].fits


# Input


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (dict(devices=0), "`devices` must be a whole number"),
        (dict(devices=11, batch=3), "divides a batch of 3"),
        (dict(memory="80 gigs"), "such as '80GB'"),
        (dict(memory=0), "such as '80GB'"),
        (dict(optimizer="admw"), "Did you mean 'adamw'"),
        (dict(precision="float17"), "Unknown precision"),
        (dict(device="a11"), "Unknown device"),
        (dict(loss="rows"), "Unknown loss"),
        (dict(efficiency=0), "`efficiency` must be above 0"),
        (dict(headroom=1), "`headroom` must be"),
        (dict(flops=-1), "`flops` must be above 0"),
        (dict(bandwidth="60"), "`bandwidth` must be above 0"),
        (dict(headroom="0.1"), "`headroom` must be"),
        (dict(per_host=0), "`per_host` must be"),
    ],
)
def test_meaningless_settings_are_refused(how, words):
    with pytest.raises(InputError, match=words):
        plan(SMALL, **({"devices": 8, "batch": 8} | how))


def test_impossible_layouts_and_sizes_are_refused():
    with pytest.raises(InputError, match="Use hidden=64"):
        Transformer(layers=2, hidden=66, heads=8, sequence=8, vocabulary=8)
    with pytest.raises(InputError, match="`layers` must be"):
        Transformer(layers=0, hidden=8, heads=8, sequence=8, vocabulary=8)
    with pytest.raises(InputError, match="`zero` must be 0, 1, 2 or 3"):
        Layout(zero=4)
    with pytest.raises(InputError, match="`data` must be"):
        Layout(data=1.5)
    with pytest.raises(InputError, match="Use 16"):
        predict(SMALL, Layout(data=8), batch=17)
    with pytest.raises(InputError, match="a tensor axis of a size that divides 8"):
        predict(SMALL, Layout(tensor=3), batch=8)
    with pytest.raises(InputError, match="into 8 stages at most"):
        predict(SMALL, Layout(pipeline=9), batch=9)


def test_arguments_override_the_table():
    slow = plan(SMALL, 8, batch=8, flops=1e6)[0]
    assert slow.step_time_s > 100 * plan(SMALL, 8, batch=8)[0].step_time_s
    narrow = planner.predict(SMALL, Layout(data=8), batch=8)
    wide = [one for one in plan(SMALL, 8, batch=8, bandwidth=1e15) if one.layout == Layout(data=8)]
    assert wide[0].step_time_s < narrow.step_time_s
    assert hardware.bytes_of("1.5GiB") == 1.5 * 2**30 and hardware.bytes_of(" 80 gb") == 80e9


# The command


def tfgpu(*words, columns=200, cwd=None):
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "dumb"}
    command = [sys.executable, "-m", "tfgpu", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=550, cwd=cwd, env=environment)


SIZES = "--layers 6 --hidden 64 --heads 8 --sequence 32 --vocabulary 128".split()


@pytest.mark.parametrize("columns", [80, 120])
def test_the_command_prints_the_best_first(columns, tmp_path):
    done = tfgpu(
        "plan", *SIZES, "--devices", 8, "--device-memory", "80GB", "--json-to", tmp_path / "all.json", columns=columns
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns and "…" not in done.stdout
    written = json.loads((tmp_path / "all.json").read_text())
    expected = plan(SMALL, 8, memory="80GB")
    assert [one["layout"]["data"] for one in written] == [one.layout.data for one in expected]
    assert written[0]["step_time_s"] == expected[0].step_time_s and written[0]["fits"]
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    best = expected[0].layout
    assert rows[0][:4] == [str(best.data), str(best.pipeline), str(best.tensor), str(best.zero or "-")]
    assert len(rows) == 10


def test_the_command_reports_missing_memory():
    done = tfgpu("plan", *SIZES, "--devices", 2, "--device-memory", "1MB", "--batch", 4)
    assert done.returncode == 1
    assert "layouts do not fit. The nearest, " in done.stdout and "too much: parameters" in done.stdout


def test_a_builder_is_planned_by_its_options():
    sizes = "--model-option depth=6 --model-option width=64 --model-option heads=8 --input-shape 32 --classes 128"
    named = tfgpu("plan", "--model", "transformer", *sizes.split(), "--devices", 8)
    assert named.stdout == tfgpu("plan", *SIZES, "--devices", 8).stdout


def test_sizes_start_no_tensorflow():
    code = (
        "import sys; from tfgpu.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: print('tensorflow' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *SIZES, "--devices", "8"], capture_output=True, text=True, timeout=550
    )
    assert done.stdout.splitlines()[-1] == "False", done.stdout + done.stderr


def test_the_page_shows_what_the_commands_print(capsys):
    docs = Path(__file__).parents[2] / "docs"
    published.main()
    assert capsys.readouterr().out in (docs / "measured" / "planner.md").read_text()
    page = (docs / "guides" / "planner.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("tfgpu plan"))
    printed = tfgpu(*command.split()[1:], columns=80).stdout
    assert "\n".join(line.rstrip() for line in printed.splitlines()) in page


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "Missing: --layers"),
        (["--layers", "2"], "Missing: --hidden"),
        ([*SIZES, "--model", "cnn"], "not both"),
        (["--model", "transformer"], "--input-shape 1024"),
        ("--model transformer --input-shape 8 --classes 8 --model-option deph=2".split(), "Did you mean 'depth'"),
        ([*SIZES, "--limit", "0"], "--limit must be"),
        ([*SIZES, "--precision", "int8"], "Unknown precision"),
        ([*SIZES, "--json-to", "/nowhere/file.json"], "needs a file in an existing folder"),
        ([*SIZES, "--model-option", "depth=2"], "Add --model NAME"),
        ([*SIZES, "--mlp", "0"], "--mlp must be a whole number of at least 1"),
        ([*SIZES, "--devices", 10**20], "--devices must be at most 1,000,000,000"),
        ([*SIZES, "--layers", 10**8], "--layers must be at most 10,000"),
    ],
)
def test_wrong_arguments_are_one_line(words, expected):
    done = tfgpu("plan", "--devices", 8, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and expected in done.stderr


def test_digits_and_counts():
    from tfgpu.cli.plan import _count, _digits

    assert [_digits(value) for value in (0.01234, 1.5, 12.34, 1234.5, 1e-5)] == "0.01 1.50 12.3 1,234 <0.01".split()
    assert _count(175245043712) == "175.2 billion" and _count(999) == "999"
    assert math.isclose(hardware.known("v100-32").flops_in("mixed_float16"), 125e12)
