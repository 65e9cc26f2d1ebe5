"""DALI pipelines: fake ones, and real ones if DALI is installed."""

import importlib.util
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.errors import InputError
from tfgpu.interop import dali

NEEDS_DALI = pytest.mark.skipif(
    importlib.util.find_spec("nvidia.dali") is None if importlib.util.find_spec("nvidia") else True,
    reason="NVIDIA DALI is not installed: pip install nvidia-dali-cuda120",
)


class Rows:
    """A TensorList on the CPU."""

    def __init__(self, values):
        self.values = values

    def as_array(self):
        if len({np.shape(value) for value in self.values}) > 1:
            raise RuntimeError("Tensors must have the same shape")
        return np.stack(self.values)


class Reader:
    """A pipeline with a reader of numbers that follows DALI's rules for shards and padding."""

    def __init__(self, count, batch, shard=0, shards=1, pad=True, stick=False):
        self.max_batch_size, self._at, self._epoch = batch, 0, 0
        self._count, self._shard, self._shards, self._stick, self._pad = count, shard, shards, stick, pad

    def reader_meta(self):
        facts = {"epoch_size": self._count, "number_of_shards": self._shards, "shard_id": self._shard}
        return {"numbers": {**facts, "pad_last_batch": self._pad, "stick_to_shard": self._stick}}

    def run(self):
        own = self._shard if self._stick else (self._shard + self._epoch) % self._shards
        begin, end = own * self._count // self._shards, (own + 1) * self._count // self._shards
        places = begin + self._at + np.arange(self.max_batch_size)
        self._at += self.max_batch_size
        if self._at >= -(-self._count // self._shards):
            self._at, self._epoch = 0, self._epoch + 1
        values = [np.array([min(place, end - 1)], "float32") for place in places]
        return Rows(values), Rows([(value[0] % 2).astype("int32") for value in values])


class NoReader(Reader):
    def reader_meta(self):
        return {}


def reader(count, **options):
    return lambda shard, shards, batch: Reader(count, batch, shard, shards, **options)


def numbers(dataset):
    return [x.numpy().ravel().astype(int).tolist() for x, _ in dataset]


@pytest.mark.sample(4)
@pytest.mark.parametrize("stick", [True, False])
@pytest.mark.parametrize(("count", "shards", "batch"), [(10, 1, 4), (10, 3, 6), (14, 3, 12), (3, 4, 8), (8, 2, 4)])
def test_each_example_is_read_once_an_epoch(count, shards, batch, stick):
    data = dali(reader(count, stick=stick), global_batch=batch, shards=shards)
    assert data.examples == count
    for _ in range(4):
        found = numbers(data.train)
        assert sorted(sum(found, [])) == list(range(count)) and len(found) == data.steps_per_epoch


def test_batches_that_are_not_full_are_dropped():
    data = dali(reader(10), global_batch=4, last="drop")
    assert numbers(data.train) == [[0, 1, 2, 3], [4, 5, 6, 7]] and data.steps_per_epoch == 2


def test_an_iteration_that_is_left_early_spoils_nothing():
    data = dali(reader(10), global_batch=4)
    next(iter(data.train))
    assert numbers(data.train)[0] == [0, 1, 2, 3] and data._counter.next == 2
    data.seek(5)
    assert numbers(data.train) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    data.seek(0)
    assert numbers(data.train)[2] == [8, 9]


def test_two_iterations_at_once_are_refused():
    data = dali(reader(40), global_batch=4)
    one = iter(data.train)
    next(one)
    next(iter(data.train))
    with pytest.raises(tf.errors.OpError, match="one iteration at a time"):
        list(one)


def model():
    keras.utils.set_random_seed(2)
    made = keras.Sequential([keras.Input([1]), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
    made.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


@pytest.mark.slow
def test_fit_on_two_replicas_equals_one_device():
    tfgpu.repair_keras()
    histories = []
    for strategy in (tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])):
        data = dali(reader(14), global_batch=6, shards=2)
        with strategy.scope():
            made = model()
        histories.append(made.fit(data.train, epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-6)


@pytest.mark.slow
def test_replicas_of_their_own_shards_equal_one_device():
    tfgpu.repair_keras()
    histories = []
    for replicas in (1, 2, 4):
        data = dali(reader(18), global_batch=8, shards=4, last="drop")
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
        with strategy.scope():
            made = model()
        train = data.train if replicas == 1 else data.distribute(strategy)
        histories.append(made.fit(train, epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(histories[1:], [histories[0]] * 2, rtol=1e-6)


@pytest.mark.slow
def test_a_resumed_fit_reads_on_where_it_was(tmp_path):
    tfgpu.repair_keras()

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def run(*callbacks):
        data = dali(reader(14), global_batch=6, shards=3)
        return model().fit(data.train, epochs=4, verbose=0, callbacks=callbacks).history["loss"]

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(keras.callbacks.BackupAndRestore(tmp_path / "backup"), Stop())
    np.testing.assert_allclose(run(keras.callbacks.BackupAndRestore(tmp_path / "backup"))[-2:], whole[2:], rtol=1e-6)


def test_bad_input():
    for wrong in (3, Reader(10, 4)):
        with pytest.raises(InputError, match="must be a function"):
            dali(wrong, global_batch=4)
    with pytest.raises(InputError, match="must return a DALI pipeline"):
        dali(lambda shard, shards, batch: None, global_batch=4)
    with pytest.raises(InputError, match="must divide `global_batch`"):
        dali(reader(10), global_batch=4, shards=3)
    with pytest.raises(InputError, match="Unknown last 'fill'.*partial, drop"):
        dali(reader(10), global_batch=4, last="fill")
    with pytest.raises(InputError, match="pad_last_batch=True"):
        dali(reader(10, pad=False), global_batch=4)
    with pytest.raises(InputError, match="shard 0 of 2. Received: shard 0 of 1"):
        dali(lambda shard, shards, batch: Reader(10, batch), global_batch=4, shards=2)
    with pytest.raises(InputError, match="batches of 2 rows. Received: batches of 4"):
        dali(lambda shard, shards, batch: Reader(10, 4, shard, shards), global_batch=4, shards=2)
    with pytest.raises(InputError, match="Unknown reader 'number'.*numbers"):
        dali(reader(10), global_batch=4, reader="number")
    with pytest.raises(InputError, match="must have a reader"):
        dali(lambda *_: NoReader(10, 4), global_batch=4)
    with pytest.raises(InputError, match="last='drop'"):
        dali(reader(10), global_batch=4).distribute(tf.distribute.get_strategy())
    with pytest.raises(InputError, match="`shards` must be a multiple of the replicas"):
        dali(reader(10), global_batch=4, last="drop").distribute(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))


def test_rows_of_several_shapes_are_refused():
    class Uneven(Reader):
        def run(self):
            return (Rows([np.zeros(2), np.zeros(3)]),)

    with pytest.raises(InputError, match="Crop, resize or pad"):
        dali(lambda *_: Uneven(10, 4), global_batch=4)


WORKER = """
import json, sys
import keras, numpy as np, tensorflow as tf, tfgpu
sys.path.insert(0, sys.argv[1])
from test_pipelines import model, reader
from tfgpu.interop import dali
strategy = tfgpu.strategy()
with strategy.scope():
    made = model()
made_of = []
def make(shard, shards, batch):
    made_of.append(shard)
    return reader(18)(shard, shards, batch)
data = dali(make, global_batch=8, shards=4, last="drop")
made_of.clear()
own = made.fit(data.distribute(strategy), epochs=2, verbose=0).history["loss"]
print(json.dumps([own, made_of]))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_each_of_two_workers_runs_its_own_shards(together):
    tfgpu.repair_keras()
    answers = together(WORKER, {"worker": 2}, str(Path(__file__).parent))
    data = dali(reader(18), global_batch=8, shards=4, last="drop")
    alone = model().fit(data.train, epochs=2, verbose=0).history["loss"]
    for losses, shards in answers.values():
        np.testing.assert_allclose(losses, alone, rtol=1e-6)
        assert len(shards) == 2
    assert sorted(answers["worker0"][1] + answers["worker1"][1]) == [0, 1, 2, 3]


@pytest.fixture
def photos(tmp_path):
    for at in range(11):
        folder = tmp_path / ("cats" if at % 2 else "dogs")
        folder.mkdir(exist_ok=True)
        tf.io.write_file(str(folder / f"{at:02}.png"), tf.io.encode_png(np.full([16, 12, 3], at, np.uint8)))
    return str(tmp_path)


def real(photos, **options):
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(num_threads=2, seed=7, device_id=None)
    def made(shard, shards):
        files, labels = fn.readers.file(
            file_root=photos, shard_id=shard, num_shards=shards, pad_last_batch=True, name="files", seed=5, **options
        )
        return fn.resize(fn.decoders.image(files), size=[8, 8]), labels

    return lambda shard, shards, batch: made(shard, shards, batch_size=batch)


@NEEDS_DALI
@pytest.mark.parametrize("options", [{}, {"random_shuffle": True}, {"shuffle_after_epoch": True}], ids=str)
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_real_dali_reads_each_file_once_an_epoch(photos, shards, options):
    data = dali(real(photos, **options), global_batch=6, shards=shards)
    epochs = [np.concatenate([x.numpy()[:, 0, 0, 0] for x, _ in data.train]).tolist() for _ in range(3)]
    assert data.examples == 11 and [sorted(epoch) for epoch in epochs] == [list(range(11))] * 3
    assert data.train.element_spec[0] == tf.TensorSpec([None, 8, 8, 3], tf.uint8)
    data.seek(1)
    assert np.concatenate([x.numpy()[:, 0, 0, 0] for x, _ in data.train]).tolist() == epochs[1]
    if options:
        assert epochs[0] != epochs[1]


@NEEDS_DALI
def test_the_real_dali_must_have_a_seed():
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(num_threads=1, device_id=None)
    def made():
        return fn.external_source(source=[np.zeros([4, 2])])

    with pytest.raises(InputError, match="must have a seed"):
        dali(lambda shard, shards, batch: made(batch_size=batch), global_batch=4)


@NEEDS_DALI
def test_fit_reads_the_real_dali_on_two_replicas_as_on_one_device(photos):
    tfgpu.repair_keras()
    histories = []
    for strategy in (tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])):
        data = dali(real(photos, random_shuffle=True), global_batch=4, shards=2)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            made = keras.Sequential([keras.Input([8, 8, 3]), keras.layers.Flatten(), keras.layers.Dense(2)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            made.compile(keras.optimizers.SGD(1e-4), loss)
        histories.append(made.fit(data.train, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-5)


@pytest.mark.slow
@NEEDS_DALI
def test_dalis_own_data_set_trains_on_two_replicas_as_on_one_device(photos):
    plugin = pytest.importorskip(
        "nvidia.dali.plugin.tf", reason="DALI's plugin for TensorFlow is missing: nvidia-dali-tf-plugin-cuda120"
    )
    tfgpu.repair_keras()
    histories = []
    for strategy in (tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])):
        with tf.device("CPU:0"):
            data = plugin.DALIDataset(
                real(photos)(0, 1, 4),
                batch_size=4,
                output_shapes=((4, 8, 8, 3), (4, 1)),
                output_dtypes=(tf.uint8, tf.int32),
                device_id=None,
            )
        keras.utils.set_random_seed(1)
        with strategy.scope():
            made = keras.Sequential([keras.Input([8, 8, 3]), keras.layers.Flatten(), keras.layers.Dense(2)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            made.compile(keras.optimizers.SGD(1e-4), loss)
        histories.append(made.fit(data, epochs=2, steps_per_epoch=3, verbose=0).history["loss"])
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-5)
