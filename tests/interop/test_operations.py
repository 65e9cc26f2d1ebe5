"""Custom kernels, built by g++, equal their fallback on one device and on replicas."""

import importlib.util
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import cli
from tfgpu.errors import InputError, MachineError
from tfgpu.interop import build_kernel, custom_op
from tfgpu.interop.operations import MARK, built_for

KERNELS = Path(__file__).parents[2] / "examples" / "kernels"
CC, CU = KERNELS / "bias_gelu.cc", KERNELS / "bias_gelu.cu"
NEEDS_NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")


def example():
    spec = importlib.util.spec_from_file_location("bias_gelu_example", KERNELS / "bias_gelu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bias_gelu = example()


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Built once per test process, since g++ takes seven seconds."""
    folder = tmp_path_factory.mktemp("kernels")
    return build_kernel([CC, CU], output=folder / "libbias_gelu.so", cuda=False)


@pytest.fixture
def missing(tmp_path):
    return tmp_path / "libmissing.so"


def values(kind="float32", rows=5):
    random = np.random.default_rng(0)
    return tf.constant(random.normal(size=[rows, 7]), kind), tf.constant(random.normal(size=[7]), kind)


def reference(u):
    return 0.5 * u * (1 + np.vectorize(math.erf)(u / np.sqrt(2)))


def test_without_a_library_the_fallback_runs_and_says_so_once(missing, caplog):
    run = bias_gelu.load(missing)
    x, bias = values()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            np.testing.assert_allclose(run(x, bias), reference(x.numpy() + bias.numpy()), rtol=2e-6, atol=1e-6)
    assert run.devices == frozenset()
    assert [r.getMessage() for r in caplog.records].count(caplog.records[0].getMessage()) == len(caplog.records) == 1
    assert "there is no library" in caplog.text


def test_bad_input(missing, tmp_path):
    with pytest.raises(InputError, match="build-kernel"):
        custom_op(missing, "ExampleBiasGelu", fallback=abs, required=True)
    with pytest.raises(InputError, match="must be a function"):
        custom_op(missing, "ExampleBiasGelu", fallback=None)
    with pytest.raises(InputError, match="at least one tensor"):
        custom_op(missing, "ExampleBiasGelu", fallback=abs)()
    with pytest.raises(InputError, match="does not exist"):
        build_kernel([tmp_path / "none.cc"])
    with pytest.raises(InputError, match=r"\.cc"):
        build_kernel([__file__])
    with pytest.raises(InputError, match="C\\+\\+ file"):
        build_kernel([CU])
    with pytest.raises(InputError, match="`cuda` needs a source"):
        build_kernel([CC], cuda=True)


def test_a_library_for_another_tensorflow_is_not_even_loaded(tmp_path):
    old = tmp_path / "libold.so"
    old.write_bytes(b"\x7fELF" + bytes(100) + MARK.encode() + b"2.9.1;" + bytes(9))
    assert built_for(old) == "2.9.1"
    with pytest.raises(MachineError, match=r"built for TensorFlow 2\.9\.1"):
        custom_op(old, "Any", fallback=abs)


def test_what_is_no_library_is_a_clear_error(tmp_path):
    text = tmp_path / "libtext.so"
    text.write_text("no library")
    with pytest.raises(MachineError, match=r"cannot be loaded.*build-kernel"):
        custom_op(text, "Any", fallback=abs)


def test_an_nvcc_that_is_missing_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(MachineError, match="nvcc was not found"):
        build_kernel([CC, CU], cuda=True)


def test_a_compiler_that_is_missing_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MachineError, match="no-such-compiler"):
        build_kernel([CC])


def test_a_source_that_does_not_compile_names_its_line_and_leaves_nothing(tmp_path):
    source = tmp_path / "broken.cc"
    source.write_text("int main() { return 1 }\n")
    with pytest.raises(InputError, match=r"(?s)broken\.cc does not compile.*broken\.cc:1"):
        build_kernel([source])
    assert [path.name for path in tmp_path.iterdir()] == ["broken.cc"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "close"), [("float16", 2e-3), ("bfloat16", 1e-2), ("float32", 2e-6), ("float64", 1e-12)]
)
def test_the_kernel_equals_the_fallback_and_its_gradient(library, kind, close):
    run = bias_gelu.load(library)
    x, bias = values(kind)
    results = []
    for function in (run, tf.function(run), bias_gelu.in_tensorflow):
        with tf.GradientTape() as tape:
            tape.watch([x, bias])
            y = function(x, bias)
        results.append([tf.cast(value, tf.float64).numpy() for value in (y, *tape.gradient(y, [x, bias]))])
    assert y.dtype == x.dtype
    for result in results[:2]:
        for got, wanted in zip(result, results[2], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=close, atol=3 * close)
    wide = x.numpy().astype("float64") + bias.numpy().astype("float64")
    np.testing.assert_allclose(results[0][0], reference(wide), rtol=close, atol=close)


@pytest.mark.slow
def test_the_gradient_is_the_slope_and_large_and_empty_tensors_pass(library):
    run = bias_gelu.load(library)
    x, bias = values("float64")
    theory, numbers = tf.test.compute_gradient(run, [x, bias], delta=1e-5)
    for one, other in zip(theory, numbers, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-8)
    assert run(tf.zeros([0, 7]), tf.zeros([7])).shape == (0, 7)
    large = tf.random.stateless_normal([4, 300, 129], [1, 2])  # many threads, whose parts begin within a row
    bias = tf.random.stateless_normal([129], [3, 4])
    np.testing.assert_allclose(run(large, bias), bias_gelu.in_tensorflow(large, bias), rtol=1e-5, atol=1e-6)
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        run(tf.zeros([2, 7]), tf.zeros([6]))


@pytest.mark.slow
def test_xla_takes_the_fallback(library, caplog):
    run = bias_gelu.load(library)
    x, bias = values()
    with caplog.at_level(logging.WARNING):
        got = tf.function(run, jit_compile=True)(x, bias)
    np.testing.assert_allclose(got, run(x, bias), rtol=1e-5, atol=1e-6)
    assert "XLA" in caplog.text


@pytest.mark.slow
def test_a_gradient_that_is_registered_is_taken(library):
    run = custom_op(library, "ExampleBiasGelu", fallback=bias_gelu.in_tensorflow)

    @tf.RegisterGradient("ExampleBiasGelu")
    def registered(operation, upstream):
        return 3 * upstream, None

    x, bias = values()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = run(x, bias)
    assert (tape.gradient(y, x).numpy() == 3).all()


@pytest.mark.slow
def test_a_saved_model_has_its_library(library, tmp_path):
    keras.Sequential([keras.Input([4]), bias_gelu.BiasGelu(library)]).save(tmp_path / "m.keras")
    model = keras.saving.load_model(tmp_path / "m.keras", custom_objects={"BiasGelu": bias_gelu.BiasGelu})
    np.testing.assert_allclose(model(tf.ones([1, 4])), np.full([1, 4], 0.8413447), rtol=1e-5)


@pytest.mark.slow
def test_a_name_that_is_not_in_the_library(library):
    with pytest.raises(InputError, match="Did you mean 'example_bias_gelu'"):
        custom_op(library, "ExampleBiasGel", fallback=abs)


def trained(library, strategy, policy, **compiled):
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(1).normal(size=[40, 6]).astype("float32")
    y = (x.sum(1) > 0).astype("int32")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([6]),
                keras.layers.Dense(8, use_bias=False, dtype=policy),
                bias_gelu.BiasGelu(library, dtype=policy),
                keras.layers.Dense(2, dtype="float32"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.3), loss, **compiled)
    history = model.fit(x, y, batch_size=15, epochs=3, shuffle=False, verbose=0).history["loss"]
    return history, model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_two_replicas_train_as_one_device_and_as_the_fallback(library, missing, policy):
    tfgpu.repair_keras()
    close = 1e-6 if policy == "float32" else 2e-2
    one = trained(library, tf.distribute.get_strategy(), policy)
    two = trained(library, tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), policy)
    plain = trained(missing, tf.distribute.get_strategy(), policy)
    compiled = trained(library, tf.distribute.get_strategy(), policy, jit_compile=True)
    for other in (two, plain, compiled):
        np.testing.assert_allclose(other[0], one[0], rtol=close)
        for got, wanted in zip(other[1], one[1], strict=True):
            np.testing.assert_allclose(got, wanted, atol=close)
    assert np.abs(one[1][1]).max() > 0.01  # the fused bias has learned


@pytest.mark.slow
@NEEDS_NVCC
def test_nvcc_builds_the_gpu_kernel_by_the_same_command(tmp_path):
    """The library also loads on a machine without a GPU, and runs there on the CPU."""
    made = tmp_path / "libboth.so"
    with pytest.raises(SystemExit) as ended:
        cli.main(["build-kernel", str(CC), str(CU), "--output", str(made)])
    assert not ended.value.code
    script = (
        "import json, sys, tensorflow as tf; from tfgpu.interop import custom_op;"
        "run = custom_op(sys.argv[1], 'ExampleBiasGelu', fallback=abs);"
        "print(json.dumps([sorted(run.devices), float(run(tf.ones([1, 1]), tf.zeros([1]))[0, 0])]))"
    )
    command = [sys.executable, "-c", script, str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env={**os.environ})
    assert done.returncode == 0, done.stderr[-2000:]
    devices, one = json.loads(done.stdout.splitlines()[-1])
    assert devices == ["CPU", "GPU"] and abs(one - 0.8413447) < 1e-6


@pytest.mark.gpu
@NEEDS_NVCC
def test_the_gpu_kernel_equals_the_fallback(tmp_path):
    if not tf.config.list_logical_devices("GPU"):
        pytest.skip("TensorFlow sees no GPU")
    run = bias_gelu.load(build_kernel([CC, CU], output=tmp_path / "libgpu.so", cuda=True, architectures="native"))
    x, bias = values(rows=1000)
    with tf.device("GPU:0"), tf.GradientTape(persistent=True) as tape:
        tape.watch([x, bias])
        got, wanted = run(x, bias), bias_gelu.in_tensorflow(x, bias)
    assert "GPU" in got.device
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(tape.gradient(got, [x, bias]), tape.gradient(wanted, [x, bias]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
