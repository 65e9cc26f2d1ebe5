"""Untrusted files that try to run code; each would leave a mark."""

import base64
import contextlib
import json
import os
import pathlib
import pickle
import subprocess
import sys
import zipfile
import zlib

import keras
import numpy as np
import pytest
import safetensors.numpy

from tfgpu import serving
from tfgpu.checkpoint import manifest, storage
from tfgpu.compat import versions
from tfgpu.data import cache
from tfgpu.data.names import parse_source
from tfgpu.data.sources import open_source
from tfgpu.errors import InputError
from tfgpu.recipes import reading, recipe
from tfgpu.recipes.reading import read
from tfgpu.training import incremental
from tfgpu.tune import spec

EVIL = "import pathlib\n\ndef run(**_):\n    pathlib.Path('mark').touch()\n"


PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
STUDY = ["tune", "recipe.yaml", "--output", "study"]


def tfgpu(*words, cwd):
    command = [sys.executable, "-m", "tfgpu", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=550)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system [touch mark]",
        "model: !!python/object/apply:os.system [touch mark]",
        "model: !!python/name:os.system",
        "? !!python/object/new:subprocess.Popen [[touch, mark]]\n: 1",
    ],
)
def test_yaml_makes_no_objects(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(InputError, match="is not YAML"):
        read("recipe.yaml")
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
@pytest.mark.parametrize("line", ["model: evil:run", "data: evil:run", "model: os:system\nmodel_options: {command: x}"])
def test_a_recipe_s_functions_are_not_called(line, tmp_path):
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "recipe.yaml").write_text(line)
    commands = ["train", "recipe.yaml"], ["train", "-c", "recipe.yaml", "--dry-run"], ["profile", "recipe.yaml"], STUDY
    commands += ["tune", "batch-size", "recipe.yaml"], ["tune", "learning-rate", "recipe.yaml"]
    for words in commands:
        done = tfgpu(*words, cwd=tmp_path)
        assert done.returncode == 2 and "names code to run" in done.stderr and "--allow-code" in done.stderr
    done = tfgpu("profile", "input", "recipe.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "--allow-code" in done.stderr
    with pytest.raises(InputError, match="names code to run"):
        recipe.load(tmp_path / "recipe.yaml")
    assert not (tmp_path / "mark").exists()


def test_a_foreign_run_is_not_resumed(tmp_path):
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: evil:run\nrun: {versions: {tfgpu: 0.1.0}}")
    done = tfgpu("train", "--resume", "--output", "run", cwd=tmp_path)
    assert done.returncode == 2 and "run/config.yaml names code to run: model: evil:run" in done.stderr
    assert not (tmp_path / "mark").exists()


def test_a_foreign_search_calls_nothing(tmp_path):
    (tmp_path / "space.yaml").write_text("model: [mlp, 'os:system']")
    done = tfgpu("tune", "--space", "space.yaml", "--output", "study", cwd=tmp_path)
    assert done.returncode == 2 and "space.yaml names code to run: model: os:system" in done.stderr
    reading.refuse_code_searched({"model": "mlp,cnn", "learning_rate": "1e-5..1e-1:log"}, "a")
    with pytest.raises(InputError, match="evil:run"):
        reading.refuse_code_searched({"data": "digits, evil:run"}, "a")


def test_the_users_own_setting_counts(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: mine:build\nepochs: 3")
    assert recipe.load(path, allow_code=True).model == "mine:build"
    assert recipe.load(path, overrides={"model": "mine:build"}).epochs == 3
    assert reading.code_in({"data": "csv:a.csv#label", "model": "cnn"}) == {}
    assert reading.code_in({"data": "tfds:mnist"}) == reading.code_in({"data": 3, "model": None}) == {}
    assert set(reading.code_in({"data": " a.b:c ", "model": "x:"})) == {"data", "model"}


@pytest.mark.slow
def test_a_model_file_with_code_in_it_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: x), keras.layers.Dense(1)])
    model.save("lambda.keras")
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plain.save("plain.keras")
    with zipfile.ZipFile("plain.keras") as old, zipfile.ZipFile("module.keras", "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "config.json":
                config = json.loads(content)
                config["config"]["layers"][1] |= {"module": "evil", "class_name": "run", "registered_name": None}
                content = json.dumps(config)
            new.writestr(name, content)
    (tmp_path / "evil.py").write_text(EVIL + "\nrun()\n")
    model.save("lambda.h5")
    for name in ("lambda.keras", "lambda.h5"):
        with pytest.raises(InputError, match="contains code"):
            serving.export(name, "out")
    done = tfgpu("export", "module.keras", "out", cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "out").exists(), done.stderr
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "facts",
    [b"", b"[", b"[" * 100_000, b"{}", b'{"facts": {}, "sha256": "x"}', b'{"facts": [], "sha256": []}', b"\xff\0"],
)
def test_a_file_that_is_no_checkpoint_is_damaged(facts, tmp_path):
    (tmp_path / storage.FACTS).write_bytes(facts)
    (tmp_path / storage.STATE).write_bytes((2**60).to_bytes(8, "little") + b"{}")  # a header of an exabyte
    with pytest.raises(storage.Damaged):
        storage.read(tmp_path)


