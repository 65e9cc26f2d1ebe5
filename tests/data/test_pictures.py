"""Pictures in files with numbers, boxes or masks: the same to the bit as arrays in memory, by each worker its rows."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.core import worker_rows
from tfgpu.data import decoding, load
from tfgpu.errors import InputError

RNG = np.random.default_rng(0)
COUNT, SIDE = 12, 10
PICTURES = RNG.integers(0, 256, (COUNT, SIDE, SIDE, 3), dtype=np.uint8)
MASKS = RNG.integers(0, 4, (COUNT, SIDE, SIDE), dtype=np.uint8)
PRICE = RNG.normal(size=COUNT)
KIND = [("hut", "flat", "tower")[i % 3] for i in range(COUNT)]
SETTINGS = {"global_batch": 5, "seed": 3, "augment": ["flip", "rotate", "noise"], "validation": 0.2}


def save(folder, images=PICTURES, name="images"):
    (folder / name).mkdir(parents=True)
    for at, picture in enumerate(images):
        whole = picture if picture.ndim == 3 else picture[..., None]
        (folder / name / f"{at:02d}.png").write_bytes(tf.io.encode_png(whole).numpy())


def table(folder):
    save(folder)
    rows = [f"images/{at:02d}.png,{float(PRICE[at])!r},{KIND[at]},{1 + at}" for at in range(COUNT)]
    (folder / "homes.csv").write_text("\n".join(["file,price,kind,sample_weight", *rows]))
    pytest.importorskip("pyarrow")


def boxes():
    """Boxes as arrays, and as COCO's annotations; every third picture has none."""
    edges, labels = np.zeros((COUNT, 2, 4), np.float32), np.full((COUNT, 2), -1)
    annotations = []
    for at in range(COUNT):
        for number in range(at % 3):
            left, top = 1 + number, 2 + at % 4
            edges[at, number], labels[at, number] = (left, top, left + 4, top + 3.5), number
            annotations.append({"image_id": 100 + at, "category_id": (7, 90)[number], "bbox": [left, top, 4, 3.5]})
    annotations.append({"image_id": 100, "category_id": 7, "bbox": [0, 0, 9, 9], "iscrowd": 1})
    return {"boxes": edges, "labels": labels}, annotations


def coco(folder, annotations=None, **changes):
    save(folder)
    images = [{"id": 100 + at, "file_name": f"{at:02d}.png", "height": SIDE, "width": SIDE} for at in range(COUNT)]
    content = {"images": images, "annotations": boxes()[1] if annotations is None else annotations}
    content["categories"] = [{"id": 90, "name": "dog"}, {"id": 7, "name": "cat"}]
    (folder / "boxes.json").write_text(json.dumps(content | changes))


def masks(folder):
    save(folder)
    save(folder, MASKS, "masks")


SOURCES = {
    "coco": (coco, "coco:{}/boxes.json", (PICTURES, {"bounding_boxes": boxes()[0]})),
    "masks": (masks, "masks:{}", (PICTURES, {"segmentation_masks": MASKS})),
    "price": (table, "images:{}/homes.csv#price", (PICTURES, PRICE, np.arange(1, COUNT + 1))),
    "named": (table, "images:{}/homes.csv#kind,price", (PICTURES, {"kind": np.array(KIND), "price": PRICE}, None)),
}


def batches(part) -> list[list[np.ndarray]]:
    return [[each.numpy() for each in tf.nest.flatten(batch)] for batch in part]


@pytest.mark.sample("masks-by-place")
@pytest.mark.parametrize("memory", ["memory", "by-place"])
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_batches_are_those_of_the_arrays_to_the_bit(tmp_path, name, memory):
    write, source, arrays = SOURCES[name]
    write(tmp_path)
    if name == "named":
        arrays = (*arrays[:2], np.arange(1, COUNT + 1))
    given = load(arrays, **SETTINGS)
    found = load(source.format(tmp_path), memory_bytes=(1 << 30) if memory == "memory" else 100, **SETTINGS)
    assert found.info.cache == ("memory" if memory == "memory" else "none")
    assert (found.info.input_shape, found.info.labels) == (given.info.input_shape, given.info.labels)
    for part in ("train", "validation"):
        pairs = zip(batches(getattr(found, part)), batches(getattr(given, part)), strict=True)
        for ours, theirs in pairs:
            for a, b in zip(ours, theirs, strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)


@pytest.mark.sample("masks")
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_worker_loads_its_own_rows_alone(tmp_path, monkeypatch, name):
    write, source, _ = SOURCES[name]
    write(tmp_path)
    read, decode = [], decoding.decode_image

    def counted(encoded, size=None):
        note = tf.numpy_function(lambda: read.append(1) or np.int64(0), [], tf.int64)
        with tf.control_dependencies([note]):
            return decode(tf.identity(encoded), size)

    monkeypatch.setattr(decoding, "decode_image", counted)
    data = load(source.format(tmp_path), **{**SETTINGS, "global_batch": 4, "validation": 0}, memory_bytes=100)
    expected = batches(data.train)
    for shard in (0, 1):
        ranges = worker_rows.Ranges((shard,), 2)
        data.seek(0)
        read.clear()
        for (part, total), batch in zip(worker_rows.of(data.train).make(ranges), expected, strict=True):
            own = ranges.indices(tf.constant(int(total), tf.int64)).numpy()
            for a, b in zip(tf.nest.flatten(part), batch, strict=True):
                np.testing.assert_array_equal(a, b[own])
        assert len(read) == COUNT // 2


