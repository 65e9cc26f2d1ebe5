"""NVIDIA DALI pipelines as data for `fit`: each example once per epoch, for any number of replicas and workers."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfgpu.data import position
from tfgpu.errors import InputError, MachineError, unknown, whole_number

LAST = ("partial", "drop")
Make = Callable[[int, int, int], object]
Batch = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class DaliBatches(position.Epochs):
    """Batches from DALI.

    Attributes:
        train: one iteration is one epoch; each new iteration is the next epoch (see `seek`, `peek`). An element is
            the output of the pipeline: `(x, y)`, `(x, y, sample_weight)`, or `x` alone.
        examples: examples per epoch.
        steps_per_epoch: batches per epoch.
    """

    train: tf.data.Dataset
    examples: int
    steps_per_epoch: int
    _counter: position.Counter = field(repr=False)
    _source: "_Source" = field(repr=False)

    def distribute(self, strategy: tf.distribute.Strategy) -> object:
        """Lets each worker read only the shards of its own replicas.

        The batches equal those of `train`.

        Args:
            strategy: its number of replicas must divide `shards`.

        Returns:
            A dataset to pass to `fit` instead of `train`.

        Raises:
            InputError: the number of replicas does not divide `shards`, or `last` is not `"drop"`: here, all replicas
                must have the same number of rows.
        """
        source, replicas = self._source, strategy.num_replicas_in_sync
        if source.shards % replicas:
            raise InputError(
                f"`shards` must be a multiple of the replicas. Received: shards={source.shards}, replicas={replicas}."
            )
        if source.last != "drop":
            raise InputError("`distribute` needs dali(..., last='drop'), so that replicas have equally many rows.")

        def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
            local = replicas // context.num_input_pipelines
            first = context.input_pipeline_id * local
            own = range(first * each, (first + local) * each)
            return _dataset(_Run(source, own), self._counter, local)

        each = source.shards // replicas
        return strategy.distribute_datasets_from_function(of_worker)


def dali(
    make: object, *, global_batch: int, shards: int = 1, reader: str | None = None, last: str = "partial"
) -> DaliBatches:
    """Reads batches from a DALI pipeline; their content does not depend on the number of replicas or workers.

    A global batch has equally many rows of each shard, so it is the same wherever the shards are read. With `train`,
    each worker reads all shards, and `fit` splits the batch; with `distribute`, each worker reads its own. All rows
    pass through host memory, also those that DALI made on a GPU. An iteration that ended early is read to its end
    before the next one.

    Args:
        make: `(shard_id, num_shards, batch) -> pipeline`, with a seed; called again to return to an earlier epoch.
        global_batch: rows in a batch; a multiple of `shards`.
        shards: the number of shards of the readers. With more than one, workers can share the reading.
        reader: the name of the reader that counts examples. Default: the only one. It must have `pad_last_batch=True`
            (the padding is removed here).
        last: `"partial"`: the last batch of an epoch is smaller; `"drop"`: incomplete batches are dropped.

    Returns:
        The batches.

    Raises:
        InputError: `make` does not return a pipeline, or the pipeline ignores its shard, or rows differ in shape.

    Example:
        @pipeline_def(num_threads=4, seed=1)
        def photos(shard_id, num_shards):
            files, labels = fn.readers.file(
                file_root="photos", shard_id=shard_id, num_shards=num_shards, pad_last_batch=True, random_shuffle=True,
                name="files", seed=1,
            )
            return fn.resize(fn.decoders.image(files), size=[64, 64]), labels

        def make(shard, shards, batch):
            return photos(shard, shards, batch_size=batch, device_id=None)

        data = dali(make, global_batch=64, shards=4)

    Source: https://docs.nvidia.com/deeplearning/dali/user-guide/docs/advanced_topics_sharding.html
    """
    for name, value in (("global_batch", global_batch), ("shards", shards)):
        whole_number(name, value)
    if global_batch % shards:
        raise InputError(
            f"`shards` must divide `global_batch`. Received: shards={shards}, global_batch={global_batch}."
        )
    if last not in LAST:
        raise unknown("last", last, LAST)
    source = _Source(make, shards, global_batch // shards, reader, last)
    run = _Run(source, range(shards))
    counts = [sum(run.kept(0, step)) for step in range(run.parts[0].steps)]
    steps = sum(count == global_batch or (last == "partial" and count > 0) for count in counts)
    counter = position.Counter()
    return DaliBatches(_dataset(run, counter, 1, steps), run.parts[0].examples, steps, counter, source)


class _Source:
    """Creates the pipelines of shards."""

    def __init__(self, make: object, shards: int, batch: int, reader: str | None, last: str):
        self.shards, self.batch, self.reader, self.last = shards, batch, reader, last
        if not callable(make) or hasattr(make, "run"):
            raise InputError(
                "`make` must be a function of (shard_id, num_shards, batch) that creates a DALI pipeline. "
                f"Received: {type(make)}."
            )
        self._make = make

    def pipeline(self, shard: int) -> object:
        made = self._make(shard, self.shards, self.batch)
        if not hasattr(made, "run"):
            raise InputError(f"`make` must return a DALI pipeline. Received: {type(made)}.")
        size = getattr(made, "max_batch_size", self.batch)
        if size != self.batch:
            raise InputError(f"The pipeline must make batches of {self.batch} rows. Received: batches of {size}.")
        seed = getattr(made, "seed", 0)
        if seed is None or seed < 0:
            raise InputError(
                "The pipeline must have a seed, so that all workers and runs draw the same numbers. Received: no seed. "
                "Add seed=1 to pipeline_def."
            )
        if hasattr(made, "build"):
            made.build()
        return made


class _Shard:
    """One pipeline and its position."""

    def __init__(self, source: _Source, number: int):
        self._source, self._number, self._pipeline = source, number, source.pipeline(number)
        self._ahead: list[Batch] = []
        self._facts = self._reader()
        self.examples = self._facts["epoch_size"]

    @property
    def steps(self) -> int:
        """Batches per epoch, equal in each shard."""
        largest = -(-self.examples // self._source.shards)
        return -(-largest // self._source.batch)

    def count(self, epoch: int) -> int:
        """Examples of this shard in an epoch. Without `stick_to_shard`, a reader changes the shard every epoch."""
        shards = self._source.shards
        own = self._number if self._facts["stick_to_shard"] else (self._number + epoch) % shards
        return (own + 1) * self.examples // shards - own * self.examples // shards

    def look(self) -> Batch:
        """The next batch, without consuming it."""
        if not self._ahead:
            self._ahead.append(self._run())
        return self._ahead[0]

    def take(self) -> Batch:
        """Consumes the next batch."""
        return self._ahead.pop() if self._ahead else self._run()

    def _run(self) -> Batch:
        return tuple(_array(output, at) for at, output in enumerate(self._pipeline.run()))

    def _reader(self) -> dict[str, int]:
        meta: dict[str, dict[str, int]] = self._pipeline.reader_meta()
        name = self._source.reader
        if not meta:
            raise InputError(
                "The pipeline must have a reader, which counts examples. Add one of nvidia.dali.fn.readers."
            )
        if name is None and len(meta) > 1:
            raise InputError(f"The pipeline has several readers: {', '.join(meta)}. Choose one with reader=NAME.")
        if name is not None and name not in meta:
            raise unknown("reader", name, meta)
        facts = meta[name] if name is not None else next(iter(meta.values()))
        shards = self._source.shards
        if (facts["number_of_shards"], facts["shard_id"]) != (shards, self._number):
            raise InputError(
                f"The reader must take shard {self._number} of {shards}. Received: shard {facts['shard_id']} of "
                f"{facts['number_of_shards']}. Pass shard_id and num_shards to it."
            )
        if not facts["pad_last_batch"]:
            raise InputError(
                "The reader must have pad_last_batch=True: otherwise the last batch of an epoch contains rows of the "
                "next. The padding is removed."
            )
        return facts


class _Run:
    """Reads some shards in parallel, epoch by epoch."""

    def __init__(self, source: _Source, which: Sequence[int]):
        self._source, self._which = source, which
        self._one_at_a_time = threading.Lock()
        self._turn = 0
        self._open()
        self.spec = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in self.parts[0].look())

    def kept(self, epoch: int, step: int) -> list[int]:
        """The rows of each shard in a batch, without padding."""
        batch = self._source.batch
        return [int(np.clip(part.count(epoch) - step * batch, 0, batch)) for part in self.parts]

    def epoch(self, number: int) -> Iterator[list[Batch]]:
        """Yields the batches of an epoch, each as a list of rows by shard."""
        with self._one_at_a_time:
            self._turn += 1
            turn = self._turn
            if (self._epoch, self._step) > (number, 0):
                self._open()
            while self._epoch < number:
                self._next()
        while True:
            with self._one_at_a_time:
                if turn != self._turn:
                    raise MachineError("Another iteration over this DALI data has begun. Use one iteration at a time.")
                rows = self._next()
            if rows is None:
                return
            yield rows

    def _open(self) -> None:
        self.parts = [_Shard(self._source, number) for number in self._which]
        self._epoch, self._step = 0, 0

    def _next(self) -> list[Batch] | None:
        """One batch of each shard, without padding; None at the end of the epoch, which begins the next."""
        if self._step == self.parts[0].steps:
            self._epoch, self._step = self._epoch + 1, 0
            return None
        kept = self.kept(self._epoch, self._step)
        self._step += 1
        return [tuple(array[:rows] for array in part.take()) for part, rows in zip(self.parts, kept, strict=True)]


def _dataset(run: _Run, counter: position.Counter, pieces: int, steps: int | None = None) -> tf.data.Dataset:
    """A dataset of an epoch's batches, each split into `pieces` consecutive elements."""
    each, batch, drop = len(run.parts) // pieces, run._source.batch, run._source.last == "drop"

    def generate(epoch: np.int64) -> Iterator[Batch | np.ndarray]:
        for found in run.epoch(int(epoch)):
            if drop and any(len(rows[0]) < batch for rows in found):
                continue
            for at in range(pieces):
                own = found[at * each : (at + 1) * each]
                joined = tuple(np.concatenate(arrays) for arrays in zip(*own, strict=True))
                if len(joined[0]):
                    yield joined if len(joined) > 1 else joined[0]

    spec = run.spec if len(run.spec) > 1 else run.spec[0]

    def of_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(generate, output_signature=spec, args=[epoch])

    made = counter.epochs().flat_map(of_epoch)
    if steps is not None:
        made = made.apply(tf.data.experimental.assert_cardinality(steps))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return made.prefetch(2).with_options(options)


def _array(output: object, at: int) -> np.ndarray:
    """Copies a TensorList into an array: DALI reuses its memory in the next run."""
    try:
        on_host = output.as_cpu() if hasattr(output, "as_cpu") else output
        return np.array(on_host.as_array() if hasattr(on_host, "as_array") else on_host)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(
            f"All rows of output {at} of the pipeline must have the same shape. DALI says: "
            f"{str(error).splitlines()[0]} Crop, resize or pad them in the pipeline."
        ) from error
