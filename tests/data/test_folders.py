import numpy as np
import pytest
import tensorflow as tf

from tfgpu.data import feed, load
from tfgpu.data.decoding import Reading
from tfgpu.data.epoch import EpochSpec
from tfgpu.data.sources import open_source
from tfgpu.errors import InputError


def image(value, height=4, width=5, channels=3):
    return np.full([height, width, channels], value, np.uint8)


def put(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    encode = tf.io.encode_jpeg if path.suffix in (".jpg", ".jpeg") else tf.io.encode_png
    path.write_bytes(encode(array).numpy())


@pytest.fixture
def photos(tmp_path):
    for i in range(6):
        put(tmp_path / "photos" / "cat" / f"{i}.png", image(i))
        put(tmp_path / "photos" / "dog" / f"{i}.png", image(100 + i))
    return tmp_path / "photos"


def test_classes_are_folders_in_the_order_of_their_names(photos):
    (photos / "notes.txt").write_text("not a class")
    (photos / ".hidden").mkdir()
    examples = open_source(str(photos))
    assert examples.class_names == ("cat", "dog") and examples.shape == (4, 5, 3)
    assert examples.labels.tolist() == [0] * 6 + [1] * 6
    assert examples.array[:, 0, 0, 0].tolist() == [*range(6), *range(100, 106)]


def test_hidden_folders_and_files_do_not_count(photos):
    put(photos / "cat" / ".ipynb_checkpoints" / "x.png", image(1))
    put(photos / "cat" / "more" / ".hidden.png", image(1))
    (photos / "cat" / ".thumbnails").mkdir()
    (photos / "cat" / ".thumbnails" / "1.webp").write_bytes(b"RIFF")
    assert len(open_source(str(photos)).labels) == 12


def test_images_of_other_kinds_are_named_or_counted(photos):
    for name in ("cat/7.webp", "dog/7.TIFF", "dog/8.webp", "dog/9.heic"):
        (photos / name).write_bytes(b"RIFF")
    (photos / "logo.svg").write_text("in no class")
    with pytest.raises(InputError, match=r"has 4 image.* format: .*cat/7.webp, .*dog/7.TIFF, .*, \.\.\.\. "):
        open_source(str(photos))
    examples = open_source(str(photos), Reading(skip_corrupt=True))
    assert len(examples.labels) == 12 and len(examples.skipped) == 4
    assert load(str(photos), global_batch=2, skip_corrupt=True).info.skipped == 4


def test_pixels_become_fractions(photos):
    data = load(str(photos), global_batch=12, validation=0, test=0, shuffle=False)
    x, y = next(iter(data.train))
    assert x.dtype == tf.float32
    np.testing.assert_allclose(x[:, 0, 0, 0], np.array([*range(6), *range(100, 106)]) / 255, rtol=1e-6)


def test_a_folder_with_parts_keeps_them(tmp_path):
    for part, count in (("train", 4), ("validation", 2), ("test", 1)):
        for name in "ab":
            for i in range(count):
                put(tmp_path / part / name / f"{i}.png", image(i))
    info = load(str(tmp_path), global_batch=2).info
    assert (info.train_examples, info.validation_examples, info.test_examples) == (8, 4, 2)


def test_grey_alpha_and_jpeg_and_bmp(tmp_path):
    put(tmp_path / "a" / "1.png", image(7, channels=1))
    put(tmp_path / "b" / "1.png", image(9, channels=2))
    assert open_source(str(tmp_path)).array[:, 0, 0].tolist() == [[7], [9]]
    put(tmp_path / "b" / "2.png", image(9, channels=4))
    put(tmp_path / "b" / "3.jpg", image(50))
    header = b"BM" + bytes([58, 0, 0, 0, 0, 0, 0, 0, 54, 0, 0, 0, 40, 0, 0, 0, 5, 0, 0, 0, 4, 0, 0, 0, 1, 0, 24, 0])
    (tmp_path / "b" / "4.bmp").write_bytes(header + bytes(24) + bytes([3]) * 64)
    array = open_source(str(tmp_path)).array
    assert array.shape == (5, 4, 5, 3)
    assert array[:, 0, 0, 1].tolist() == [7, 9, 9, 50, 3]


def test_different_sizes_need_one(photos):
    put(photos / "cat" / "9.png", image(1, height=8))
    with pytest.raises(InputError, match="Received: 4x5, 8x5.*--image-size"):
        open_source(str(photos))
    assert open_source(str(photos), Reading(image_size=(6, 7))).shape == (6, 7, 3)


@pytest.mark.parametrize("damage", [lambda raw: raw[:40], lambda raw: b"", lambda raw: b"text"])
def test_a_corrupt_image_is_named_or_left_out(photos, damage, caplog):
    bad = photos / "cat" / "3.png"
    bad.write_bytes(damage(bad.read_bytes()))
    with pytest.raises(InputError, match=f"{bad}.*--skip-corrupt"):
        load(str(photos), global_batch=2)
    data = load(str(photos), global_batch=2, skip_corrupt=True)
    assert data.info.skipped == 1
    assert data.info.train_examples + data.info.validation_examples + data.info.test_examples == 11
    assert str(bad) in caplog.text


@pytest.mark.parametrize("bad", [[3], [1, 2, 5], [11]])
def test_in_a_large_folder_a_corrupt_image_is_named_when_it_is_met(photos, bad):
    for number in bad:
        (sorted(photos.rglob("*.png"))[number]).write_bytes(b"text")
    examples = open_source(str(photos), Reading(examine_bytes=0, memory_bytes=0))
    assert examples.cache == "none" and examples.shape == (4, 5, 3)
    epochs = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64))
    backwards = tf.range(11, -1, -1, dtype=tf.int64)
    spec = EpochSpec(examples, lambda _: backwards, 12, 5, lambda _, start, x, y: (start, x))
    read = feed.batches(spec, epochs, feed.Feed())
    named = str(sorted(photos.rglob("*.png"))[max(bad)])  # The order is backwards: the last one is met first.
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"Corrupt:.*{named}"):
        for start, x in read:
            expected = [n if n < 6 else n + 94 for n in range(11 - int(start), 11 - int(start) - len(x), -1)]
            assert x.numpy()[:, 0, 0, 0] * 255 == pytest.approx(expected)


def test_in_a_large_folder_a_corrupt_first_image_is_named_at_once(photos):
    (photos / "cat" / "0.png").write_bytes(b"text")
    with pytest.raises(InputError, match="Corrupt:.*cat/0.png"):
        open_source(str(photos), Reading(examine_bytes=0, memory_bytes=0))


def test_all_corrupt_is_an_error_even_when_skipping(photos):
    for path in photos.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="none of its 12 examples"):
        load(str(photos), global_batch=2, skip_corrupt=True)


def test_folders_without_a_dataset_are_named(tmp_path):
    with pytest.raises(InputError, match="No images in"):
        open_source(str(tmp_path))
    put(tmp_path / "1.png", image(0))
    with pytest.raises(InputError, match="one folder per class"):
        open_source(str(tmp_path))
    put(tmp_path / "cat" / "1.png", image(0))
    with pytest.raises(InputError, match="at least two classes.*cat"):
        open_source(str(tmp_path))


def test_a_class_that_only_the_test_part_has_is_named(tmp_path):
    for name in ("train/a", "train/b", "test/c"):
        put(tmp_path / name / "1.png", image(0))
    with pytest.raises(InputError, match="without training images: c"):
        open_source(str(tmp_path))
