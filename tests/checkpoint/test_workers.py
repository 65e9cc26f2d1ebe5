"""Several workers write their parts of a checkpoint and read what they need, on one disk or on several."""

import json

import pytest

from tfgpu.checkpoint import storage
from tfgpu.checkpoint.storage import FACTS, Damaged

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MODEL = """
import hashlib, json, os, pathlib, sys
import keras, numpy as np, tensorflow as tf
import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.core.state import sharded_variable

folder, devices = sys.argv[1], int(sys.argv[2])
if devices > 1:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
strategy = tfgpu.strategy("multi_worker", devices=[f"CPU:{at}" for at in range(devices)])
rng = np.random.default_rng(0)
x, y = rng.normal(size=(24, 6)).astype("float32"), rng.normal(size=(24, 1)).astype("float32")

def make(stage, policy="float32", **options):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.Input((6,)), keras.layers.Dense(300, "relu", dtype=policy)]
        layers += [keras.layers.Dense(201, dtype=policy), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(1, dtype="float32")])
        if stage:
            model = tfgpu.parallel.shard(model, stage)
        model.compile(keras.optimizers.AdamW(0.01, **options), "mse", metrics=["mae"])
    return model

def digest(model):
    found = sharded_variable.merged(model.weights) + sharded_variable.merged(model.optimizer.variables)
    return hashlib.sha256(b"".join(np.ascontiguousarray(v.numpy()).tobytes() for v in found)).hexdigest()

def fit(model, epochs, *callbacks):
    return model.fit(x, y, 8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks).history["loss"]
"""

LAYOUTS = (
    MODEL
    + """
said = {"read": {}, "wrote": {}}
for stage in (0, 2, 3):
    model = make(stage)
    for name in sorted(path.name for path in pathlib.Path(folder).glob("saved-*")):
        Checkpoint(f"{folder}/{name}").restore(model)
        said["read"][f"{name} in stage {stage}"] = digest(model)
    fit(model, 1, Checkpoint(f"{folder}/saved-{strategy.num_replicas_in_sync}-{stage}"))
    said["wrote"][f"saved-{strategy.num_replicas_in_sync}-{stage}"] = digest(model)
print(json.dumps(said))
"""
)

RESUMES = (
    MODEL
    + """
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
disk, epochs = folder.replace("RANK", str(rank)), int(sys.argv[3])
whole = make(2, "bfloat16", gradient_accumulation_steps=2)
expected = fit(whole, 3)
again = make(2, "bfloat16", gradient_accumulation_steps=2)
losses = fit(again, epochs, Checkpoint(disk, every_steps=2))
print(json.dumps({"same": losses == expected[:epochs], "end": digest(again) == digest(whole)}))
"""
)


def alike(answers):
    assert len({json.dumps(answer) for answer in answers.values()}) == 1, answers
    return answers["worker0"]


def test_any_number_of_workers_and_any_stage_read_what_others_wrote(together, tmp_path):
    wrote = {}
    for workers, devices in ((2, 1), (3, 1), (1, 2)):
        found = alike(together(LAYOUTS, {"worker": workers}, tmp_path, devices, timeout=550))
        wrote |= found["wrote"]
        assert len(found["read"]) >= 3 * (len(wrote) - 3)
        for case, digest in found["read"].items():
            assert digest == wrote[case.split()[0]], (case, workers)
    for stage in (0, 2, 3):
        newest = storage.found(tmp_path / f"saved-3-{stage}")[0]
        files = [f"state-0000{rank}-of-00003.safetensors" for rank in (1, 2, 3)]
        assert sorted(path.name for path in newest.iterdir()) == [FACTS, *files]
        sizes = [path.stat().st_size for path in newest.glob("*.safetensors")]
        assert max(sizes) < 0.37 * sum(sizes), sizes


def test_workers_on_disks_of_their_own(together, tmp_path):
    """Parts go to those that lack them; where one is damaged the checkpoint before is used."""

    def run(epochs):
        return alike(together(RESUMES, {"worker": 2}, tmp_path / "RANK", 1, epochs, timeout=550))

    assert run(2)["same"]
    for rank in (0, 1):
        newest = storage.found(tmp_path / str(rank))[0]
        assert newest.name == "epoch-0002"
        assert sorted(path.name for path in newest.iterdir()) == [FACTS, f"state-0000{rank + 1}-of-00002.safetensors"]
        with pytest.raises(Damaged, match=f"state-0000{2 - rank}-of-00002.safetensors is missing"):
            storage.read(newest)
    part = tmp_path / "1" / "epoch-0002" / "state-00002-of-00002.safetensors"
    content = bytearray(part.read_bytes())
    content[-3] ^= 16
    part.write_bytes(content)
    assert run(3) == {"same": True, "end": True}
    assert not [path for rank in (0, 1) for path in (tmp_path / str(rank)).glob(".epoch*")]


def test_a_part_that_is_missing_is_named_and_the_checkpoint_before_used(together, tmp_path):
    together(RESUMES, {"worker": 2}, tmp_path / "run", 1, 2, timeout=550)
    newest = storage.found(tmp_path / "run")[0]
    (newest / "state-00002-of-00002.safetensors").unlink()
    with pytest.raises(Damaged, match="state-00002-of-00002.safetensors is missing"):
        storage.read(newest)
    found = alike(together(RESUMES, {"worker": 2}, tmp_path / "run", 1, 3, timeout=550))
    assert found == {"same": True, "end": True}
    storage.read(newest)
