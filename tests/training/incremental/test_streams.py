"""Streams larger than memory: windows, training, resuming, and memory use."""

import json
import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfgpu
from tfgpu.training import incremental


@given(sizes=st.lists(st.integers(0, 9), max_size=12), rows=st.integers(1, 15))
def test_windows_hold_every_row_once_and_in_order(sizes, rows):
    numbers = iter(range(200))
    batches = [np.array([next(numbers) for _ in range(size)], "float64") for size in sizes]
    found = [x for x, y in incremental.windows(((b, b) for b in batches), rows)]
    assert [len(x) for x in found[:-1]] == [rows] * (len(found) - 1)
    assert np.concatenate([*found, np.zeros(0)]).tolist() == list(map(float, range(sum(sizes))))


def model_of():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def stream(batches=7):
    for at in range(batches):
        draw = np.random.default_rng(at)
        yield draw.normal(size=(5, 2)).astype("float32"), draw.integers(0, 3, 5)


@pytest.mark.slow
def test_an_interrupted_run_resumes_as_if_uninterrupted(tmp_path):
    settings = {"window": 10, "global_batch": 4, "epochs": 2, "verbose": 0}
    whole, replay = model_of(), incremental.Replay(8, seed=1)
    logs = incremental.fit_stream(whole, stream(), replay=replay, **settings)
    assert len(logs) == 4 and replay.seen == 35 and logs[0].keys() == {"loss"}

    stopped, part = model_of(), incremental.Replay(8, seed=1)

    def keep(at, logs):
        if at == 1:
            stopped.save(tmp_path / "model.keras")
            part.save(tmp_path / "replay")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        incremental.fit_stream(stopped, stream(), replay=part, after_window=keep, **settings)
    again = incremental.warm_start(tmp_path / "model.keras", optimizer="keep")
    memory = incremental.Replay(8, seed=1).load(tmp_path / "replay", like=next(stream()))
    incremental.fit_stream(again, stream(), replay=memory, skip=2, **settings)
    assert all(np.array_equal(a, b) for a, b in zip(whole.get_weights(), again.get_weights(), strict=True))


def test_invalid_input_is_named():
    with pytest.raises(tfgpu.InputError, match="`rows`"):
        incremental.windows(stream(), 0)
    with pytest.raises(tfgpu.InputError, match="batch_size"):
        incremental.fit_stream(model_of(), stream(), window=4, global_batch=2, batch_size=3)
    with pytest.raises(tfgpu.InputError, match="or `.x, y, weights.`"):
        incremental.fit_stream(model_of(), iter([np.ones((3, 2))]), window=4, global_batch=2)


MEASURE = textwrap.dedent("""
    import json, sys
    import keras, numpy as np, psutil
    from tfgpu.training import incremental
    model = keras.Sequential([keras.Input((50_000,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(1e-6), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    def stream(batches):
        for at in range(batches):
            yield np.full((25, 50_000), at, "float32"), np.zeros(25, "int64")  # 5 MB
    peaks = []
    look = lambda at, logs: peaks.append(psutil.Process().memory_info().rss)
    replay = incremental.Replay(bytes=20_000_000)
    incremental.fit_stream(model, stream(int(sys.argv[1])), window=100, global_batch=25, replay=replay,
                           after_window=look, verbose=0)
    print(json.dumps({"rows": replay.seen, "peaks": peaks}))
""")


@pytest.mark.slow
def test_the_memory_it_takes_does_not_grow_with_the_stream():
    """200 batches of 5 MB are a gigabyte; a window is 20 MB, and so is the replay memory."""
    command = [sys.executable, "-c", MEASURE, "200"]
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}  # With AVX-512, its allocator keeps what was freed.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=True)
    found = json.loads(done.stdout)
    assert found["rows"] == 5000 and len(found["peaks"]) == 50
    early, late = max(found["peaks"][5:15]), max(found["peaks"][-10:])
    assert late - early < 250e6  # windows that stay would be 800 MB; the allocator alone makes 100
