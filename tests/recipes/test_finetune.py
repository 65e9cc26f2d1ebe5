"""`tfgpu train finetune-text`: a tiny model of KerasHub, fine-tuned in each layout; what is wrong is one error."""

import importlib
import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import yaml

import tfgpu
from tfgpu.attention import blockwise
from tfgpu.errors import InputError
from tfgpu.finetuning import layouts, presets
from tfgpu.losses import row_chunks
from tfgpu.losses.chunked_crossentropy import ChunkedCrossentropy
from tfgpu.recipes import finetune, ready, recipe, runner

sys.path.insert(0, str(Path(__file__).parents[1] / "finetuning"))
import tiny

LENGTH = 48
SMALL = {"epochs": 2, "length": LENGTH, "global_batch": 4, "learning_rate": 0.01, "sample_tokens": 4, "samples": 2}
SMALL |= {"watch_machine": False, "validation": 0.1, "test": 0.2}
needs_hub = pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason="needs KerasHub")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    tiny.llama3(folder / "llama", layers=2)
    tiny.pairs(folder / "data.jsonl", 24)
    return folder


def settings(folder, **changed):
    return recipe.make(
        {
            **ready.read("finetune-text"),
            "data": str(folder / "data.jsonl"),
            "preset": str(folder / "llama"),
            "virtual_devices": len(tfgpu.environment.devices("CPU")),
            **SMALL,
            **changed,
        }
    )


LAYOUTS = {
    "mirrored": {"layout": "mirrored", "devices": ("CPU:0", "CPU:1")},
    "zero1": {"layout": "zero1", "devices": ("CPU:0", "CPU:1")},
    "zero3": {"layout": "zero3", "devices": ("CPU:0", "CPU:1")},
    "tensor": {"layout": "tensor", "devices": ("CPU:0", "CPU:1")},
    "pipeline": {"layout": "pipeline", "devices": ("CPU:0", "CPU:1"), "microbatches": 2},
}


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory):
    """Runs on one device: of all weights, and of LoRA."""
    runs = tmp_path_factory.mktemp("one")
    return {
        lora: runner.run(settings(folder, layout="one", lora=lora, epochs=1), output=runs / str(lora))
        for lora in (None, 2)
    }


@needs_hub
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "lora"),
    [("mirrored", None), ("zero1", 2), ("zero3", None), ("zero3", 2), ("pipeline", 2), ("tensor", None), ("tensor", 2)],
)
def test_each_layout_learns_what_one_device_learns(name, lora, one, folder, tmp_path):
    expected = one[lora]
    found = runner.run(settings(folder, lora=lora, epochs=1, **LAYOUTS[name]), output=tmp_path / "run")
    for metric in ("loss", "val_loss", "perplexity", "val_perplexity", "accuracy", "val_accuracy"):
        np.testing.assert_allclose(found.history[0][metric], expected.history[0][metric], rtol=1e-4, err_msg=metric)
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)
    assert found.facts["pretrained"] == {**expected.facts["pretrained"], "layout": name}
    assert found.facts["devices"] == ["CPU:0", "CPU:1"]
    there, here = (weights(run.run_directory / "preset") for run in (found, expected))
    for one_weight, other in zip(here, there, strict=True):
        np.testing.assert_allclose(other, one_weight, atol=2e-4)


CHUNKED = [("one", None), ("mirrored", None), ("zero1", 2), ("zero3", None), ("zero3", 2), ("recompute", 2)]


@needs_hub
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "lora"), CHUNKED)
def test_a_loss_by_chunks_learns_what_all_logits_teach(name, lora, one, folder, tmp_path, monkeypatch):
    passes, stock = [], row_chunks.compute
    monkeypatch.setattr(row_chunks, "compute", lambda *args, **more: passes.append(more) or stock(*args, **more))
    expected, layout = one[lora], LAYOUTS.get(name, {"layout": "one", "recompute": name == "recompute"})
    what = settings(folder, lora=lora, epochs=1, loss_chunk=50, **layout)
    found = runner.run(what, output=tmp_path / "run")
    assert len(passes) >= 2 and {each["size"] for each in passes} == {50}
    for metric in ("loss", "val_loss", "perplexity", "val_perplexity", "accuracy", "val_accuracy"):
        np.testing.assert_allclose(found.history[0][metric], expected.history[0][metric], rtol=1e-4, err_msg=metric)
    assert found.facts["pretrained"]["logits"] == "by chunks"
    there, here = (weights(run.run_directory / "preset") for run in (found, expected))
    for one_weight, other in zip(here, there, strict=True):
        np.testing.assert_allclose(other, one_weight, atol=2e-4)


