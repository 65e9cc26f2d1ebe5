"""Adapters alone: in a file, in checkpoints, from every layout, and back into a base model."""

import h5py
import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.errors import InputError
from tfgpu.parallel import pipeline, shard
from tfgpu.serving import export_adapters, load_adapters

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(24, 8)).astype("float32")
Y = DRAW.normal(size=(24, 3)).astype("float32")


def base(width=16, seed=1):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, "relu", name="body"), keras.layers.Dense(width, "relu", name="neck")]
    return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3, name="head")])


def adapted(rank=2, alpha=None, width=16, seed=1, quantized=None):
    """LoRA on two layers; the third is frozen."""
    model = base(width, seed)
    if quantized:
        model.quantize(quantized)
    for layer in model.layers[:2]:
        layer.enable_lora(rank, lora_alpha=alpha)
        if layer.use_bias:
            layer.bias.trainable = False
    model.layers[2].trainable = False
    return model


def fit(model, *callbacks, epochs=2):
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.AdamW(0.05), "mse")
    model.fit(X, Y, 8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def adapters_of(path):
    found = {}
    with h5py.File(path) as file:
        file["lora"].visititems(
            lambda name, each: found.update({name: np.asarray(each)} if hasattr(each, "dtype") else {})
        )
    return found


@pytest.mark.slow
def test_a_base_gets_its_adapters_back(tmp_path):
    model = fit(adapted(alpha=4), epochs=1)
    file = export_adapters(model, tmp_path / "style")
    assert file.name == "style.lora.h5"
    other = load_adapters(base(), file)
    assert [layer.lora_rank for layer in other.layers[:2]] == [2, 2] and other.layers[0].lora_alpha == 4
    np.testing.assert_array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))
    np.testing.assert_array_equal(load_adapters(adapted(alpha=4), file)(X), model(X))
    for wrong, words in (
        (lambda: export_adapters(base(), tmp_path / "none"), "No layer of .* has LoRA"),
        (lambda: export_adapters(model, file), "exists. Choose another path"),
        (lambda: export_adapters(model, tmp_path / "x", format="peft"), "`base` names the folder"),
        (lambda: load_adapters(adapted(rank=3), file), "has LoRA of rank 2 .* the model has rank 3"),
        (lambda: load_adapters(base(seed=2), file), "another base: 3 of 6 weights differ, such as '.*body/kernel'"),
        (lambda: load_adapters(keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)]), file), "of 6 weights"),
        (lambda: load_adapters(base(), tmp_path / "absent.lora.h5"), "There is no file"),
    ):
        with pytest.raises(InputError, match=words):
            wrong()
    assert load_adapters(base(seed=2), file, check_base=False).layers[0].lora_enabled
    export_adapters(model, file, overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mirrored", "zero 1", "zero 3", "pipeline"])
def test_every_layout_writes_one_devices_file(layout, tmp_path):
    one = export_adapters(fit(adapted()), tmp_path / "one")
    if layout == "pipeline":
        model = pipeline(adapted(), stages=2, microbatches=2, devices=["CPU:0", "CPU:1"])
    else:
        with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
            model = adapted()
        model = shard(model, stage=int(layout[-1])) if layout.startswith("zero") else model
    expected, found = adapters_of(one), adapters_of(export_adapters(fit(model), tmp_path / "many"))
    assert expected.keys() == found.keys() and len(found) == 5
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5)
    np.testing.assert_allclose(
        load_adapters(base(), one)(X), load_adapters(base(), tmp_path / "many.lora.h5")(X), atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_adapters_of_a_quantized_base(kind, tmp_path):
    model = fit(adapted(quantized=kind))
    file, again = export_adapters(model, tmp_path / "a"), base()
    with pytest.raises(InputError, match="weights"):
        load_adapters(base(), file)  # of floats
    again.quantize(kind)
    np.testing.assert_array_equal(load_adapters(again, file)(X), model(X))


@pytest.mark.slow
def test_what_trains_besides_lora_is_in_the_file(tmp_path):
    model = adapted()
    model.layers[2].trainable = True
    file = export_adapters(fit(model), tmp_path / "a")
    np.testing.assert_array_equal(load_adapters(base(), file)(X), model(X))


def arrays_in(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "stage"), [(1, 0), (2, 0), (2, 3)])
def test_a_run_resumes_from_its_adapters_alone(replicas, stage, tmp_path):
    def made():
        strategy = tfgpu.strategy(
            "mirrored" if replicas > 1 else "one_device", devices=[f"CPU:{at}" for at in range(replicas)]
        )
        with strategy.scope():
            model = adapted()
        return shard(model, stage=stage) if stage else model

    whole = fit(made(), Checkpoint(tmp_path / "whole"), epochs=4)
    fit(made(), Checkpoint(tmp_path / "run", only="lora"), epochs=2)
    again = fit(made(), Checkpoint(tmp_path / "run", only="lora"), epochs=4)
    for mine, others in zip(whole.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, others)
    for change, words in (
        ({"rank": 3}, "adapters of rank 2 for 2 layers; the model has 2 .* of rank 3"),
        ({"seed": 2}, "another base"),
    ):
        with pytest.raises(InputError, match=words):
            fit(adapted(**change), Checkpoint(tmp_path / "run"), epochs=5)
    with pytest.raises(InputError, match=r"Checkpoint\(only='lora'\) saves adapters, and no layer"):
        fit(base(), Checkpoint(tmp_path / "new", only="lora"))
    with pytest.raises(InputError, match="only"):
        Checkpoint(tmp_path / "new", only="adapters")