def test_a_checkpoint_whose_hashes_are_right_and_whose_facts_are_not(tmp_path):
    content = safetensors.numpy.save({"a": np.zeros(2), "b[0:9]": np.zeros(2)})
    hash_of_content = manifest.hashlib.sha256(content).hexdigest()
    file = {"sha256": hash_of_content, "bytes": len(content)}
    plain = {**dict.fromkeys(("epoch", "step", "done", "first", "over_at", "data_epoch"), 0), "format": 3}
    plain |= {"logs": None, "history": [], "memory": None, "axes": {}, "cut": {}}
    (tmp_path / storage.STATE).write_bytes(content)
    (tmp_path.parent / storage.STATE).write_bytes(content)
    for facts in (
        {},
        {"format": "x"},
        {"format": 2, "sha256": hash_of_content},
        {**plain, "files": {}},
        {**plain, "files": {"../" + storage.STATE: file}},  # no file outside the folder is opened
        {**plain, "files": {storage.STATE: file}, "cut": {"b": [9]}},  # two numbers that claim to be nine
        {**plain, "files": {storage.STATE: file}, "cut": {"c": [1]}},
        {**plain, "files": {storage.STATE: file}, "axes": {"a": 0}},
        {**plain, "files": {storage.STATE: file}, "memory": {"!": "array", "at": "memory/0", "dtype": "float32"}},
    ):
        text = json.dumps({"facts": facts, "sha256": manifest._hash(facts)}).encode()
        (tmp_path / storage.FACTS).write_bytes(text)
        with pytest.raises(storage.Damaged):
            storage.read(tmp_path)


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return pathlib.Path.touch, (self.mark,)


def test_what_was_pickled_is_not_unpickled(tmp_path):
    mark, where = tmp_path / "mark", cache.place("a", [tmp_path], tmp_path)
    traps = np.array([Trap(mark)], dtype=object)
    kept = {"dtype": "float32", "shape": [2], "labels": np.zeros(2, int), "class_names": np.array(["a", "b"])}
    where.examples.write_bytes(bytes(16))
    for name in (*kept, "skipped"):
        np.savez(where.facts, **{**kept, "skipped": np.zeros(0, str), name: traps})
        assert cache.find(where) is None
    content = pickle.dumps(Trap(mark))
    where.facts.write_bytes(content)
    assert cache.find(where) is None
    memory = tmp_path / "memory"
    memory.write_bytes(content)
    for reader in (incremental.Replay.from_file, incremental.ElasticWeights.from_file):
        with pytest.raises(InputError):
            reader(memory)
    (tmp_path / storage.FACTS).write_bytes(content)
    (tmp_path / storage.STATE).write_bytes(content)
    with pytest.raises(storage.Damaged):
        storage.read(tmp_path)
    with pytest.raises(InputError):
        serving.export(str(memory.rename(tmp_path / "model.keras")), str(tmp_path / "out"))
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists()  # the trap is one


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "O"},
        {"dtype": "S8"},
        {"dtype": "float99"},
        {"dtype": np.array([{}], dtype=object)},
        {"shape": [-2, -2]},
    ]
    + [
        {"shape": [2**62, 4]},
        {"shape": "x"},
        {"labels": np.zeros([])},
        {"class_names": np.zeros([])},
        {"shape": [1e300]},
        {"checksums": np.array([0])},
    ],
)
def test_a_file_that_is_no_cache_is_rebuilt(change, tmp_path):
    where = cache.place("a", [tmp_path], tmp_path)
    kept = {"dtype": "float32", "shape": [2], "labels": np.zeros(2, int), "class_names": np.array(["a", "b"])}
    kept |= {"skipped": np.zeros(0, str), "checksums": np.array([zlib.crc32(bytes(16))])}
    where.examples.write_bytes(bytes(16))
    np.savez(where.facts, **kept)
    assert cache.find(where) is not None
    np.savez(where.facts, **{**kept, **change})
    assert cache.find(where) is None


