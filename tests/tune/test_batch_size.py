"""Real tries of batches, in separate processes, with real memory limits."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu import tune
from tfgpu.errors import InputError, MachineError
from tfgpu.recipes import recipe as recipes
from tfgpu.tune import batches, scaling
from tfgpu.tune.batch_search import _Search
from tfgpu.tune.batches import BatchTry, Bounds, next_batch

ROOT = Path(__file__).parents[2]
SMALL = recipes.make({"model": "mlp", "model_options": {"widths": [16]}, "global_batch": 32})
# An example takes 0.8 MB as numbers, some times; the folder need not be there.
LARGE = recipes.make(
    {
        **{"data": "photos/", "image_size": 256, "classes": 5, "augment": "none"},
        **{"model": "mlp", "model_options": {"widths": [4]}},
    }
)


def searched(bounds, fits, rate=lambda batch: float(batch), largest=True):
    """A complete search on a simulated machine."""
    tries = []
    while (batch := next_batch(tries, bounds, largest=largest)) is not None:
        assert len(tries) < 100
        tries.append(BatchTry(batch, True, rate(batch)) if fits(batch) else BatchTry(batch, False))
    return tries


# The search


def test_doubling_and_halving_by_hand():
    tries = searched(Bounds(8, 10_000), lambda batch: batch <= 700)
    assert [one.batch for one in tries] == [8, 16, 32, 64, 128, 256, 512, 1024, 768, 640, 704, 672]
    assert batches.largest(tries) == 672  # 704 does not fit, and the difference is below a sixteenth
    exact = searched(Bounds(8, 10_000, granularity=1), lambda batch: batch <= 700)
    assert batches.largest(exact) == 700
    assert [one.batch for one in searched(Bounds(8, 100), lambda batch: True)] == [8, 16, 32, 64, 100]
    assert [one.batch for one in searched(Bounds(8, 100), lambda batch: False)] == [8]


@given(
    replicas=st.integers(1, 8),
    low=st.integers(1, 40),
    span=st.integers(0, 5000),
    base=st.integers(0, 10**6),
    each=st.integers(1, 10**4),
    memory=st.integers(1, 10**8),
    part=st.none() | st.integers(1, 20),
)
def test_the_largest_that_fits_is_found(replicas, low, span, base, each, memory, part):
    lowest, highest = low * replicas, (low + span) * replicas
    bounds = Bounds(lowest, highest, replicas, part and part * replicas)

    def fits(batch):  # What a batch takes: a model, and so much for each example.
        return base + each * batch <= memory

    tries = searched(bounds, fits)
    tried = [one.batch for one in tries]
    assert len(set(tried)) == len(tried) and all(b % replicas == 0 and lowest <= b <= highest for b in tried)
    found = batches.largest(tries)
    if found is None:
        assert tried == [lowest] and not fits(lowest)
        return
    assert fits(found)
    failed = [one.batch for one in tries if not one.fits]
    assert found == highest if not failed else 0 < min(failed) - found <= bounds.step(found)
    assert (
        len(tried)
        <= 2 + math.log2(highest / lowest) + math.log2(max(2, highest / min(8 * replicas, bounds.step(1)))) + 1
    )


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=12), st.integers(0, 12))
def test_the_fastest_is_the_smallest_near_the_best(rates, fitting):
    tries = [BatchTry(8 * 2**n, n < fitting, rate if n < fitting else None) for n, rate in enumerate(rates)]
    known = {one.batch: one.examples_per_s for one in tries if one.fits}
    found = batches.fastest(tries)
    assert (found is None) == (not known)
    if known:
        assert known[found] >= 0.95 * max(known.values())
        assert all(rate < 0.95 * max(known.values()) for batch, rate in known.items() if batch < found)


def test_with_the_rate_alone_a_search_ends_where_it_stands_still():
    rates = {8: 100.0, 16: 190.0, 32: 200.0, 64: 205.0, 128: 207.0}
    tries = searched(Bounds(8, 1024), lambda batch: True, lambda batch: rates[batch], largest=False)
    assert [one.batch for one in tries] == [8, 16, 32, 64, 128]  # 64 and 128: less than 5 % above 200
    assert batches.fastest(tries) == 32
    tries = searched(Bounds(8, 1024), lambda batch: batch <= 32, largest=False)
    assert [one.batch for one in tries] == [8, 16, 32, 64]


# The settings


@pytest.mark.parametrize(
    ("settings", "batch", "scale", "expected"),
    [
        ({"optimizer": "sgd", "learning_rate": 0.1}, 128, "auto", {"learning_rate": 0.4, "warmup_epochs": 5.0}),
        ({"optimizer": "lars", "learning_rate": 2}, 64, "auto", {"learning_rate": 4.0, "warmup_epochs": 5.0}),
        ({"optimizer": "adam", "learning_rate": 1e-3}, 128, "auto", {"learning_rate": 2e-3, "warmup_epochs": 5.0}),
        ({"optimizer": "adamw", "learning_rate": 3e-3}, 64, "auto", {"learning_rate": 0.00424, "warmup_epochs": 5.0}),
        ({"optimizer": "Adam", "learning_rate": 1e-3}, 8, "auto", {"learning_rate": 5e-4}),
        ({"optimizer": "adam", "learning_rate": 1e-3}, 128, "linear", {"learning_rate": 4e-3, "warmup_epochs": 5.0}),
        ({"optimizer": "sgd", "learning_rate": 0.1}, 128, "sqrt", {"learning_rate": 0.2, "warmup_epochs": 5.0}),
        ({"optimizer": "sgd", "learning_rate": 0.1}, 128, "none", {"learning_rate": 0.1}),
        ({"optimizer": "sgd", "learning_rate": 0.12345}, 32, "auto", {"learning_rate": 0.12345}),
        (
            {"optimizer": "sgd", "epochs": 8, "learning_rate": 1},
            64,
            "auto",
            {"learning_rate": 2.0, "warmup_epochs": 2.0},
        ),
        ({"optimizer": "sgd", "epochs": 1, "learning_rate": 1}, 64, "auto", {"learning_rate": 2.0}),  # 1/4, as before
        ({"warmup_epochs": 6, "learning_rate": 1e-3}, 128, "auto", {"learning_rate": 2e-3}),
        ({"schedule": "plateau", "learning_rate": 1e-3}, 128, "auto", {"learning_rate": 2e-3}),
        (
            {"schedule": "step", "schedule_options": {"milestones": [3, 6]}, "learning_rate": 1e-3},
            *(128, "auto", {"learning_rate": 2e-3, "warmup_epochs": 1.5}),
        ),
    ],
)
def test_rates_and_warm_up_by_hand(settings, batch, scale, expected):
    base = recipes.make({"global_batch": 32, **settings})
    found = scaling.settings(base, batch, scale=scale)
    assert found == {"global_batch": batch, **expected}
    made = scaling.with_settings(base, found)
    assert made.model_dump() == {**base.model_dump(), **found}


@pytest.mark.parametrize("schedule", ["constant", "cosine", "exponential", "plateau", "polynomial", "step"])
@pytest.mark.parametrize("epochs", [2, 20])
def test_the_settings_make_a_schedule(schedule, epochs):
    from tfgpu.recipes import compiling

    options = {"milestones": [1]} if schedule == "step" else {}
    base = recipes.make({"schedule": schedule, "schedule_options": options, "epochs": epochs, "optimizer": "sgd"})
    made = scaling.with_settings(base, scaling.settings(base, 512))
    assert compiling.schedule(made, steps_per_epoch=3)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"lowest": 0}, "`lowest` must be a whole number of at least 1. Received: 0."),
        ({"highest": 2.5}, "`highest` must be a whole number of at least 1. Received: 2.5."),
        ({"repeats": True}, "`repeats` must be a whole number"),
        ({"lowest": 64, "highest": 32}, "`lowest` must be at most `highest`. Received: 64 and 32."),
        ({"timeout_s": 0}, "`timeout_s` must be above 0. Received: 0."),
        ({"timeout_s": math.nan}, "`timeout_s` must be above 0. Received: nan."),
        ({"memory_limit_bytes": -1}, "`memory_limit_bytes` must be"),
        ({"scale": "liner"}, "Did you mean 'linear'?"),
        ({"recipe": "digist"}, "Did you mean 'digits'?"),
    ],
)
def test_wrong_input_starts_nothing(arguments, expected):
    with pytest.raises(InputError) as caught:
        tune.batch_size(**{"recipe": SMALL, **arguments})
    assert expected in str(caught.value)


def test_foreign_files_and_clusters_are_refused(tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text("model: os:system\n")
    with pytest.raises(InputError, match="names code to run"):
        tune.batch_size(tmp_path / "recipe.yaml")
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(InputError, match="TF_CONFIG is set"):
        tune.batch_size(SMALL)


# Real tries


@pytest.mark.slow
def test_two_batches_are_tried():
    told = []
    found = tune.batch_size(SMALL, lowest=512, highest=1000, repeats=2, on_try=told.append)
    assert tuple(told) == found.tries and [one.batch for one in found.tries] == [512, 1000]
    assert found.largest == 1000 and found.fastest in (512, 1000)
    assert found.examples == 1258 and found.replicas == 1 and found.device
    for one in found.tries:
        assert one.fits and one.spread[0] <= one.examples_per_s <= one.spread[1]
        assert one.step_s == pytest.approx(one.batch / one.examples_per_s)
        assert 2**28 < one.memory_bytes < 2**33
    assert found.recipe.global_batch == found.fastest == found.settings["global_batch"]
    assert found.recipe.learning_rate == float(f"{3e-3 * math.sqrt(found.fastest / 32):.3g}")
    assert json.loads(json.dumps(found.as_json()))["tries"][0]["batch"] == 512


def child(what=SMALL, **changes):
    settings = {"timeout_s": 300.0, "memory_bytes": None, "repeats": 1, "scale": "auto", **changes}
    return _Search(what, settings.pop("log"), **settings)


@pytest.mark.slow
def test_a_batch_is_tried(tmp_path):
    tried = child(log=tmp_path / "log", repeats=3).attempt(512, 1258)
    assert tried.fits and tried.batch == 512 and not tried.reason
    assert 0 < tried.spread[0] <= tried.examples_per_s <= tried.spread[1]
    assert tried.step_s == pytest.approx(512 / tried.examples_per_s)
    assert 2**28 < tried.memory_bytes < 2**33


def test_a_try_that_takes_too_long_does_not_fit_and_is_ended(tmp_path):
    tried = child(log=tmp_path / "log", timeout_s=0.5).attempt(64, 1258)
    assert not tried.fits and tried.reason == "not finished after 0.5 s" and tried.time_s >= 0.5
    assert not tries_of(psutil.Process())


def test_a_try_that_is_killed_does_not_fit(tmp_path):
    killer = threading.Thread(target=kill_a_try)
    killer.start()
    tried = child(log=tmp_path / "log").attempt(64, 1258)
    killer.join(300)
    assert not tried.fits and tried.reason.startswith("The process was killed by SIGKILL")


def test_what_counts_as_a_lack_of_memory(tmp_path):
    """Messages of TensorFlow, oneDNN and the C++ library seen under a memory limit."""
    log = tmp_path / "log"
    one, limited = child(log=log), child(log=log, memory_bytes=10**9)
    abort = {"end": "failed", "reason": "The process was killed by SIGABRT.", "code": -signal.SIGABRT, "input": False}
    log.write_text(
        "terminate called after throwing an instance of 'dnnl::error'\n what(): could not create a primitive"
    )
    assert one._reason(8, abort) == "The process was killed by SIGABRT."
    log.write_text("F0000 Check failed: x == y\n")
    with pytest.raises(MachineError, match="A batch of 8 failed, but not because of memory: The process was killed"):
        one._reason(8, abort)
    assert "under a memory limit" in limited._reason(8, abort)
    said = {"end": "failed", "input": False, "reason": "UnknownError: Operation received an exception: std::bad_alloc"}
    assert one._reason(8, said) == said["reason"]
    with pytest.raises(InputError, match="^No such thing"):
        one._reason(8, {"end": "failed", "input": True, "reason": "No such thing, out of memory or not."})
    with pytest.raises(MachineError, match="ValueError"):
        limited._reason(8, {"end": "failed", "input": False, "reason": "ValueError: shapes differ"})


def test_a_search_that_is_killed_leaves_no_process():
    script = "from tfgpu import tune; tune.batch_size('digits')"
    search = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        tries = waited(lambda: tries_of(psutil.Process(search.pid)))
    finally:
        search.kill()
        search.wait(300)
    assert waited(lambda: not any(one.is_running() and one.status() != "zombie" for one in tries))


def waited(condition, seconds=300):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if found := condition():
                return found
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return None


def tries_of(process):
    return [one for one in process.children() if "tfgpu.tune.batch_try" in one.cmdline()]


def kill_a_try():
    tries = waited(lambda: tries_of(psutil.Process()))
    os.kill(tries[0].pid, signal.SIGKILL)


def test_a_search_without_a_fit_says_what_to_do():
    about = {"replicas": 1, "examples": 100, "made_up": True, "device": "CPU", "missing": ""}
    with pytest.raises(MachineError, match="Even a batch of 8 does not fit: no memory. Lower `lowest`"):
        child(log=None).result([BatchTry(8, False, reason="no memory.")], about, Bounds(8, 100), True)


def test_a_busy_machine_and_a_refused_recipe_are_noted():
    about = {"replicas": 1, "examples": 100, "made_up": True, "device": "CPU", "missing": ""}
    tries = [BatchTry(8, True, 100.0, (90.0, 105.0)), BatchTry(16, True, 200.0, (150.0, 250.0))]
    search = child(log=None)
    found = search.result([*tries, BatchTry(32, True, 300.0, (250.0, 330.0))], about, Bounds(8, 32), True)
    assert found.notes[0] == "All batches up to 32, the largest tried, fit." and "differ by 27%" in found.notes[1]
    search.refused[8] = "Too few updates."
    found = search.result(tries[:1], about, Bounds(8, 100), False)
    assert found.largest is None and found.notes == ("The recipe is invalid with these settings: Too few updates.",)


@pytest.mark.slow
def test_a_real_limit_of_memory_bounds_the_batch(tmp_path):
    found = tune.batch_size(
        LARGE, lowest=64, highest=1024, granularity=1024, repeats=1, memory_limit_bytes=2_400_000_000
    )
    assert found.tries[0].fits and not found.tries[-1].fits and found.largest == found.tries[-1].batch // 2
    assert found.tries[-1].reason and found.examples is None
    assert "number of training examples is unknown" in found.notes[-1]
    free = child(LARGE, log=tmp_path / "log").attempt(found.tries[-1].batch, None)
    assert free.fits and free.memory_bytes > found.tries[0].memory_bytes + 2**28


@pytest.mark.slow
def test_a_try_that_is_killed_ends_no_search():
    def after(one):
        if len(told) == 0:
            threading.Thread(target=kill_a_try, daemon=True).start()
        told.append(one)

    told = []
    found = tune.batch_size(SMALL, lowest=256, highest=1024, granularity=256, repeats=1, on_try=after)
    assert [(one.batch, one.fits) for one in found.tries] == [(256, True), (512, False)]
    assert "SIGKILL" in found.tries[1].reason and found.largest == found.fastest == 256


@pytest.mark.slow
def test_batches_are_multiples_of_the_replicas():
    what = recipes.make({**SMALL.model_dump(), "strategy": "mirrored", "virtual_devices": 2, "accumulate": 2})
    found = tune.batch_size(what, lowest=9, highest=25, repeats=1)
    assert found.replicas == 2 and [one.batch for one in found.tries] == [10, 20, 24] and found.largest == 24
    with pytest.raises(InputError, match="`granularity` must be a multiple of the replicas.*Use 4"):
        tune.batch_size(what, granularity=3)
    with pytest.raises(InputError, match="between `lowest` and `highest`.*lowest=800.*accumulate=2"):
        tune.batch_size(what, lowest=800)  # 1,258 examples make one update of 629


@pytest.mark.slow
def test_another_failure_is_an_error_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    (tmp_path / "odd.py").write_text("def build(**_):\n    raise RuntimeError('the seventh seal is broken')\n")
    (tmp_path / "recipe.yaml").write_text("model: odd:build\n")
    with pytest.raises(MachineError, match="A batch of 8 failed, but not because of memory: .*seventh seal"):
        tune.batch_size(tmp_path / "recipe.yaml", allow_code=True)
    with pytest.raises(InputError, match="Unknown optimizer 'adma'"):
        tune.batch_size(recipes.make({"optimizer": "adma"}))
