"""`parallel.load_weights`: files of weights go to wherever a model's variables are, and nothing else is read."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

import tfgpu
from tfgpu.compat import variables
from tfgpu.core.state.array_slices import ArraySlices, flat_part
from tfgpu.core.state.sharded_variable import merged
from tfgpu.parallel import Mesh, apply, costs, load_weights, model_graph, pipeline, place, shard, tensor
from tfgpu.parallel.pipeline import row_mixing

layers = keras.layers
X = np.random.default_rng(0).normal(size=(6, 8)).astype("float32")


def made(seed=1, dtype="float32"):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8,))
    x = layers.Dense(12, "relu", name="up", dtype=dtype)(inputs)
    x = layers.BatchNormalization(name="norm")(layers.Dense(7, name="down", dtype=dtype)(x))
    return keras.Model(inputs, layers.Dense(3, name="head")(x), name="net")


def in_scope(kind, devices, seed=2):
    with tfgpu.strategy(kind, devices=devices).scope():
        return made(seed)


FOUR, TWO = [f"CPU:{at}" for at in range(4)], ["CPU:0", "CPU:1"]
LAYOUTS = {
    "one device": lambda: in_scope("one_device", "CPU:0"),
    "mirrored": lambda: in_scope("mirrored", TWO),
    "ZeRO 1": lambda: shard(in_scope("mirrored", TWO), 1),
    "ZeRO 3": lambda: shard(in_scope("mirrored", FOUR), 3),
    "ZeRO 3 on the hosts": lambda: shard(in_scope("mirrored", TWO), 3, offload=True),
    "tensor": lambda: tensor(made(2), devices=TWO, plan={"up": "column", "down": "row"}),
    "pipeline": lambda: pipeline(made(2), 2, 2, cuts=["down"], devices=TWO),
    "place": lambda: place(made(2), {"up": "CPU:2", "*": "CPU:1"}),
    "data x tensor, ZeRO 2": lambda: apply(
        made(2), Mesh(data=2, tensor=2, devices=FOUR), plan={"up": "column", "down": "row"}, zero=2
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same weights in each kind of file, and what they are."""
    folder, model = tmp_path_factory.mktemp("files"), made()
    model.get_layer("norm").moving_mean.assign(np.arange(7.0))
    model.save(folder / "m.keras")
    model.save_weights(folder / "m.weights.h5")
    model.save_weights(folder / "parts.weights.json", max_shard_size=500 / 2**30)
    assert len(list(folder.glob("parts_*.weights.h5"))) > 2
    with zipfile.ZipFile(folder / "m.keras") as stored, zipfile.ZipFile(folder / "packed.keras", "w", 8) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    arrays = {variable.path.replace("/", "."): np.array(variable.numpy()) for variable in model.weights}
    safetensors.numpy.save_file(arrays, folder / "m.safetensors")
    (folder / "many").mkdir()
    names, weight_map = sorted(arrays), {}
    for at, part in enumerate((names[:4], names[4:])):
        safetensors.numpy.save_file({name: arrays[name] for name in part}, folder / f"many/{at}.safetensors")
        weight_map |= dict.fromkeys(part, f"{at}.safetensors")
    (folder / "many/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder, model


@pytest.mark.parametrize(
    "file", ["m.safetensors", "many", "m.keras", "packed.keras", "m.weights.h5", "parts.weights.json"]
)
@pytest.mark.sample("m.safetensors")
def test_every_layout_gets_the_weights_of_every_file(files, file):
    folder, model = files
    for name, layout in LAYOUTS.items():
        found = layout()
        assert load_weights(found, folder / file) is found
        for mine, expected, variable in zip(found.get_weights(), model.get_weights(), model.weights, strict=True):
            np.testing.assert_array_equal(mine, expected, err_msg=f"{name} {variable.path}")


def test_keras_files_reach_shards_and_stages(files):
    folder, model = files
    for layout in ("ZeRO 3", "tensor"):
        found = load_weights(LAYOUTS[layout](), folder / "m.keras")
        for mine, expected in zip(found.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("layout", ["ZeRO 3", "tensor", "one device"])
def test_each_device_reads_only_its_part(layout):
    """A kernel of 8 x 12 in four pieces of 24 numbers is read in rows 0-1, 2-3, ...; in columns, by the half."""
    value, reads = np.arange(96, dtype="float32").reshape(8, 12), []

    def read(index):
        reads.append(tuple(part.indices(size)[:2] for part, size in zip(index, (8, 12), strict=True)))
        return value[index]

    variable = next(v for v in merged(LAYOUTS[layout]().weights) if v.path.endswith("up/kernel"))
    variable.assign(ArraySlices(value.shape, value.dtype, read))
    rows, columns = (0, 8), (0, 12)
    expected = {
        "ZeRO 3": [((at, at + 2), columns) for at in (0, 2, 4, 6)],
        "tensor": [(rows, (0, 6)), (rows, (6, 12))],
        "one device": [(rows, columns)],
    }
    assert reads == expected[layout]
    np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2)])