def test_a_cache_of_another_format_is_rebuilt(tmp_path):
    where = cache.place("a", [tmp_path], tmp_path)
    head = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<i8', 'fortran_order': False, 'shape': (1" + b"0" * 12 + b",), }"
    with zipfile.ZipFile(where.facts, "w") as file:
        file.writestr("labels.npy", head.ljust(127) + b"\n")  # eight terabytes, it says
    assert cache.find(where) is None
    for content in (b"", b"PK\x03\x04", b"\x80\x04N.", head):
        where.facts.write_bytes(content)
        assert cache.find(where) is None


def test_a_hosts_name_is_no_option_of_ssh(tmp_path):
    (tmp_path / "train.py").write_text("")
    for nodes in ("-oProxyCommand=touch${IFS}mark,b", "-oProxyCommand=x,b", "--,b"):
        done = tfgpu("launch", "-n", "2", "--hosts", nodes, "train.py", cwd=tmp_path)
        assert done.returncode == 2, done.stderr
    assert not (tmp_path / "mark").exists()


def test_a_model_file_writes_nothing_beside_its_place(tmp_path, monkeypatch):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save("slip.keras")
    with zipfile.ZipFile("slip.keras", "a") as file:
        for name in ("../mark", "../../mark", "assets/../../mark", str(tmp_path / "mark")):
            file.writestr(name, b"x")
    with contextlib.ExitStack() as refused:
        if versions.is_at_most("keras", "3.13"):  # which fails where it would warn that it skips a path
            refused.enter_context(pytest.raises(InputError, match="cannot be loaded"))
        serving.export("slip.keras", "out", format="litert", check=False)
    assert not [path for path in tmp_path.rglob("mark*")]


@pytest.mark.parametrize("data", ["tfds:huggingface:mnist", "tfds:mlds:a/b", "tfds:../mnist", "tfds:a/b/c"])
def test_datasets_whose_code_would_be_downloaded_are_refused(data):
    with pytest.raises(InputError, match="tensorflow-datasets dataset"):
        parse_source(data)


@pytest.mark.parametrize("data", ["mnist", "mnist:3.0.1", "glue/sst2", "a/b-c.d:1.*.*", "mnist:*.*.*"])
def test_its_own_datasets_are_not(data):
    assert parse_source(f"tfds:{data}").value == data


def test_non_string_names_are_refused_before_training(tmp_path):
    for name in (b"cat", b"bad\xff"):
        folder = os.fsencode(tmp_path / "png") + b"/" + name
        os.makedirs(folder)
        with open(folder + b"/a.png", "wb") as file:
            file.write(PNG)
    with pytest.raises(InputError, match=r"bad.*is not valid UTF-8"):
        open_source(str(tmp_path / "png"))


@pytest.mark.parametrize("text", ["", "recipe: 3", "recipe: {}", "recipe: {model: 'os:system'}\nsearch: [model]"])
def test_a_file_that_is_no_study_is_damaged(text, tmp_path):
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(InputError, match="is damaged: `"):
        spec.spec_for(tmp_path, None, None, {}, resume=True)
