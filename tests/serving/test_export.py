"""Exported models give the model's outputs, in a process without tfgpu."""

import json
import os
import pickle
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import atomic, cli, serving
from tfgpu.errors import InputError, MachineError
from tfgpu.serving import examples, formats

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
    """Computes something else in a graph."""

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
    with pytest.raises(InputError, match="does not exist"):
        serving.run(tmp_path / "none.onnx", {})
    (tmp_path / "model.txt").write_text("no model")
    with pytest.raises(InputError, match="is not an exported model"):
        serving.run(tmp_path / "model.txt", {})
    (tmp_path / "broken.onnx").write_text("no model")
    with pytest.raises(MachineError, match="onnxruntime cannot run"):
        serving.run(tmp_path / "broken.onnx", {})


@pytest.mark.slow
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
        with pytest.raises(InputError, match=f"does not support {kind}"):
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


def named(width=4):
    b, a = keras.Input((3,), name="b"), keras.Input((3,), name="a")
    outputs = {"score_2": keras.layers.Dense(width)(b), "box_10": keras.layers.Dense(width)(a)}
    return keras.Model([b, a], outputs)


@pytest.mark.sample("litert")
@pytest.mark.parametrize("form", ["savedmodel", pytest.param("onnx", marks=pytest.mark.slow), "litert"])
def test_outputs_with_names_come_in_the_names_order(form, tmp_path):
    """Outputs are not sorted by the numbers in their names: "box_10" comes before "score_2"."""
    model = named()
    one, other = (RNG.normal(size=(4, 3)).astype("float32") for _ in range(2))
    made = serving.export(model, tmp_path / "made", format=form, example={"a": one, "b": other})
    assert made.difference < 1e-5
    box, score = serving.run(made.path, {"a": one, "b": other})
    expected = model([other, one])
    np.testing.assert_allclose(box, expected["box_10"], atol=1e-6)
    np.testing.assert_allclose(score, expected["score_2"], atol=1e-6)


def test_an_example_by_names_in_order_or_not_at_all(tmp_path):
    model = named()
    with pytest.raises(InputError, match="inputs are b, a"):
        serving.export(model, tmp_path / "made", example={"a": np.ones((2, 3)), "c": np.ones((2, 3))})
    with pytest.raises(InputError, match="inputs are b, a"):
        serving.export(model, tmp_path / "made", example=np.ones((2, 3)))
    with pytest.raises(InputError, match=r"for 'a' must be an array of \('rows', 3\). Received: \(2, 4\)"):
        serving.export(model, tmp_path / "made", example=[np.ones((2, 3)), np.ones((2, 4))])
    made = serving.export(small(), tmp_path / "made", format="litert", example=[[1, 2, 3, 4, 5, 6]])
    assert made.difference < 1e-5  # whole numbers, as a list, for float32


def test_axes_of_any_length_are_said_and_taken(tmp_path):
    inputs = keras.Input((None, 3), name="file")  # the name of an argument of numpy.savez
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(2)(inputs)))
    made = serving.export(model, tmp_path / "made", format="litert")
    assert made.inputs == {"file": ((None, None, 3), "float32")}
    rows = RNG.normal(size=(2, 5, 3)).astype("float32")
    np.testing.assert_allclose(serving.run(made.path, {"file": rows})[0], model(rows), atol=1e-6)


def test_the_command_says_which_axes_are_open(tmp_path, capsys):
    inputs = keras.Input((None, 3), name="steps")
    keras.Model(inputs, keras.layers.Dense(2)(inputs)).save(tmp_path / "model.keras")
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(tmp_path / "model.keras"), str(tmp_path / "made"), "--format", "litert"])
    assert ended.value.code == 0 and "steps: float32 (rows, any, 3)" in capsys.readouterr().out


def text_model():
    texts = keras.layers.TextVectorization(output_sequence_length=4, vocabulary=["one", "zwei", "drei", "né"])
    keras.utils.set_random_seed(0)
    layers = [texts, keras.layers.Embedding(9, 3), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((), dtype="string", name="text"), *layers])