def test_a_flat_part_is_that_of_the_whole_array(shape):
    value = np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    lazy = ArraySlices(shape, value.dtype, lambda index: value[index or ...])
    for start in range(0, 14, 3):
        expected = np.pad(value.reshape(-1), (0, 20))[start : start + 5]
        np.testing.assert_array_equal(flat_part(value, start, 5), expected)
        np.testing.assert_array_equal(flat_part(lazy, start, 5), expected)


def test_other_dtypes_are_rounded_as_keras_rounds_them(tmp_path):
    model = made()
    half = {v.path: tf.cast(v.numpy(), tf.bfloat16).numpy() for v in model.weights}
    safetensors.numpy.save_file(half, tmp_path / "half.safetensors")
    for layout in ("ZeRO 3", "mirrored", "tensor"):
        found = load_weights(LAYOUTS[layout](), tmp_path / "half.safetensors")
        for mine, expected in zip(found.get_weights(), half.values(), strict=True):
            np.testing.assert_array_equal(mine, expected.astype("float32"))
    small = made(dtype="bfloat16")
    small.save(tmp_path / "small.keras")
    for mine, expected in zip(
        load_weights(made(3, "bfloat16"), tmp_path / "small.keras").weights, small.weights, strict=True
    ):
        np.testing.assert_array_equal(mine.numpy(), expected.numpy())


def test_names_and_axes_of_another_library(tmp_path):
    model, expected = LAYOUTS["ZeRO 3"](), made()
    kernels = {f"{name}.weight": np.array(expected.get_layer(name).kernel.numpy().T) for name in ("up", "down", "head")}
    kernels = {name: np.ascontiguousarray(value) for name, value in kernels.items()}
    others = {v.path: np.array(v.numpy()) for v in expected.weights if not v.path.endswith("kernel")}
    safetensors.numpy.save_file(kernels | others, tmp_path / "torch.safetensors")

    def name_of(path):
        return (path.replace("/kernel", ".weight"), (1, 0)) if path.endswith("kernel") else None

    load_weights(model, tmp_path / "torch.safetensors", names=name_of)
    for mine, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_the_model_s_own_name_may_be_left_out(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="head")], name="stack")
    assert model.weights[0].path == "stack/head/kernel"
    arrays = {"head.kernel": np.ones((3, 2), "float32"), "other": np.full(2, 5, "float32")}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    load_weights(model, tmp_path / "a.safetensors", names={"head/bias": "other"})
    assert [v.numpy().max() for v in model.weights] == [1, 5]


def test_what_does_not_match_is_listed_and_nothing_is_assigned(tmp_path, caplog):
    model = made()
    before = model.get_weights()
    arrays = {v.path: np.zeros(v.shape, "float32") for v in model.weights}
    del arrays["norm/gamma"]
    arrays |= {"lm_head": np.zeros(2, "float32"), "up/kernel": np.zeros((12, 8), "float32")}
    path = tmp_path / "other.safetensors"
    safetensors.numpy.save_file(arrays, path)
    with pytest.raises(tfgpu.InputError) as caught:
        load_weights(model, path)
    text = str(caught.value)
    for part in (
        "variables that the file does not have: norm/gamma",
        "arrays that the model does not have: lm_head",
        "up/kernel: (12, 8) in the file, (8, 12)",
        "`names`",
    ):
        assert part in text
    for mine, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, other)
    with caplog.at_level("WARNING"):
        load_weights(model, path, partial=True)
    assert "norm/gamma" in caplog.text
    assert not model.get_layer("down").kernel.numpy().any()
    np.testing.assert_array_equal(model.get_layer("up").kernel.numpy(), before[0])


def test_wrong_use_says_what_to_do(tmp_path, files):
    folder, _ = files
    (tmp_path / "cut.safetensors").write_bytes((folder / "m.safetensors").read_bytes()[:-9])
    (tmp_path / "cut.keras").write_bytes(b"PK")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    other = keras.Sequential([keras.Input((8,)), layers.Dense(5)])
    for model, path, options, message in (
        (made(), "nowhere", {}, "There is no"),
        (keras.Sequential([layers.Dense(5)]), folder / "m.keras", {}, "not built"),
        (made(), folder / "m.keras", {"partial": True}, "are for safetensors"),
        (other, folder / "m.keras", {}, "does not match"),
        (made(), "cut.safetensors", {}, "cannot be read"),
        (made(), "cut.keras", {}, "cannot be read"),
        (made(), "", {}, "gone.safetensors"),
        (made(), folder, {"names": {"up/kernel": ("up.kernel", (0, 0))}}, "Name each axis once"),
    ):
        with pytest.raises(tfgpu.InputError, match=message):
            load_weights(model, tmp_path / path, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "keras"])