@pytest.mark.slow
def test_adapters_take_a_fiftieth_of_a_checkpoint(tmp_path):
    """Rank 4 on all attention projections of a transformer of 4 blocks of 512."""
    tfgpu.repair_keras()

    def made():
        keras.utils.set_random_seed(1)
        model = tfgpu.models.transformer((16,), 256, width=512, heads=8, depth=4)
        model.trainable = False
        for layer in model._flatten_layers(include_self=False):
            if isinstance(layer, keras.layers.EinsumDense):
                layer.trainable = True
                layer.enable_lora(4)
                layer.bias.trainable = False
        return model

    tokens, sizes = DRAW.integers(0, 256, (4, 16)), {}
    for only in (None, "lora"):
        model = made()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(tokens, tokens, verbose=0, callbacks=[Checkpoint(tmp_path / str(only), only=only)])
        sizes[only] = arrays_in(tmp_path / str(only))
    model.save(tmp_path / "model.keras")
    file = export_adapters(model, tmp_path / "a")
    assert sizes["lora"] <= 0.02 * sizes[None] and file.stat().st_size <= 0.02 * sizes[None], (sizes, file.stat())


WORKERS = """
import json, sys
import keras, numpy as np, tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.serving import export_adapters, load_adapters

folder, strategy, found = sys.argv[1], tfgpu.strategy("multi_worker", devices=["CPU:0"]), {}
x = np.random.default_rng(0).normal(size=(24, 8)).astype("float32")

def base():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])

def made(stage):
    with strategy.scope():
        model = base()
        model.layers[0].enable_lora(2)
        model.layers[1].trainable = False
    return tfgpu.parallel.shard(model, stage) if stage else model

def fit(model, epochs, *callbacks):
    with strategy.scope():
        model.compile(keras.optimizers.AdamW(0.05), "mse")
    model.fit(x, x[:, :3], 8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model

for stage in (0, 3):
    whole = fit(made(stage), 4)
    fit(made(stage), 2, Checkpoint(f"{folder}/run{stage}", only="lora"))
    again = fit(made(stage), 4, Checkpoint(f"{folder}/run{stage}", only="lora"))
    pairs = zip(whole.get_weights(), again.get_weights(), strict=True)
    found[f"resumed {stage}"] = max(float(np.abs(one - other).max()) for one, other in pairs)
    file = export_adapters(whole, f"{folder}/adapters{stage}")
    kernel = np.array(whole.layers[0].lora_kernel_a.numpy())
    if strategy.extended.should_checkpoint:
        alone = load_adapters(base(), file)
        found[f"loaded {stage}"] = float(np.abs(np.array(alone.layers[0].lora_kernel_a) - kernel).max())
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_two_workers_write_and_read_adapters(together, tmp_path):
    answers = together(WORKERS, {"worker": 2}, tmp_path, timeout=550)
    assert len(answers["worker0"]) == 4 and len(answers["worker1"]) == 2
    assert not any(difference for found in answers.values() for difference in found.values())