@pytest.mark.slow
def test_pictures_of_another_size_take_their_boxes_and_masks_along(tmp_path):
    coco(tmp_path / "a")
    data = load(f"coco:{tmp_path}/a/boxes.json", global_batch=COUNT, shuffle=False, image_size=(5, 20))
    x, y = next(iter(data.train))
    assert x.shape == (COUNT, 5, 20, 3)
    np.testing.assert_allclose(y["bounding_boxes"]["boxes"], boxes()[0]["boxes"] * [2, 0.5, 2, 0.5])
    assert data.info.targets["bounding_boxes"].class_names == ("cat", "dog")
    masks(tmp_path / "b")
    for memory_bytes in (1 << 30, 100):
        settings = {"image_size": 5, "memory_bytes": memory_bytes}
        x, y = next(iter(load(f"masks:{tmp_path}/b", global_batch=COUNT, shuffle=False, **settings).train))
        expected = tf.image.resize(MASKS[..., None], (5, 5), method="nearest")[..., 0]
        np.testing.assert_array_equal(y["segmentation_masks"], expected)
        assert x.shape == (COUNT, 5, 5, 3)


def test_a_cache_on_disk_and_gray_pictures_keep_their_masks(tmp_path):
    save(tmp_path / "m", PICTURES[..., :1])
    save(tmp_path / "m", MASKS, "masks")
    (tmp_path / "cache").mkdir()
    kept = {"cache": "disk", "cache_directory": tmp_path / "cache"}
    for settings in ({}, kept, kept, {"memory_bytes": 10}):
        data = load(f"masks:{tmp_path}/m", global_batch=COUNT, shuffle=False, **settings)
        x, y = next(iter(data.train))
        np.testing.assert_array_equal(y["segmentation_masks"], MASKS)
        np.testing.assert_array_equal(x, PICTURES[..., :1].astype("float32") / 255.0)
    assert data.info.input_shape == (SIDE, SIDE, 1)


def test_a_corrupt_picture_is_skipped_with_its_row(tmp_path):
    table(tmp_path)
    (tmp_path / "images" / "03.png").write_bytes(b"nothing")
    with pytest.raises(InputError, match="Corrupt: the image .*03.png"):
        load(f"images:{tmp_path}/homes.csv#price", global_batch=4)
    data = load(f"images:{tmp_path}/homes.csv#price", global_batch=11, shuffle=False, skip_corrupt=True)
    x, y, weight = next(iter(data.train))
    keep = np.delete(np.arange(COUNT), 3)
    np.testing.assert_array_equal(y, PRICE[keep].astype("float32"))
    np.testing.assert_array_equal(weight, keep + 1)
    np.testing.assert_array_equal(x, PICTURES[keep].astype("float32") / 255.0)


def test_a_table_of_classes_is_classification(tmp_path):
    table(tmp_path)
    info = load(f"images:{tmp_path}/homes.csv#kind", global_batch=4).info
    assert (info.labels, info.class_names, info.targets) == ("class", ("flat", "hut", "tower"), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"categories": []}, r"annotation 0 \(the first is 0\) has category_id=7, which the file does not list"),
        (
            {"annotations": [{"image_id": 5, "category_id": 7, "bbox": [0, 0, 1, 1]}]},
            r"annotation 0 \(the first is 0\) has image_id=5",
        ),
        ({"annotations": [{"image_id": 100, "category_id": 7, "bbox": [0, 0, 0, 1]}]}, "wider and higher than 0"),
        (
            {"annotations": [{"image_id": 100, "category_id": 7}]},
            r"annotation 0 \(the first is 0\) needs image_id, category_id and bbox",
        ),
        ({"images": [{"id": 1, "file_name": "none.png"}], "annotations": []}, "none.png, which does not exist"),
        ({"images": 3}, "Cannot read .*boxes.json as COCO annotations"),
    ],
    ids=range(6),
)
def test_wrong_annotations_are_named(tmp_path, changes, message):
    coco(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        load(f"coco:{tmp_path}/boxes.json", global_batch=4)


def test_wrong_masks_and_tables_are_named(tmp_path):
    masks(tmp_path / "m")
    (tmp_path / "m" / "masks" / "01.png").unlink()
    with pytest.raises(InputError, match="images/01.png has no mask of the same name"):
        load(f"masks:{tmp_path}/m", global_batch=4)
    (tmp_path / "m" / "masks" / "01.png").write_bytes(tf.io.encode_png(PICTURES[0]).numpy())
    with pytest.raises(InputError, match="masks/01.png must be a PNG of 8 bits of gray"):
        load(f"masks:{tmp_path}/m", global_batch=4)
    (tmp_path / "m" / "masks" / "01.png").write_bytes(tf.io.encode_png(MASKS[0, :4, :, None]).numpy())
    with pytest.raises(InputError, match="01.png with its mask .*which must have its size"):
        load(f"masks:{tmp_path}/m", global_batch=4)
    with pytest.raises(InputError, match="must hold the folders images/ and masks/. Received: no images/"):
        load(f"masks:{tmp_path}", global_batch=4)
    with pytest.raises(InputError, match="nothing at 'coco:none.json'"):
        load("coco:none.json", global_batch=4)
    table(tmp_path / "t")
    for label, message in (("#prise", "Did you mean 'price'"), ("", "has no column label")):
        with pytest.raises(InputError, match=message):
            load(f"images:{tmp_path}/t/homes.csv{label}", global_batch=4)
    text = (tmp_path / "t" / "homes.csv").read_text()
    (tmp_path / "t" / "homes.csv").write_text(text.replace("03.png", "33.png"))
    with pytest.raises(InputError, match="33.png, which does not exist"):
        load(f"images:{tmp_path}/t/homes.csv#price", global_batch=4)
    (tmp_path / "t" / "homes.csv").write_text(text.replace("file,", "name,"))
    with pytest.raises(InputError, match="must have a column 'file'"):
        load(f"images:{tmp_path}/t/homes.csv#price", global_batch=4)
