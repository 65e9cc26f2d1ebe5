"""Remote sources: the batches of the files on disk, read by place from real servers, cached, retried, verified."""

import os
import sys

import numpy as np
import pytest

import tfgpu
from tfgpu.data import Remote, load, records, write_shards
from tfgpu.data.sources import open_source
from tfgpu.data.storage.remote_files import BLOCK_BYTES, BlockCache, Storage
from tfgpu.errors import InputError, MachineError

ROWS = 60


def waves():
    random = np.random.default_rng(0)
    for i in range(ROWS):
        yield random.normal(size=(64, 80)).astype("float32"), i % 3  # 20 KiB


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write_shards(waves, folder / "shards", shards=4, name="waves")
    records.write(folder / "plain.tfrecord", list(waves())[:12])
    (folder / "flowers.csv").write_text("a,b,species\n" + "".join(f"{i},{i * i},k{i % 2}\n" for i in range(20)))
    return folder


@pytest.fixture
def server(folder):
    pytest.importorskip("aiohttp")
    pytest.importorskip("google_crc32c")
    from object_store import web_server

    with web_server(folder) as (url, facts):
        yield url, facts


def remote(url, tmp_path, **settings):
    return Remote(url, cache_directory=tmp_path / "cache", wait_s=0, **settings)


def epoch(source, **settings):
    data = load(source, global_batch=16, seed=1, validation=0, test=0, **{"memory_bytes": 0, **settings})
    return [(x.numpy(), y.numpy()) for x, y in data.train]


def assert_same(found, expected):
    for (x, y), (u, v) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, u)
        np.testing.assert_array_equal(y, v)


@pytest.mark.sample("0")
@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_shards_of_a_web_server_give_the_batches_of_the_disk(folder, server, tmp_path, memory_bytes):
    url, facts = server
    expected = epoch(folder / "shards", memory_bytes=memory_bytes)
    assert_same(epoch(remote(f"{url}/shards/", tmp_path), memory_bytes=memory_bytes), expected)
    blocks = {request for request in facts["requests"] if request[1]}
    assert len(blocks) == len([request for request in facts["requests"] if request[1]]) == 4  # each once
    before = len(facts["requests"])
    assert_same(epoch(remote(f"{url}/shards", tmp_path), memory_bytes=memory_bytes), expected)
    later = [request for request in facts["requests"][before:] if request[1]]
    assert not later  # all from the cache
    assert [path for path, _ in facts["requests"][before:]].count("/shards/index.json") == 1


def test_files_without_an_index_and_tables(folder, server, tmp_path):
    url, facts = server
    found = open_source(remote(f"{url}/plain.tfrecord", tmp_path))
    expected = open_source(str(folder / "plain.tfrecord"))
    np.testing.assert_array_equal(found.array, expected.array)
    assert found.labels.tolist() == expected.labels.tolist()
    table = open_source(remote(f"{url}/flowers.csv#species", tmp_path))
    assert (table.array[3].tolist(), table.class_names, table.name) == ([3.0, 9.0], ("k0", "k1"), "flowers.csv")
    facts["ranges"] = False  # the server sends whole files
    other = Remote(f"{url}/plain.tfrecord", cache_directory=tmp_path / "other", wait_s=0)
    np.testing.assert_array_equal(open_source(other).array, expected.array)


def test_a_read_that_fails_is_tried_again_and_then_named(server, tmp_path):
    url, facts = server
    facts["failures"] = 3
    assert len(epoch(remote(f"{url}/shards/", tmp_path))) == 4
    assert facts["failures"] == 0
    facts["failures"] = 1000
    with pytest.raises(MachineError, match=r"failed 2 times in a row: .*503"):
        open_source(remote(f"{url}/plain.tfrecord", tmp_path, attempts=2))
    facts["failures"] = 0
    with pytest.raises(InputError, match="No .tfrecord files|Cannot read"):
        open_source(remote(f"{url}/nothing/", tmp_path))


def test_what_is_damaged_on_the_way_or_on_the_disk_is_fetched_anew(folder, server, tmp_path, caplog):
    url, facts = server
    expected = epoch(folder / "shards")
    facts["flips"] = 1  # the first block arrives with a wrong byte: the record's checksum shows it
    assert_same(epoch(remote(f"{url}/shards/", tmp_path)), expected)
    assert facts["flips"] == 0
    blocks = sorted((tmp_path / "cache").glob("*.block"))
    assert len(blocks) == 4
    for at, block in enumerate(blocks[:2]):
        content = bytearray(block.read_bytes())
        content[1000] ^= 1
        block.write_bytes(content[: -100 * at or None])
    asked = len(facts["requests"])
    with caplog.at_level("WARNING"):
        assert_same(epoch(remote(f"{url}/shards/", tmp_path)), expected)
    assert "is damaged; fetching it again" in caplog.text
    # Two readers may find a block damaged at once, and both fetch it.
    assert len({request for request in facts["requests"][asked:] if request[1]}) == 2
    assert all(BlockCache(tmp_path / "cache", 1 << 30).get(*_named(block)) for block in blocks)


def _named(block):
    key, _, number = block.stem.rpartition("-")
    return key, int(number)


def test_a_record_that_is_damaged_on_the_server_is_named(folder, tmp_path):
    pytest.importorskip("aiohttp")
    pytest.importorskip("google_crc32c")
    from object_store import web_server

    raw = bytearray((folder / "plain.tfrecord").read_bytes())
    raw[5000] ^= 255
    (tmp_path / "served").mkdir()
    (tmp_path / "served/plain.tfrecord").write_bytes(raw)
    with web_server(tmp_path / "served") as (url, _), pytest.raises(InputError, match=r"record 0 of http.*plain"):
        open_source(remote(f"{url}/plain.tfrecord", tmp_path))


