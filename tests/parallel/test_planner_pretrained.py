"""Plans of pretrained decoders: weights to the number, activations beside the peak of a process that trains one."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfgpu.cli import _execute
from tfgpu.errors import InputError
from tfgpu.parallel import Layout, plan, predict
from tfgpu.parallel.planning import footprint, pretrained
from tfgpu.parallel.planning.pretrained import Decoder

# As `model.parameters()` of each has it on Hugging Face's pages.
PUBLISHED = {"gemma-2b": 2_506_172_416, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496}
SMALL = Decoder("small", 4, 128, 4, 2, 32, 256, 512, False)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_decoder_has_the_published_number_of_weights(name):
    decoder = pretrained.known(name)
    assert decoder.parameters == PUBLISHED[name] == decoder.workload(128).parameters


def test_weights_slots_and_gradients_of_each_way():
    weights = 8_030_261_248
    adapters = (
        32 * 16 * (4096 * (32 + 8) + 2 * 128)
    )  # an adapter of Keras's EinsumDense has the heads in its first part

    def memory(precision="mixed_bfloat16", **how):
        work = pretrained.known("llama3-8b").workload(128, precision, **how)
        return predict(work, Layout(), batch=1, optimizer="adamw").memory

    full = memory()
    assert (full.parameters, full.slots, full.gradients) == (4 * weights, 8 * weights, 4 * weights)
    lora = memory(lora=16)
    assert (lora.parameters, lora.slots, lora.gradients) == (4 * (weights + adapters), 8 * adapters, 4 * adapters)
    for kind, least, most in (("bfloat16", 2, 2.01), ("int8", 1, 1.04), ("int4", 0.5, 0.54)):
        held = memory(lora=16, weights=kind).parameters - 4 * adapters
        assert least * weights <= held <= most * weights, kind


def test_more_devices_and_fewer_bits_let_more_models_fit():
    def fits(name, devices, memory, **how):
        work = pretrained.known(name).workload(2048, **how)
        return plan(work, devices, batch=8 * devices, memory=memory)[0].fits

    assert not fits("llama3-8b", 1, "80GB") and fits("llama3-8b", 8, "80GB")
    assert not fits("llama3-70b", 8, "24GB", lora=16) and fits("llama3-70b", 8, "24GB", lora=16, weights="int4")


def test_the_planner_has_the_sizes_that_training_has():
    from tfgpu.attention import blockwise
    from tfgpu.losses import row_chunks

    found = pretrained.NUMBERS, pretrained.LEAST_ROWS, pretrained.BLOCK
    assert found == (row_chunks.NUMBERS, row_chunks.LEAST_ROWS, blockwise.BLOCK)


def test_a_loss_by_chunks_holds_a_chunk_but_in_a_pipeline_and_along_tensor():
    def loss(layout, rows, **how):
        work = SMALL.workload(256, lora=2, **how)
        return footprint._loss(work, layout, rows)

    token = 3 * 4 * 512  # three copies of its logits
    assert loss(Layout(), 8) == 8 * 256 * token  # all: they are few
    assert loss(Layout(data=2), 8, loss_chunk=100) == 100 * token
    assert loss(Layout(), 8, loss_chunk=10**6) == 8 * 256 * token
    assert loss(Layout(), 1024) == 2**15 * token  # as `tfgpu train` chooses
    assert loss(Layout(tensor=2), 8, loss_chunk=100) == 8 * 256 * token / 2
    assert loss(Layout(pipeline=2, microbatches=2), 4, loss_chunk=100) == 8 * 256 * token


def test_flash_attention_grows_with_the_length():
    def kept(length, **how):
        return SMALL.workload(length, lora=2, **how).blocks[1].kept_split

    assert kept(2048, flash_attention=True) == 2 * kept(1024, flash_attention=True) < kept(2048)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"weights": "int4"}, "Only frozen weights"),
        ({"weights": "int3", "lora": 8}, "int4"),
        ({"precision": "float8"}, "float16"),
        ({"lora": -3}, "`lora` must be a whole number of at least 1"),
        ({"loss_chunk": 0}, "`loss_chunk` must be a whole number of at least 1"),
    ],
)
def test_bad_input(how, words):
    with pytest.raises(InputError, match=words):
        SMALL.workload(128, **how)
    with pytest.raises(InputError, match="llama3-8b"):
        pretrained.known("llama3-9b")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason="needs KerasHub")
@pytest.mark.parametrize(
    ("rows", "lora", "flash", "chunk"),
    [(16, None, False, None), (32, None, False, None), (32, 8, False, None), (16, None, True, 256)],
)
def test_a_step_takes_what_is_predicted(rows, lora, flash, chunk):
    """All weights: within a fifth. LoRA: at most what is predicted, since frozen layers keep less than is counted."""
    sizes = {name: getattr(SMALL, name) for name in ("layers", "hidden", "heads", "groups", "mlp", "vocabulary")}
    length = 512 if flash else 256
    given = {"sizes": sizes, "length": length, "rows": rows, "lora": lora, "flash": flash, "chunk": chunk}
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    script = [sys.executable, str(Path(__file__).parents[1] / "finetuning" / "peak.py"), json.dumps(given)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    work = SMALL.workload(length, "float32", lora=lora, flash_attention=flash, loss_chunk=chunk)
    memory = predict(work, Layout(), batch=rows, optimizer="sgd").memory
    assert measured["variables"] == memory.parameters
    ratio = measured["bytes"] / (memory.peak - memory.parameters - memory.slots)
    assert 0.8 < ratio < 1.2 if lora is None else 0.4 < ratio < 1.1, ratio


def test_the_command_plans_a_published_model(capsys):
    asked = ["plan", "--pretrained", "llama3-8b", "--devices", "2", "--device-memory", "24GB"]
    assert _execute([*asked, "--lora", "16", "--weights", "int4"]) == 0
    assert "llama3-8b: 8.0 billion parameters" in capsys.readouterr().out
    assert _execute(asked) == 1  # nothing fits
    for wrong in (["--hidden", "64"], ["--weights", "int4"]):
        assert _execute([*asked, *wrong]) == 2
    assert _execute(["plan", "--devices", "2", "--lora", "16"]) == 2
    assert "Add --pretrained NAME" in capsys.readouterr().err
    for option in ("--sequence", "--lora", "--loss-chunk"):
        assert _execute([*asked, option, "0"]) == 2
        assert f"{option} must be a whole number of at least 1" in capsys.readouterr().err
