"""`finetune-text` with flash attention and a loss by chunks: three steps in a layout learn what one device learns."""

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "finetuning"))
import learn
import tiny

pytest.importorskip("keras_hub")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SETTINGS = {"epochs": 1, "length": 96, "global_batch": 4, "learning_rate": 0.01, "validation": 0.0, "test": 0.0}
SETTINGS |= {"flash_attention": True, "virtual_devices": 4, "schedule": "constant", "schedule_options": {}}
SETTINGS |= {"optimizer_options": {"epsilon": 1e-4}}  # Adam makes whole steps of gradients that are 0 but for rounding
WAYS = {"full": {}, "LoRA": {"lora": 2}}
TWO = {"devices": ["CPU:0", "CPU:1"]}
LAYOUTS = {
    **{name: {"layout": name, **TWO} for name in ("mirrored", "zero1", "zero2", "zero3", "tensor")},
    "pipeline": {"layout": "pipeline", "microbatches": 2, **TWO},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    tiny.llama3(folder / "llama", layers=2)
    tiny.pairs(folder / "data.jsonl", 22)  # two in a row, and eleven rows: the last batch is not full
    return folder


def settings(folder, way, layout):
    chunk = {} if layout.get("layout") in ("tensor", "pipeline") else {"loss_chunk": 50}
    return {
        **SETTINGS,
        "data": str(folder / "data.jsonl"),
        "preset": str(folder / "llama"),
        **WAYS[way],
        **layout,
        **chunk,
    }


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory):
    """What one device learns, without flash attention and with all logits."""
    found = {}

    def of(way):
        if way not in found:
            path = tmp_path_factory.mktemp("one") / "preset"
            given = settings(folder, way, {"layout": "one"}) | {"flash_attention": False, "loss_chunk": None}
            updates, losses = learn.learn(given, path)
            assert updates == 3
            found[way] = path, losses
        return found[way]

    return of


def arrays(preset):
    with h5py.File(preset / "model.weights.h5") as file:
        found = {}
        file.visititems(lambda name, each: found.update({name: each[()]}) if isinstance(each, h5py.Dataset) else None)
    return found


def check(there, losses, one, before):
    """What was learned is what one device learned, and not what there was before."""
    expected, expected_losses = one
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    before, there, here = (arrays(each) for each in (before, there, expected))
    assert there.keys() == here.keys()
    for at, value in here.items():
        np.testing.assert_allclose(there[at].astype("float64"), value, atol=1e-5, err_msg=at)
    assert any(not np.array_equal(before[at], value) for at, value in here.items() if at in before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_three_steps_learn_what_one_device_learns(name, way, one, folder, tmp_path):
    given, path = settings(folder, way, LAYOUTS[name]), tmp_path / "preset"
    updates, losses = learn.learn(given, path)
    assert updates == 3
    check(path, losses, one(way), Path(given["preset"]))


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mirrored", "zero3"])
def test_two_workers_learn_what_one_device_learns(name, way, one, folder, together, tmp_path):
    given, path = settings(folder, way, {"layout": name, "virtual_devices": 1}), tmp_path / "preset"
    (tmp_path / "settings.json").write_text(json.dumps(given))
    said = together(Path(learn.__file__).read_text(), {"worker": 2}, tmp_path / "settings.json", path)
    assert said["worker0"] == said["worker1"]
    updates, losses = said["worker0"]
    assert updates == 3
    check(path, losses, one(way), Path(given["preset"]))
