"""What is exported gives the model's outputs, in a process that has nothing of ours."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import cli, serving
from tfgpu.errors import InputError, MachineError

RNG = np.random.default_rng(0)


@pytest.fixture
def policy():
    """Sets Keras's dtype policy for one test."""
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


def small(activation="gelu"):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6,), name="x"), keras.layers.Dense(8, activation), keras.layers.Dense(3)])


@pytest.mark.parametrize("form", ["onnx", "litert", pytest.param("savedmodel", marks=pytest.mark.slow)])
def test_the_outputs_are_the_models_for_any_number_of_rows(form, tmp_path):
    model = small()
    made = serving.export(model, tmp_path / "made", format=form)
    assert made.difference < 1e-6 and made.bytes > 100 and made.inputs == {"x": ((None, 6), "float32")}
    rows = RNG.normal(size=(7, 6)).astype("float32")
    (found,) = serving.run(made.path, {"x": rows})
    np.testing.assert_allclose(found, model(rows), atol=1e-6)


def test_a_hand_computed_sum(tmp_path):
    model = keras.Sequential([keras.Input((2,), name="x"), keras.layers.Dense(1, kernel_initializer="ones")])
    made = serving.export(model, tmp_path / "sum.onnx", format="onnx", check=False)
    assert made.difference is None
    assert serving.run(made.path, {"x": np.array([[1, 2], [3, 5]], "float32")})[0].tolist() == [[3.0], [8.0]]


@pytest.mark.parametrize("form", ["onnx", "litert"])
def test_several_inputs_and_outputs_keep_their_order(form, tmp_path):
    b, a = keras.Input((3,), name="b"), keras.Input((2,), name="a")
    model = keras.Model([b, a], [keras.layers.Dense(4)(b), keras.layers.Dense(5)(a), keras.layers.Dense(4)(b)])
    made = serving.export(model, tmp_path / "made", format=form)
    assert made.difference < 1e-6 and list(made.inputs) == ["b", "a"]


class Own(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def test_a_subclassed_model_needs_an_example(tmp_path):
    model, rows = Own(), RNG.normal(size=(4, 6)).astype("float32")
    with pytest.raises(InputError, match="is not built"):
        serving.export(model, tmp_path / "made", format="litert")
    model(rows)
    with pytest.raises(InputError, match="Give `example`"):
        serving.export(model, tmp_path / "made", format="litert")
    assert serving.export(model, tmp_path / "made", format="litert", example=rows).difference < 1e-6


@keras.saving.register_keras_serializable("test_export")
class Fickle(keras.layers.Layer):
    """Does something else in a graph."""

    def call(self, x):
        return x if tf.executing_eagerly() else x + 1.0


def test_other_outputs_are_an_error_and_leave_nothing(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), Fickle()])
    with pytest.raises(MachineError, match="differ from the model's by"):
        serving.export(model, tmp_path / "made", format="onnx")
    assert not list(tmp_path.iterdir())


def test_nothing_is_replaced_unless_asked(tmp_path):
    first = serving.export(small(), tmp_path / "made", format="litert", check=False)
    before = first.path.read_bytes()
    with pytest.raises(InputError, match="exists"):
        serving.export(small("relu"), tmp_path / "made", format="litert", check=False)
    assert first.path.read_bytes() == before
    serving.export(small("relu"), tmp_path / "made", format="litert", check=False, overwrite=True)
    assert first.path.read_bytes() != before


def test_bad_input(tmp_path):
    with pytest.raises(InputError, match="Did you mean 'onnx'"):
        serving.export(small(), tmp_path / "made", format="onx")
    with pytest.raises(InputError, match="There is no model at"):
        serving.export(tmp_path / "none.keras", tmp_path / "made")
    with pytest.raises(InputError, match="There is no"):
        serving.run(tmp_path / "none.onnx", {})
    (tmp_path / "model.txt").write_text("no model")
    with pytest.raises(InputError, match="is no exported model"):
        serving.run(tmp_path / "model.txt", {})
    (tmp_path / "broken.onnx").write_text("no model")
    with pytest.raises(MachineError, match="onnxruntime does not run"):
        serving.run(tmp_path / "broken.onnx", {})


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("form", serving.FORMATS)
@pytest.mark.parametrize("kind", ["pieces", "stages", "float16", "bfloat16", "text"])
def test_models_of_every_layout_and_precision(kind, form, tmp_path, policy):
    policy({"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}.get(kind, "float32"))
    with tfgpu.strategy("mirrored", devices=2).scope():
        if kind == "text":
            model = tfgpu.models.transformer((8,), 16, width=16, heads=2, depth=1)
        else:
            model = tfgpu.models.mlp((6,), 3, widths=(16, 16))
    if kind == "pieces":
        model = tfgpu.parallel.shard(model, stage=3)
    if kind == "stages":
        model = tfgpu.parallel.pipeline(tfgpu.models.mlp((6,), 3, widths=(16, 16)), stages=2, microbatches=2)
    if kind in serving.FORMATS[form].lacks:
        with pytest.raises(InputError, match=f"does not compute in {kind}"):
            serving.export(model, tmp_path / "made", format=form)
        return
    assert serving.export(model, tmp_path / "made", format=form).difference < 0.05


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    model = small()
    model.save(tmp_path / "model.keras")
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(tmp_path), str(tmp_path / "out"), "--format", "onnx", "--format", "litert", "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert [each["format"] for each in found] == ["onnx", "litert"] and all(each["difference"] < 1e-6 for each in found)