@pytest.mark.slow
def test_a_model_that_takes_text(tmp_path):
    model, texts = text_model(), ["one né", "zwei", "", "drei drei one"]
    with pytest.raises(InputError, match="has text inputs.*example=TEXTS"):
        serving.export(model, tmp_path / "made")
    made = serving.export(model, tmp_path / "made", example=texts)
    assert made.inputs == {"text": ((None,), "string")} and made.difference < 1e-5
    expected = model(tf.constant(texts))
    assert len(np.unique(np.round(expected, 4), axis=0)) == 4
    for given in (np.array(texts), tf.constant(texts), np.array(texts, object)):
        np.testing.assert_allclose(serving.run(made.path, {"text": given})[0], expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content"),
    [("texts.txt", "one né\nzwei\n\ndrei drei one\n"), ("texts.json", '["one né", "zwei"]')]
    + [("texts.json", '{"text": ["one né", "zwei", ""]}')],
)
def test_texts_on_the_command_line(name, content, tmp_path, capsys):
    text_model().save(tmp_path / "model.keras")
    (tmp_path / name).write_text(content, encoding="utf-8")
    words = ["export", str(tmp_path / "model.keras"), str(tmp_path / "made"), "--json"]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2 and "--example FILE.txt" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--example", str(tmp_path / name)])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)[0]["difference"] < 1e-5