def test_the_cache_keeps_what_was_used_last(tmp_path):
    cache = BlockCache(tmp_path, limit_bytes=10_000)
    for number in range(8):
        cache.put("a", number, bytes(1000))
        os.utime(cache.path("a", number), (number, number))
    assert cache.get("a", 0) == bytes(1000)  # used just now
    for number in range(8, 15):
        cache.put("a", number, bytes(1000))
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert total <= 10_000
    assert cache.has("a", 0)
    assert not any(cache.has("a", number) for number in range(1, 4))
    assert cache.get("b", 0) is None


@pytest.mark.slow
def test_data_larger_than_the_cache_is_read_in_full(folder, server, tmp_path, monkeypatch):
    monkeypatch.setattr("tfgpu.data.storage.remote_files.BLOCK_BYTES", 1 << 16)
    url, facts = server
    source = Remote(f"{url}/shards/", cache_directory=tmp_path / "cache", cache_bytes=4 << 20)
    object.__setattr__(source, "cache_bytes", 1 << 18)
    assert_same(epoch(source), epoch(folder / "shards"))
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= 1 << 18


def test_blocks_are_fetched_before_they_are_read(server, tmp_path):
    url, facts = server
    storage = Storage(remote(f"{url}/shards/", tmp_path))
    (file, *_) = storage.files(".tfrecord")
    file.fetch_ahead(file.blocks(0, file.size))
    for coming in list(file._coming.values()):
        coming.result()
    asked = len(facts["requests"])
    assert len(file.read(0, file.size)) == file.size
    assert len(facts["requests"]) == asked
    assert file.blocks(BLOCK_BYTES - 1, 2) == range(0, 1) if file.size <= BLOCK_BYTES else range(0, 2)


@pytest.mark.slow
def test_an_object_store(folder, tmp_path, monkeypatch):
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    from object_store import object_store

    with object_store(monkeypatch):
        s3fs.S3FileSystem.clear_instance_cache()
        store = s3fs.S3FileSystem()
        store.mkdir("bucket")
        store.put(str(folder / "shards"), "bucket/shards", recursive=True)
        store.put(str(folder / "flowers.csv"), "bucket/flowers.csv")
        assert_same(epoch(remote("s3://bucket/shards/", tmp_path)), epoch(folder / "shards"))
        globbed = epoch(remote("s3://bucket/shards/*.tfrecord*", tmp_path))
        assert_same(globbed, epoch(folder / "shards"))  # the index beside them counts
        assert open_source(remote("s3://bucket/*.csv#species", tmp_path)).class_names == ("k0", "k1")
        with pytest.raises(InputError, match="No .tfrecord files|Cannot read"):
            open_source(remote("s3://bucket/none/", tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_google_s_object_store(folder, tmp_path, monkeypatch, addresses):
    pytest.importorskip("gcp_storage_emulator.server")
    from object_store import google_store

    with google_store(monkeypatch, *addresses(1)):
        gcsfs = pytest.importorskip("gcsfs")
        gcsfs.GCSFileSystem.clear_instance_cache()
        store = gcsfs.GCSFileSystem(token="anon")
        for path in sorted((folder / "shards").iterdir()):
            store.pipe_file(f"bucket/shards/{path.name}", path.read_bytes())
        store.pipe_file("bucket/flowers.csv", (folder / "flowers.csv").read_bytes())
        assert_same(epoch(remote("gs://bucket/shards/", tmp_path)), epoch(folder / "shards"))
        globbed = epoch(remote("gs://bucket/shards/*.tfrecord*", tmp_path))
        assert_same(globbed, epoch(folder / "shards"))  # the index beside them counts
        assert open_source(remote("gs://bucket/*.csv#species", tmp_path)).class_names == ("k0", "k1")
        with pytest.raises(InputError, match="No .tfrecord files|Cannot read"):
            open_source(remote("gs://bucket/none/", tmp_path))


def test_without_the_packages_the_fix_is_named(tmp_path, monkeypatch):
    registry = pytest.importorskip("fsspec.registry")
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    for url, missing, extra in (
        ("s3://b/f/", "s3fs", "s3"),
        ("gs://b/f/", "gcsfs", "gs"),
        ("https://h/f/", "aiohttp", "remote"),
    ):
        monkeypatch.delitem(registry._registry, url.partition(":")[0], raising=False)
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(MachineError, match=rf"pip install 'tfgpu\[{extra}\]'"):
            open_source(Remote(url, cache_directory=tmp_path))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MachineError, match="pip install"):
        open_source("s3://bucket/folder/")


def test_wrong_settings_name_the_fix(tmp_path):
    for settings, message in (
        ({"url": "folder"}, "must look like"),
        ({"cache_bytes": 100}, "cache_bytes"),
        ({"attempts": 0}, "attempts"),
        ({"wait_s": -1}, "wait_s"),
    ):
        with pytest.raises(InputError, match=message):
            Remote(**{"url": "s3://b/f/", **settings})
    pytest.importorskip("fsspec")
    with pytest.raises(InputError, match="fsspec does not support nothing://"):
        open_source(Remote("nothing://b/f/", cache_directory=tmp_path))
    assert tfgpu.data.parse_source("s3://bucket/folder/").kind == "remote"
