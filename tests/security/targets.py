"""The fuzz targets: parsers of text that may come from strangers. Each reads a text or raises `InputError`."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from tfgpu.cluster import hostlist, tf_config
from tfgpu.cluster.facts import Cluster
from tfgpu.data import manifest
from tfgpu.errors import InputError
from tfgpu.recipes import reading, recipe
from tfgpu.redact import Cleaner

SECRET, OTHER = "correct-horse-7731", "battery#staple~8842"

DICTIONARY = {
    "recipe": [
        "model:",
        "data:",
        "epochs: 3",
        "augment: [flip, rotate: {degrees: 5}]",
        "!!python/object/apply:os.system",
    ]
    + ["*a", "&a", "run:", "2026-01-01", "1e-3", "0x_", ".inf", "learning_rate: .nan", "module:function"]
    + ["<<: *a", "0xffffffff", "1:1:1", "!!set {x}", "!!pairs [k: x]", "!!omap [k: x]", "? ", "model_options: {a: "],
    "tf_config": [tf_config.EXAMPLE, '"chief"', '"ps"', '"evaluator"', '"rpc_layer"', "1e999", "null", "[[["],
    "hostlist": [hostlist.EXAMPLE, "[0-65535]", "[1-2]n[01-02]", "[,", "0-999999999999999999", "a]b["],
    "index": ['"format": "tfgpu shards"', '"version": 1', '"shards": []', '"file": "../x"', '"lengths": "eJw="']
    + ['"kind": "float_list"', '"dtype": "object"', '"shape": [8, 10000000000]', '"labels": "eJw="'],
    "redact": ["api_key=abc", '{"token": "', "--password ", "Authorization: Bearer ", "https://a:b@c/", "eyJhbGciOi.J"]
    + ["-----BEGIN PRIVATE KEY-----", "a@b.example", 'args: "--token ', "<removed>", "a: b= ", "/home/ada", '\\"']
    + ["redis://:a/b@c/", "- --token\n- ", "key=1a2b3c4d", "hf_abcdefghijkl", "wandb login ", "\\n", "'\"'\"'"],
}


def read_recipe(text: str, folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    settings = reading.read(path)
    reading.read_facts(path)
    reading.refuse_code(settings, "recipe.yaml", allow=True)
    recipe.make(recipe.make(settings).model_dump())


def read_tf_config(text: str, folder: Path) -> None:
    found = tf_config.read(text)
    if found:
        Cluster(**found)


def read_hostlist(text: str, folder: Path) -> None:
    hosts = hostlist.expand(text)
    assert 0 < len(hosts) <= hostlist.MOST


def read_index(text: str, folder: Path) -> None:
    (folder / manifest.FILE).write_text(text, encoding="utf-8", errors="surrogatepass")
    found = manifest.find(folder)
    if found is not None:
        for shard in found.shards:
            shard.offsets()
            assert (folder / shard.file).parent == folder


def redact(text: str, folder: Path) -> None:
    cleaner = Cleaner({"WANDB_API_KEY": SECRET}, user="ada", home="/home/ada", host="box")
    assert SECRET not in cleaner.clean(f"{text}{SECRET}{text}")
    assert OTHER not in Cleaner({}, user="ada", home="/home/ada", host="box").clean(f"{text}\npassword={OTHER}\n{text}")


TARGETS: dict[str, Callable[[str, Path], None]] = {
    "recipe": read_recipe,
    "tf_config": read_tf_config,
    "hostlist": read_hostlist,
    "index": read_index,
    "redact": redact,
}


def attempt(name: str, text: str, folder: Path) -> bool:
    """Whether the text was valid; any error but `InputError` is raised."""
    try:
        TARGETS[name](text, folder)
    except InputError as error:
        assert str(error) and len(str(error)) < 20_000
        return False
    return True


def an_index() -> str:
    """A valid index."""
    import numpy as np

    lengths = np.array([5, 7])
    shard = {"file": "a.tfrecord", "part": "train", "examples": 2, "bytes": 44, "sha256": "0" * 64}
    shard |= {"lengths": manifest.pack(lengths), "labels": None}
    features = {"x": "image", "y": "label", "kind": "bytes_list", "shape": [8, 8, 1], "labels": 1}
    facts = {
        "format": manifest.FORMAT,
        "version": 1,
        "name": "a",
        "features": features,
        "dtype": None,
        "shape": [8, None],
    }
    return json.dumps(facts | {"class_names": ["x"], "shards": [shard]})


def documents() -> dict[str, dict]:
    """Valid documents as JSON, which a recipe's YAML reads too."""
    recipe = {"model": "mlp", "data": "digits", "epochs": 3, "optimizer": "sgd", "learning_rate": 0.1, "run": "runs/a"}
    recipe |= {"augment": ["flip", {"rotate": {"degrees": 5}}], "model_options": {"dropout": 0.1}, "global_batch": 32}
    return {"recipe": recipe, "tf_config": json.loads(tf_config.EXAMPLE), "index": json.loads(an_index())}


_VALUES = [None, True, -1, 0, 1, 10**30, 1e308, float("inf"), float("nan"), "", "a", "\0", "../x", "a:1", "a" * 300]
_VALUES += [[], {}, [[]], [None], {"": 1}, ["a:1", "a:1"], {"a": {"b": {}}}, "1", "os:system", "eJw=", "chief"]


def mutated(document: dict, pick: Callable[[int], int]) -> str:
    """A document with some values changed, deleted, moved or renamed.

    Args:
        document: a valid one.
        pick: chooses an index below its argument.
    """
    document = copy.deepcopy(document)
    for _ in range(1 + pick(3)):
        places = list(_places(document))
        if not places:
            break
        (where, key), (other, its) = places[pick(len(places))], places[pick(len(places))]
        how = pick(5)
        if how == 0:
            del where[key]
        elif how == 1:
            where[key] = copy.deepcopy(other[its])
        elif how == 2 and isinstance(where, dict):
            where[its if isinstance(its, str) else "a"] = where.pop(key)
        elif how == 3 and isinstance(where, list):
            where.append(copy.deepcopy(where[key]))
        else:
            where[key] = copy.deepcopy(_VALUES[pick(len(_VALUES))])
    return json.dumps(document)


def _places(value) -> Iterator[tuple]:
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])