@needs_hub
@pytest.mark.parametrize(
    ("numbers", "is_chunked"), [(3 * row_chunks.NUMBERS, False), (3 * row_chunks.NUMBERS + 1, True)]
)
def test_a_large_vocabulary_is_chunked(numbers, is_chunked, folder):
    layout = layouts.Layout("one", None, ("CPU:0",))
    loss = finetune._loss(settings(folder), layout, numbers, True)
    assert isinstance(loss, ChunkedCrossentropy) == is_chunked
    assert not isinstance(finetune._loss(settings(folder), layout, numbers, False), ChunkedCrossentropy)


@needs_hub
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "tensor"])
def test_a_chunk_that_a_layout_cannot_have_is_named(name, folder):
    what = settings(folder, loss_chunk=50, **LAYOUTS[name])
    with pytest.raises(InputError, match=f"loss_chunk=50, layout={name}"):
        finetune.build(what, tfgpu.Cluster.from_environment())


@needs_hub
@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "pipeline"])
def test_flash_attention_learns_the_same(name, one, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 16)
    expected = one[2]
    found = runner.run(
        settings(folder, lora=2, epochs=1, flash_attention=True, **LAYOUTS[name]), output=tmp_path / "run"
    )
    for metric in ("loss", "val_loss", "perplexity"):
        np.testing.assert_allclose(found.history[0][metric], expected.history[0][metric], rtol=1e-4, err_msg=metric)


def weights(preset):
    return importlib.import_module("keras_hub").models.CausalLM.from_preset(str(preset)).get_weights()


@needs_hub
@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, 2])
def test_the_saved_preset_has_the_test_loss_of_the_run_over_tokens(lora, one, folder):
    """Stock KerasHub, each sequence by itself: neither packing nor batches nor replicas change the mean over tokens."""
    run = one[lora]
    task = importlib.import_module("keras_hub").models.CausalLM.from_preset(str(run.run_directory / "preset"))
    what = settings(folder, layout="one", lora=lora, epochs=1)
    examples = finetune.build(what, tfgpu.Cluster.from_environment()).finetuned.parts.test
    losses = []
    for example in examples:
        given = {"token_ids": example.ids[None], "padding_mask": np.ones_like(example.ids)[None]}
        counts = example.targets >= 0
        logits = np.asarray(task(given))[0][counts]
        losses += list(np.asarray(keras.losses.sparse_categorical_crossentropy(example.targets[counts], logits, True)))
    assert run.loss == pytest.approx(float(np.mean(losses)), rel=1e-4)
    before = weights(folder / "llama")
    moved = [not np.array_equal(a, b) for a, b in zip(before, task.get_weights(), strict=True)]
    assert all(moved) if lora is None else 0 < sum(moved) < len(moved)


@needs_hub
@pytest.mark.slow
def test_the_report_has_what_the_model_writes(one):
    run = one[2]
    page = (run.run_directory / "report.html").read_text()
    assert "What the model writes" in page and "test perplexity" in page and "llama on data.jsonl" in page
    assert "likeliest token" in page and "&lt;|start_header_id|&gt;user" in page and "eot_id" not in page
    facts = yaml.safe_load((run.run_directory / "config.yaml").read_text())["run"]["pretrained"]
    assert facts["packed"] and facts["template"] == "llama3" and facts["trainable_parameters"] == 256


@needs_hub
@pytest.mark.slow
def test_a_run_that_goes_on_ends_like_one_that_never_stopped(folder, tmp_path):
    whole = runner.run(
        settings(folder, layout="one", lora=2, schedule="constant", schedule_options={}), output=tmp_path / "a"
    )
    first = settings(folder, layout="one", lora=2, schedule="constant", schedule_options={}, epochs=1)
    runner.run(first, output=tmp_path / "b")
    rest = first.model_copy(update={"epochs": 2})
    rest = runner.run(rest, output=tmp_path / "b", resume=True)
    assert [row["loss"] for row in rest.history] == [row["loss"] for row in whole.history]
    for one_weight, other in zip(*(weights(tmp_path / name / "preset") for name in "ab"), strict=True):
        np.testing.assert_array_equal(one_weight, other)