def test_a_process_holds_little_besides_its_share(tmp_path, kind):
    """12 kernels of 16 MiB in four pieces on the hosts: loading takes a kernel and its copies, not the model."""
    command = [sys.executable, "-m", "benchmarks.loading", "--file", kind, "--json", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MALLOC_MMAP_THRESHOLD_": "65536"}
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=550)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["model_bytes"] > 190 << 20
    assert found["load_bytes"] < 3 * found["largest_bytes"], found


def test_a_deferred_model_takes_no_memory_and_gets_the_values_that_it_would_have_had():
    expected = made(3)
    with tfgpu.parallel.deferred():
        one, other = made(3), made(3)
    assert all(variables.is_deferred(variable) for variable in one.variables)
    found = apply(one, Mesh(data=2), zero=3)
    with tfgpu.strategy("mirrored", devices=TWO).scope(), tfgpu.parallel.deferred():
        sharded = made(3)
    for model in (found, apply(other, Mesh(tensor=2)), shard(sharded, 3)):
        for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    layers.Dense(2)(keras.Input((3,)))  # ends a scope of Keras's that would initialize what waits


class Centered(layers.Layer):
    """Mixes rows, with a weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="random_normal")

    def call(self, x):
        return self.scale * (x - keras.ops.mean(x, 0))


def test_a_pipeline_of_a_deferred_model_has_the_values_of_one_layer_at_a_time(monkeypatch):
    def mixing():
        keras.utils.set_random_seed(3)
        sizes = [layers.Dense(12, "relu", name="up"), Centered(name="centered"), layers.Dense(3, name="down")]
        return keras.Sequential([keras.Input((8,)), *sizes])

    expected = mixing()
    with tfgpu.parallel.deferred():
        model = mixing()
    timed, tried = {}, {}

    def noting(stock, found):
        def run(*args):
            held = {v.path.split("/")[-2] for v in model.variables if not variables.is_deferred(v)}
            found.update({each.name: held for each in args if isinstance(each, model_graph.Call)})
            return stock(*args)

        return run

    monkeypatch.setattr(costs, "_time", noting(costs._time, timed))
    monkeypatch.setattr(row_mixing._Trial, "_agrees", noting(row_mixing._Trial._agrees, tried))
    whole, found = pipeline(expected, 2, 2, devices=TWO, cuts=["down"]), pipeline(model, 2, 2, devices=TWO)
    assert timed == tried == {name: {name} for name in ("up", "centered", "down")}
    for mine, theirs in zip(found.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for each in (whole, found):
        each.compile("sgd", "mse")
        each.fit(X, X[:, :3], batch_size=6, verbose=0)
    for mine, theirs in zip(found.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


SHARE = """
import json, sys
from pathlib import Path
import keras, numpy as np, psutil, safetensors.numpy, tensorflow as tf
import tfgpu

path, width, depth = sys.argv[1], 2048, 16
strategy = tfgpu.strategy("multi_worker", devices=["CPU:0"])

def make(width, depth):
    with strategy.scope(), tfgpu.parallel.deferred():
        dense = [keras.layers.Dense(width, use_bias=False, name=f"layer_{at}") for at in range(depth)]
        model = keras.Sequential([keras.Input((width,)), *dense], name="net")
    return tfgpu.parallel.shard(model, 3)

if strategy.extended.should_checkpoint:
    for name, w, d in (("small", 8, 1), ("large", width, depth)):
        arrays = {f"layer_{at}.kernel": np.full((w, w), at, "float32") for at in range(d)}
        safetensors.numpy.save_file(arrays, f"{path}/{name}.safetensors")
        del arrays
strategy.reduce("SUM", strategy.run(lambda: tf.constant(1)), axis=None)  # the files are there
tfgpu.parallel.load_weights(make(8, 1), f"{path}/small.safetensors")  # what a first call imports does not count
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")
before = psutil.Process().memory_info().rss
model = make(width, depth)
tfgpu.parallel.load_weights(model, f"{path}/large.safetensors")
lines = Path("/proc/self/status").read_text().splitlines()
peak = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
ends = [float(kernel[0, 0]) for kernel in model.get_weights()]
assert ends == list(range(depth)), ends
print(json.dumps(peak - before))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_builds_and_loads_within_its_share_and_the_largest_layer(tmp_path, together, monkeypatch):
    """16 kernels of 16 MiB over two workers: 128 MiB each, and some copies of one while it is drawn, cut and read."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    taken = together(SHARE, {"worker": 2}, tmp_path, timeout=550)
    assert max(taken.values()) < (128 + 7 * 16) << 20 < 16 * 16 << 20, taken
