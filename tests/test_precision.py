import keras
import pytest
import tensorflow as tf

from tfgpu import precision
from tfgpu.environment import Device
from tfgpu.errors import InputError


def gpu(major, minor, index=0):
    return Device(f"GPU:{index}", "GPU", f"GPU:{index}", "NVIDIA", (major, minor))


CPU = Device("CPU:0", "CPU", "CPU:0")


def state():
    return keras.config.dtype_policy().name, bool(tf.config.experimental.tensor_float_32_execution_enabled())


@pytest.fixture(autouse=True)
def as_before():
    before = precision.use("float32")
    yield
    before.restore()


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ([], "float32"),
        ([CPU], "float32"),
        ([CPU, gpu(6, 1)], "float32"),
        ([gpu(7, 0)], "mixed_float16"),
        ([gpu(7, 5)], "mixed_float16"),
        ([gpu(8, 0)], "mixed_bfloat16"),
        ([gpu(8, 9)], "mixed_bfloat16"),
        ([CPU, gpu(9, 0), gpu(9, 0, 1)], "mixed_bfloat16"),
        ([gpu(10, 0)], "mixed_bfloat16"),
        ([gpu(9, 0), gpu(7, 5, 1)], "mixed_float16"),
        ([gpu(9, 0), gpu(6, 0, 1)], "float32"),
        ([Device("GPU:0", "GPU", "GPU:0", "not NVIDIA")], "float32"),
    ],
)
def test_auto_takes_what_all_gpus_have(devices, name):
    assert precision.choose(devices) == name


@pytest.mark.parametrize(
    ("name", "applied", "policy", "tf32"),
    [
        ("auto", "float32", "float32", False),
        ("float32", "float32", "float32", False),
        ("tf32", "tf32", "float32", True),
        ("mixed_float16", "mixed_float16", "mixed_float16", True),
        ("mixed_bfloat16", "mixed_bfloat16", "mixed_bfloat16", True),
    ],
)
def test_a_precision_is_a_policy_and_the_tf32_switch(name, applied, policy, tf32):
    found = precision.use(name)
    assert (found.name, state()) == (applied, (policy, tf32))


def test_as_a_context_manager_it_restores_both_when_nested_and_after_an_error():
    precision.use("tf32")
    with precision.use("mixed_float16"):
        assert state() == ("mixed_float16", True)
        with precision.use("float32"):
            assert state() == ("float32", False)
            with pytest.raises(ZeroDivisionError), precision.use("mixed_bfloat16"):
                assert state() == ("mixed_bfloat16", True)
                raise ZeroDivisionError
            assert state() == ("float32", False)
        assert state() == ("mixed_float16", True)
    assert state() == ("float32", True)


def test_an_unknown_name_changes_nothing():
    before = state()
    with pytest.raises(InputError, match="Did you mean 'mixed_bfloat16'"):
        precision.use("mixed_bfloat")
    assert state() == before


@pytest.mark.parametrize("name", ["tf32", "mixed_float16", "mixed_bfloat16"])
def test_a_precision_that_the_devices_lack_warns(name, caplog):
    precision.use(name)
    assert f"'{name}' is fast on GPUs" in caplog.text


def test_float32_does_not_warn(caplog):
    precision.use("auto")
    assert caplog.text == ""


def test_mixed_float16_compiles_with_a_loss_scale_and_float32_variables():
    with precision.use("mixed_float16"):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        model.compile(optimizer="sgd", loss="mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.layers[0].compute_dtype == "float16"
    assert model.layers[0].kernel.dtype == "float32"


def found(model):
    return [(finding.layer, finding.dimension, finding.size) for finding in precision.advice(model)]


def test_advice_names_each_width_once_where_it_is_set():
    inputs = keras.Input((12,), dtype="int32")
    x = keras.layers.Embedding(1000, 60, name="words")(inputs)
    x = keras.layers.MultiHeadAttention(4, 15, name="attention")(x, x)
    x = keras.layers.Conv1D(33, 3, name="convolution")(x)
    x = keras.layers.Dense(64, name="good")(x)
    x = keras.layers.Dense(3, name="narrow")(x)
    model = keras.Model(inputs, keras.layers.Dense(10, name="classes")(x))
    assert found(model) == [
        ("words", "output_dim", 60),
        ("attention", "key_dim", 15),
        ("convolution", "filters", 33),
        ("narrow", "units", 3),
    ]
    assert [finding.suggestion.partition(":")[0] for finding in precision.advice(model)] == [
        "Use 56 or 64",
        "Use 8 or 16",
        "Use 32 or 40",
        "Use 8",
    ]


def test_a_large_output_such_as_a_vocabulary_is_named():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(30522, name="vocabulary")])
    (finding,) = precision.advice(model)
    assert finding == precision.Finding(
        "vocabulary", "units", 30522, "Use 30520 or 30528: Tensor Cores work best on multiples of 8."
    )


def test_layers_within_layers_are_seen_once():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(20, name="first")
            self.more = [keras.layers.Dense(21, name="second"), (keras.layers.Dense(22, name="third"),)]
            self.named = {"fourth": keras.layers.Dense(23, name="fourth")}

        def call(self, x):
            return self.named["fourth"](self.more[0](self.first(x)))

    shared = Block()
    inputs = keras.Input((20,))
    inner = keras.Sequential([keras.Input((23,)), keras.layers.Dense(20, name="nested")])
    wrapped = keras.layers.TimeDistributed(keras.layers.Dense(25, name="wrapped"))
    x = inner(shared(inner(shared(inputs))))
    model = keras.Model(inputs, wrapped(keras.layers.Reshape((1, 20))(x)))
    assert sorted(found(model)) == [
        ("first", "units", 20),
        ("fourth", "units", 23),
        ("nested", "units", 20),
        ("second", "units", 21),
        ("third", "units", 22),
    ]


def test_eight_bit_layers_want_sixteen():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(24, name="hidden"), keras.layers.Dense(16)])
    assert precision.advice(model) == []
    model.layers[0].quantize("int8")
    (finding,) = precision.advice(model)
    assert finding.suggestion == "Use 16 or 32: Tensor Cores work best on multiples of 16."


def test_a_model_that_was_never_called_gets_advice_too():
    class Lazy(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(9, name="lazy")

    assert found(Lazy()) == [("lazy", "units", 9)]


@pytest.mark.gpu
@pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="needs an NVIDIA GPU")
def test_float32_is_exact_on_a_gpu_and_tf32_is_not():
    value = tf.fill([64, 64], 1.0 + 2**-12)  # 12 bits of fraction: float32 has 23, TF32 has 10.
    exact = 64 * (1.0 + 2**-12)
    with precision.use("float32"):
        assert abs(float(tf.matmul(value, tf.ones([64, 64]))[0, 0]) - exact) < 1e-5
    with precision.use("tf32"):
        assert abs(float(tf.matmul(value, tf.ones([64, 64]))[0, 0]) - exact) > 1e-3
