import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils import file_utils

from tfgpu.data import load, write_shards
from tfgpu.data.decoding import Reading
from tfgpu.data.prepared import open_tfds
from tfgpu.data.sources import open_source
from tfgpu.errors import InputError


class TinySquares(tfds.core.GeneratorBasedBuilder):
    """Gray squares of two classes, generated instead of downloaded."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(4, 4, 1)),
            "label": tfds.features.ClassLabel(names=["dark", "light"]),
        }
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(20), "test": self._generate_examples(6)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"image": np.full([4, 4, 1], 10 * i, np.uint8), "label": i % 2}


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    tfds.core.add_data_dir(folder)
    try:
        TinySquares(data_dir=folder).download_and_prepare()
        yield "tiny_squares"
    finally:
        file_utils.clear_registered_data_dirs()


def test_a_prepared_dataset_is_read_with_its_own_parts(squares):
    data = load(f"tfds:{squares}", global_batch=4, validation=0.25)
    info = data.info
    assert (info.train_examples, info.validation_examples, info.test_examples) == (15, 5, 6)
    assert info.class_names == ("dark", "light") and info.input_shape == (4, 4, 1)
    seen = {}
    for part in (data.train, data.validation):
        for x, y in part:
            seen.update({round(float(v) * 25.5): int(label) for v, label in zip(x[:, 0, 0, 0], y, strict=True)})
    assert seen == {i: i % 2 for i in range(20)}


def test_it_streams_too(squares):
    memory, disk = (open_tfds(squares, Reading(memory_bytes=m)) for m in (1 << 30, 0))
    assert disk.array is None
    assert np.array_equal(memory.array, np.stack([disk.load(i) for i in range(26)]))


def test_it_can_be_written_as_shards(squares, tmp_path):
    listed = write_shards(f"tfds:{squares}", tmp_path / "out", shards=3)
    assert listed.examples == {"train": 20, "test": 6} and listed.shards[0].file.startswith("tfds-tiny_squares-train-")
    one, two = (open_source(source) for source in (f"tfds:{squares}", str(tmp_path / "out")))
    assert np.array_equal(one.array, two.array) and np.array_equal(one.labels, two.labels)
    assert one.encoded(tf.constant(7)).numpy() == two.encoded(tf.constant(7)).numpy()


def test_names_that_cannot_be_opened_are_one_line(squares):
    with pytest.raises(InputError, match="Did you mean 'mnist'"):
        load("tfds:mnistt", global_batch=4)
    with pytest.raises(InputError, match="not prepared in .*tfds.load"):
        load("tfds:cifar10", global_batch=4)