def test_rows_are_read_from_files(tmp_path):
    rows = np.arange(6.0).reshape(2, 3)
    np.save(tmp_path / "a.npy", rows)
    np.savez(tmp_path / "a.npz", a=rows, b=rows + 1)
    (tmp_path / "a.json").write_text('{"a": [[1, 2.5]], "b": [[3]]}')
    assert examples.read(tmp_path / "a.npy").tolist() == rows.tolist()
    assert {name: found.tolist() for name, found in examples.read(tmp_path / "a.npz").items()} == {
        "a": rows.tolist(),
        "b": (rows + 1).tolist(),
    }
    found = examples.read(tmp_path / "a.json")
    assert found["a"].dtype == "float32" and found["a"].tolist() == [[1.0, 2.5]] and found["b"].tolist() == [[3]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"1", "must end in .txt, .json, .npy, .npz"),
        ("none.txt", None, "No such file"),
        ("a.txt", b"", "has no rows"),
        ("a.txt", b"\xff\xfe", "cannot be parsed"),
        ("a.json", b"[[1, 2], [3]]", "cannot be parsed"),
        ("a.json", b'{"a": 3}', "cannot be parsed"),
        ("a.json", b"[[1, null]]", "cannot be parsed"),
        ("a.json", b"{}", "has no rows"),
        ("a.json", b"[", "cannot be parsed"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.npy", b"PK\x03\x04", "cannot be parsed"),
        ("a.npz", pickle.dumps({}), "cannot be parsed"),
    ],
)
def test_a_file_without_rows(name, content, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        examples.read(tmp_path / name)


@pytest.mark.parametrize(
    ("dtype", "rows", "words"),
    [
        ("float32", [["a", "b"]], "must be of float32. Received: texts"),
        ("string", [[1, 2]], "must be of texts. Received: int64"),
        ("int32", [[1.5, 2]], "int32, which cannot represent 1.5"),
        ("int32", [[5_000_000_000, 2]], "cannot represent 5000000000"),
        ("uint8", [[256, 2]], "cannot represent 256"),
        ("int32", [[float("nan"), 2]], "cannot represent nan"),
        ("float32", {"x": [[1, 2]], "y": [[1, 2]]}, "only input of the model is x. Received: x, y"),
    ],
)
def test_an_example_is_what_the_model_takes_and_its_numbers_stay(dtype, rows, words):
    here = keras.Input((2,), dtype=dtype, name="x")
    model = keras.Model(here, keras.layers.Identity()(here))
    with pytest.raises(InputError, match=words):
        examples.inputs_of(model, rows if isinstance(rows, dict) else np.array(rows))
    if dtype not in ("float32", "string"):
        assert examples.inputs_of(model, np.array([[1.0, 2.0]]))["x"].dtype == dtype


def test_every_input_of_an_example_has_as_many_rows():
    with pytest.raises(InputError, match="the same number of rows. Received: {'b': 2, 'a': 3}"):
        examples.inputs_of(named(), {"b": np.ones((2, 3)), "a": np.ones((3, 3))})


@pytest.mark.parametrize(("name", "content"), [("a.txt", "chat\n"), ("a.json", '["chat"]')])
def test_a_mark_of_the_byte_order_is_no_text(name, content, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert list(examples.read(tmp_path / name)) == ["chat"]


class Named(keras.layers.Layer):
    """Identifies its class."""

    def call(self, x):
        return tf.gather(tf.constant(["chat", "né"]), tf.argmax(x, -1))

    def compute_output_spec(self, x):
        return keras.KerasTensor((None,), dtype="string")


class Unregistered(keras.layers.Layer):
    def __init__(self, times, **options):
        super().__init__(**options)
        self.times = times

    def call(self, x):
        return x * self.times


@pytest.mark.slow
def test_layers_of_ones_own_need_not_be_registered(tmp_path):
    same = keras.layers.Dense(2, kernel_initializer="identity")
    model = keras.Sequential([keras.Input((2,)), Unregistered(3.0), same, Named()])
    rows = np.array([[1, 0], [0, 1]], "float32")
    made = serving.export(model, tmp_path / "made", example=rows)
    assert serving.run(made.path, {next(iter(made.inputs)): rows})[0].tolist() == [b"chat", "né".encode()]
    model.save(tmp_path / "model.keras")
    with pytest.raises(InputError, match="uses the class Unregistered, which is not registered. Decorate the class"):
        serving.export(tmp_path / "model.keras", tmp_path / "other")


@keras.saving.register_keras_serializable("test_export")
class Lost(keras.layers.Layer):
    """Returns NaN in a graph."""

    def call(self, x):
        return x if tf.executing_eagerly() else x * float("nan")


def test_not_a_number_is_no_agreement(tmp_path):
    with pytest.raises(MachineError, match="differ from the model's by inf"):
        serving.export(keras.Sequential([keras.Input((2,)), Lost()]), tmp_path / "made", format="litert")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["savedmodel", "litert"])
def test_only_an_earlier_export_is_replaced(form, tmp_path):
    """Other files are not removed, and a run is not replaced by its own export."""
    run = tmp_path / "run.tflite"
    run.mkdir()
    small().save(run / "model.keras")
    (tmp_path / "link.tflite").symlink_to(run)
    (tmp_path / "notes").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    for place in (run, tmp_path / "link.tflite", *([tmp_path / "notes", tmp_path] if form == "savedmodel" else [])):
        with pytest.raises(InputError, match="is not replaced"):
            serving.export(run, place, format=form, overwrite=True)
    with pytest.raises(InputError, match="notes is a file"):
        serving.export(run, tmp_path / "notes" / "1", format=form)
    assert sorted(tmp_path.rglob("*")) == before


def test_versions_beside_an_export_are_kept(tmp_path):
    serving.export(small(), tmp_path / "served", check=False)
    serving.export(small(), tmp_path / "served" / "1", check=False)
    with pytest.raises(InputError, match=r"contains more than an exported model \(1\)"):
        serving.export(small(), tmp_path / "served", check=False, overwrite=True)
    serving.export(small("relu"), tmp_path / "served" / "1", check=False, overwrite=True)
    assert sorted(each.name for each in (tmp_path / "served").iterdir() if not each.name.startswith(".")) == [
        "1", "assets", "fingerprint.pb", "saved_model.pb", "variables"
    ]  # fmt: skip


def test_what_was_there_stays_where_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    made = serving.export(small(), tmp_path / "made", check=False)
    before = {each: each.read_bytes() for each in made.path.rglob("*") if each.is_file()}

    rename = os.rename

    def no_room(source, target):
        if os.path.dirname(target) != str(tmp_path):  # the copy of the model that is exported
            return rename(source, target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)  # as where the file system cannot
    monkeypatch.setattr("os.rename", no_room)
    with pytest.raises(MachineError, match="No space left"):
        serving.export(small("relu"), tmp_path / "made", check=False, overwrite=True)
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_by_the_new_one_alone(exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    formats.put(tmp_path / "new", tmp_path / "old")
    assert [each.relative_to(tmp_path).as_posix() for each in sorted(tmp_path.rglob("*"))] == ["old", "old/new"]


def test_there_is_a_model_at_every_moment(tmp_path):
    """Two renames would leave a moment without an export, for example if the process is killed there."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "saved_model.pb").write_text("0")
    missing, over = [], threading.Event()

    def look():
        while not over.is_set():
            try:
                os.stat(tmp_path / "made" / "saved_model.pb")
            except FileNotFoundError:
                missing.append(time.monotonic())

    looks = threading.Thread(target=look)
    looks.start()
    try:
        for number in range(300):
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "saved_model.pb").write_text(str(number))
            formats.put(tmp_path / "new", tmp_path / "made")
    finally:
        over.set()
        looks.join()
    assert not missing and (tmp_path / "made" / "saved_model.pb").read_text() == "299"


def test_a_damaged_model_is_named(tmp_path):
    model = small()
    model.save(tmp_path / "model.keras")
    with open(tmp_path / "model.keras", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(InputError, match="model.keras is damaged, or not a Keras model.*--resume"):
        serving.export(tmp_path, tmp_path / "made", format="litert")
