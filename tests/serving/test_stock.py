"""A model that was trained here opens in stock Keras, where tfgpu is not installed."""

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

import tfgpu
from tfgpu import models
from tfgpu.core.state import slice_writer
from tfgpu.serving.stock import save_stock_model, stock_model
from tfgpu.training import schedules
from tfgpu.training.optimizers import LARS
from tfgpu.training.perplexity import Perplexity

ROOT = Path(__file__).parents[2]
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SHAPES = {"transformer": (12,)}
LOADS = """
import sys
sys.modules["tfgpu"] = None  # importing it is an error
import keras, numpy as np
for path in sys.argv[1:]:
    model = keras.models.load_model(path)
    assert model(np.zeros((2, *model.input_shape[1:]))).shape[0] == 2
    if model.compiled:
        labels = np.zeros((2,) + tuple(model.output_shape[1:-1]))
        if "one_hot" in path:
            labels = np.zeros((2, 10))
        model.fit(np.zeros((2, *model.input_shape[1:])), labels, verbose=0)
    print("opened", bool(model.compiled))
"""


def rows(name):
    random = np.random.default_rng(0)
    shape = SHAPES.get(name, (8, 8, 3))
    x = random.integers(0, 9, (4, *shape)) if name in SHAPES else random.normal(size=(4, *shape)).astype("float32")
    return x, random.integers(0, 9, (4, *(shape if name == "transformer" else ())))


def trained(name, optimizer=None, **options):
    x, y = rows(name)
    with tfgpu.strategy("mirrored", devices=2).scope():
        keras.utils.set_random_seed(0)
        model = models.build(name, input_shape=x.shape[1:], classes=9, options=options)
        rate = schedules.build("cosine", 0.1, total_steps=8, warmup_steps=1, accumulate=2).learning_rate
        kept = optimizer or keras.optimizers.Adam(rate, gradient_accumulation_steps=2)
        model.compile(kept, LOSS, metrics=["accuracy", Perplexity()])
    model.fit(x, y, batch_size=4, epochs=3, verbose=0)
    return model, x


def opened(*paths):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", LOADS, *map(str, paths)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.endswith("True") for line in done.stdout.splitlines() if line.startswith("opened")]


def content(path):
    """All of a file, with its arrays as bytes."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        file = h5py.File(io.BytesIO(archive.read("model.weights.h5")))
        found = {"config": json.loads(archive.read("config.json"))}
    file.visititems(
        lambda name, item: found.update({name: np.asarray(item).tobytes() if hasattr(item, "dtype") else 0})
    )
    return found


def check(model, x, folder):
    made = stock_model(model)
    np.testing.assert_array_equal(model(x), made(x))
    made.save(folder / "model.keras")
    assert "tfgpu" not in zipfile.ZipFile(folder / "model.keras").read("config.json").decode()
    again = keras.models.load_model(folder / "model.keras")
    save_stock_model(model, folder / "written.keras")
    assert content(folder / "written.keras") == content(folder / "model.keras")
    np.testing.assert_array_equal(again(x), model(x))
    return again


@pytest.mark.sample("mlp-True")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", models.BUILDERS)
def test_the_outputs_are_the_model_s(name, recompute, tmp_path):
    model, x = trained(name, recompute=recompute)
    again = check(model, x, tmp_path)
    assert [metric.name for metric in again.metrics] == ["loss", "compile_metrics"]
    assert float(again.optimizer.learning_rate) == pytest.approx(float(model.optimizer.learning_rate))
    if name not in ("vit", "transformer"):  # these have other variables
        ours = [np.asarray(variable) for variable in model.optimizer.variables]
        theirs = [np.asarray(each) for each in again.optimizer.variables if "learning_rate" not in each.path]
        assert len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


@pytest.mark.slow
def test_an_optimizer_that_keras_lacks_leaves_the_copy_not_compiled(tmp_path):
    assert not check(*trained("mlp", LARS(0.1)), tmp_path).compiled


@pytest.mark.slow
def test_the_rate_within_a_loss_scale(tmp_path):
    rate = schedules.build("cosine", 0.1, total_steps=8, warmup_steps=1, accumulate=2).learning_rate
    model, x = trained("mlp", keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate)))
    again = check(model, x, tmp_path)
    assert float(again.optimizer.learning_rate) == pytest.approx(float(model.optimizer.learning_rate))


def test_nested_models_and_models_of_keras_alone():
    inner = keras.Sequential([keras.Input((8,)), models.Recompute(keras.layers.Dense(8, "relu"))])
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inner(inner(inputs))))
    x = np.ones((3, 8))
    np.testing.assert_array_equal(model(x), stock_model(model)(x))
    assert "tfgpu" not in stock_model(model).to_json()
    stock = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    stock.compile("adam", "mse")
    assert stock_model(stock) is stock


def test_a_layer_that_keras_lacks_is_named(tmp_path, caplog):
    layers = [keras.Input((4, 8)), models.Recompute(tfgpu.layers.MixtureOfExperts(2, 8)), keras.layers.Dense(1)]
    save_stock_model(keras.Sequential(layers), tmp_path / "model.keras")
    assert "opens only where tfgpu is installed" in caplog.text and "MixtureOfExperts" in caplog.text
    caplog.clear()
    save_stock_model(keras.Sequential([layers[0], models.Recompute(layers[2])]), tmp_path / "model.keras")
    assert not caplog.records


@pytest.mark.slow
def test_a_sharded_model_is_written_by_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(slice_writer, "_SLICE_BYTES", 64)
    with tfgpu.strategy("mirrored", devices=2).scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(3)])
        model = tfgpu.parallel.shard(model, 3)
        rate = schedules.build("cosine", 0.1, total_steps=8, warmup_steps=1, accumulate=1).learning_rate
        model.compile(keras.optimizers.Adam(rate), "mse")
    x = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    model.fit(x, x[:, :3], batch_size=4, epochs=2, verbose=0)
    check(model, x, tmp_path)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("stage", ["0", "3"])
def test_saving_takes_the_memory_of_a_few_slices(stage, tmp_path):
    command = ["keras-file", str(tmp_path), stage, "1536", "0", "--of-run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoints", *command],
        env={**environment, "MALLOC_TRIM_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["growth"] < 0.5 * found["bytes"], found  # a copy takes more than the file


@pytest.mark.slow
@pytest.mark.processes
def test_what_a_run_saves_opens_without_tfgpu(tmp_path):
    runs = {
        "accumulate": ["--accumulate", "2"],
        "vit": ["--model", "vit", "--recompute", "--precision", "mixed_float16"],
        "lars": ["--optimizer", "lars", "--schedule", "polynomial"],
        "cosine": ["--schedule", "cosine", "--weight-average", "ema"],
        "plateau": ["--schedule", "plateau", "--optimizer", "momentum", "--clip-norm", "1"],
        "one_hot": ["--schedule", "exponential", "--warmup-epochs", "0.5", "--label-smoothing", "0.1"],
        "replicas": ["--devices", "2", "--virtual-devices", "2"],
    }
    code = "import sys; from tfgpu.cli import _execute; sys.exit(_execute(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    for name, flags in runs.items():
        words = ["train", "digits", "--epochs", "1", "--output", str(tmp_path / name), *flags]
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
        assert done.returncode == 0, (name, done.stderr[-2000:])
    assert opened(*(tmp_path / name / "model.keras" for name in runs)) == [name != "lars" for name in runs]