@needs_hub
@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "mirrored"])
def test_a_folder_of_hugging_face_is_read_as_kerashub_converts_it(name, folder, tmp_path):
    """Exported by KerasHub, read into pieces under LoRA: the logits are those of the model that KerasHub reads."""
    models = importlib.import_module("keras_hub").models
    stock = models.CausalLM.from_preset(str(folder / "llama"))
    stock.export_to_transformers(str(tmp_path / "hf"))
    stock = models.CausalLM.from_preset(str(tmp_path / "hf"))
    what = settings(folder, preset=str(tmp_path / "hf"), lora=2, **LAYOUTS[name])
    job = finetune.build(what, tfgpu.Cluster.from_environment())
    tokens = np.array([[1, 50, 60, 70]])
    given = {"token_ids": tokens, "segment_ids": np.ones_like(tokens)}
    expected = np.asarray(stock({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}))
    np.testing.assert_allclose(job.model.predict(given, verbose=0), expected, atol=1e-5)


@needs_hub
@pytest.mark.slow
def test_a_preset_with_weights_in_several_files_is_read(folder, tmp_path):
    """As KerasHub saves what has more than 10 GB."""
    stock = importlib.import_module("keras_hub").models.CausalLM.from_preset(str(folder / "llama"))
    stock.save_to_preset(str(tmp_path / "many"), max_shard_size=2e-5)
    assert len(list((tmp_path / "many").glob("model_*.weights.h5"))) > 1
    what = settings(folder, preset=str(tmp_path / "many"), lora=2, **LAYOUTS["zero3"])
    job = finetune.build(what, tfgpu.Cluster.from_environment())
    tokens = np.array([[1, 50, 60, 70]])
    given = {"token_ids": tokens, "segment_ids": np.ones_like(tokens)}
    expected = np.asarray(stock({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}))
    np.testing.assert_allclose(job.model.predict(given, verbose=0), expected, atol=1e-5)


def test_without_kerashub_the_error_says_what_to_install(folder_without_model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install keras-hub"):
        presets.check_library()


@pytest.fixture
def folder_without_model(tmp_path):
    """A folder that looks like a preset, which is enough for what is checked without KerasHub."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({"registered_name": "keras_hub>Llama3Backbone"}))
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    (tmp_path / "llama" / "model.weights.h5").write_text("")
    (tmp_path / "data.jsonl").write_text('{"text": "a"}')
    return tmp_path


def spoil_config(preset):
    (preset / "config.json").write_text("{")


def quantize_config(preset):
    policy = {"class_name": "QuantizedDTypePolicy", "config": {"mode": "int8", "source_name": None}}
    facts = {"registered_name": "keras_hub>Llama3Backbone", "config": {"dtype": policy}}
    (preset / "config.json").write_text(json.dumps(facts))


LACKING = {
    "quantized": (quantize_config, "is quantized, which `tfgpu train` does not fine-tune"),
    "no config": (lambda preset: (preset / "config.json").unlink(), "has no config.json"),
    "no JSON": (spoil_config, "is not a JSON object"),
    "no kind": (lambda preset: (preset / "config.json").write_text("{}"), "from neither KerasHub nor Hugging Face"),
    "no tokenizer": (lambda preset: (preset / "tokenizer.json").unlink(), "has no tokenizer"),
    "no weights": (lambda preset: (preset / "model.weights.h5").unlink(), "has no model.weights.h5"),
    "not converted": (
        lambda preset: (preset / "config.json").write_text('{"model_type": "llama"}'),
        "has no *.safetensors file",
    ),
}


@pytest.mark.parametrize("kind", sorted(LACKING))
def test_a_preset_that_lacks_a_file_is_named(kind, folder_without_model):
    spoil, words = LACKING[kind]
    assert presets.find(folder_without_model / "llama").is_kerashub
    spoil(folder_without_model / "llama")
    with pytest.raises(InputError) as error:
        presets.find(folder_without_model / "llama")
    assert words in str(error.value) and str(folder_without_model) in str(error.value)


WRONG = {
    "no preset": ({"preset": None}, "needs `preset`"),
    "another setting": ({"image_size": 32}, "`image_size` does not apply to a pretrained model"),
    "a layout": ({"layout": "zero"}, "zero1"),
    "a rank": ({"lora": 0}, "`lora`"),
    "another model": ({"model": "cnn", "preset": None, "lora": 8}, "`lora` needs a pretrained model"),
}


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_settings_that_do_not_fit_are_named(kind):
    changed, words = WRONG[kind]
    with pytest.raises(InputError) as error:
        recipe.make({**ready.read("finetune-text"), **changed})
    assert words in str(error.value)


@pytest.mark.parametrize(("missing", "words"), [("data", "There is no file"), ("preset", "There is no preset folder")])
def test_paths_that_are_not_there_are_named_before_anything_starts(missing, words, folder_without_model):
    what = settings(folder_without_model, virtual_devices=0, **{missing: str(folder_without_model / "absent")})
    with pytest.raises(InputError, match=words):
        recipe.check(what)
