"""NVIDIA DALI's pipelines as a source for `fit`: each example once an epoch, whatever reads them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfgpu.data import position
from tfgpu.errors import InputError, MachineError, unknown, whole_number

LAST = ("partial", "drop")
Make = Callable[[int, int, int], object]
Rows = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class DaliBatches(position.Epochs):
    """Batches that DALI makes.

    Attributes:
        train: one iteration is one epoch; each start of an iteration takes the next (see `seek`, `peek`). An element is
            what the pipeline returns: `(x, y)`, `(x, y, sample_weight)`, or `x` alone.
        examples: in an epoch; None where the pipeline has no reader that counts them.
        steps_per_epoch: batches in an epoch, or None as well.
    """

    train: tf.data.Dataset
    examples: int | None
    steps_per_epoch: int | None
    _counter: position.Counter = field(repr=False)
    _source: "_Source" = field(repr=False)

    def distribute(self, strategy: tf.distribute.Strategy) -> object:
        """Lets each worker run only the shards of its own replicas, instead of all.

        The batches are the same as those of `train`.

        Args:
            strategy: whose replicas must divide `shards`, of which each has as many.

        Returns:
            What `fit` takes in the place of `train`.

        Raises:
            InputError: shards that cannot be shared out, or `last` is not `"drop"`: replicas must have equally many
                rows here.
        """
        source, replicas = self._source, strategy.num_replicas_in_sync
        if source.shards % replicas:
            raise InputError(f"{replicas} replicas must divide `shards`. Received: shards={source.shards}.")
        if source.last != "drop":
            raise InputError("`distribute` needs dali(..., last='drop'): replicas must have equally many rows.")

        def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
            local = replicas // context.num_input_pipelines
            first = context.input_pipeline_id * local
            own = range(first * each, (first + local) * each)
            return _dataset(source.opened(own), self._counter, local)

        each = source.shards // replicas
        return strategy.distribute_datasets_from_function(of_worker)


def dali(
    make: object, *, global_batch: int, shards: int = 1, reader: str | None = None, last: str = "partial"
) -> DaliBatches:
    """Reads batches from a DALI pipeline, whose order decides what is in them: not the number of replicas or workers.

    A global batch is made of equally many rows of each shard, so it is the same wherever they are read. By `train` each
    worker runs all shards, and `fit` cuts the batch; by `distribute` each runs its own. The rows come through the
    host's memory, also those that DALI made on a GPU. An iteration that was left early is run to its end, unseen,
    before the next.

    Args:
        make: `(shard_id, num_shards, batch) -> pipeline`, with a seed. Or a pipeline of batches of `global_batch`,
            which cannot go back to an earlier epoch.
        global_batch: rows in a batch, which `shards` divides.
        shards: into how many parts the readers cut the data. More than one lets workers share out the reading.
        reader: the name of the reader that counts examples; left out: the only one, if any. It must be told
            `pad_last_batch=True` (what it pads is left out here). A pipeline without one ends its epochs itself, by
            `StopIteration`, as `external_source` does.
        last: `"partial"`: the last batch of an epoch is smaller; `"drop"`: batches that are not full are left out.

    Returns:
        The batches.

    Raises:
        InputError: a pipeline that is none, that does not use its shard, or whose rows are not of one shape.

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
    run = source.opened(range(shards))
    examples = run.parts[0].examples
    steps = None
    if examples is not None:
        counts = [run.rows_at(0, step) for step in range(run.steps)]
        steps = sum(count == global_batch or (last == "partial" and count > 0) for count in counts)
    counter = position.Counter()
    return DaliBatches(_dataset(run, counter, 1, steps), examples, steps, counter, source)


class _Source:
    """How shards are made."""

    def __init__(self, make: object, shards: int, batch: int, reader: str | None, last: str):
        self.shards, self.batch, self.reader, self.last = shards, batch, reader, last
        self._is_one = hasattr(make, "run")
        if self._is_one and shards > 1:
            raise InputError(f"One pipeline is one shard. Received: shards={shards}. Give a function that makes them.")
        if not self._is_one and not callable(make):
            raise InputError(
                "`make` must be a DALI pipeline, or a function of (shard_id, num_shards, batch) that makes one. "
                f"Received: {type(make)}."
            )
        self._make = make

    def opened(self, which: Sequence[int]) -> "_Run":
        return _Run(self, list(which))

    def pipeline(self, shard: int, anew: bool) -> object:
        if self._is_one:
            if anew:
                raise InputError("A pipeline cannot go back to an earlier epoch. Give a function that makes it.")
            made = self._make
        else:
            made = self._make(shard, self.shards, self.batch)
        if not hasattr(made, "run"):
            raise InputError(f"`make` must return a DALI pipeline, which has `run`. Received: {type(made)}.")
        size = getattr(made, "max_batch_size", self.batch)
        if size != self.batch:
            raise InputError(f"The pipeline must make batches of {self.batch} rows. Received: batches of {size}.")
        seed = getattr(made, "seed", 0)
        if seed is None or seed < 0:
            raise InputError(
                "The pipeline must have a seed, or each worker, and each run, would draw other numbers. "
                "Received: none. Add seed=1 to pipeline_def."
            )
        if hasattr(made, "build"):
            made.build()
        return made


class _Shard:
    """One pipeline, and where it is."""

    def __init__(self, source: _Source, number: int, anew: bool):
        self._source, self._number = source, number
        self._pipeline = source.pipeline(number, anew)
        self._ahead: list[Rows | None] = []
        self._facts = self._reader()
        self.examples = self._facts["epoch_size"] if self._facts else None

    @property
    def steps(self) -> int | None:
        """Batches in an epoch, the same in each shard; None where the source says when it ends."""
        if self.examples is None:
            return None
        largest = -(-self.examples // self._source.shards)
        return -(-largest // self._source.batch)

    def count(self, epoch: int) -> int:
        """Examples of this shard in an epoch. Unless told to stick to it, a reader goes on to the next shard."""
        shards = self._source.shards
        own = self._number if self._facts["stick_to_shard"] else (self._number + epoch) % shards
        return (own + 1) * self.examples // shards - own * self.examples // shards

    def look(self) -> Rows | None:
        """The next batch, which stays the next."""
        if not self._ahead:
            self._ahead.append(self._run())
        return self._ahead[0]

    def take(self) -> Rows | None:
        """The next batch, or None at the end of a source that ends its epochs itself."""
        return self._ahead.pop() if self._ahead else self._run()

    def _run(self) -> Rows | None:
        try:
            outputs = self._pipeline.run()
        except StopIteration:
            self._pipeline.reset()
            return None
        return tuple(_array(output, at) for at, output in enumerate(outputs))

    def _reader(self) -> dict[str, int] | None:
        meta: dict[str, dict[str, int]] = self._pipeline.reader_meta() if hasattr(self._pipeline, "reader_meta") else {}
        name = self._source.reader
        if name is None and len(meta) > 1:
            raise InputError(f"The pipeline has several readers: {', '.join(meta)}. Say which counts: reader=NAME.")
        if name is not None and name not in meta:
            raise unknown("reader", name, meta)
        if not meta:
            return None
        facts = meta[name] if name is not None else next(iter(meta.values()))
        shards = self._source.shards
        if (facts["number_of_shards"], facts["shard_id"]) != (shards, self._number):
            raise InputError(
                f"The reader must take shard {self._number} of {shards}. Received: shard {facts['shard_id']} of "
                f"{facts['number_of_shards']}. Hand shard_id and num_shards on to it."
            )
        if not facts["pad_last_batch"]:
            raise InputError(
                "The reader must have pad_last_batch=True: without it the last batch of an epoch has rows of the next. "
                "What it pads is left out."
            )
        return facts


class _Run:
    """Some shards, read side by side from epoch to epoch."""

    def __init__(self, source: _Source, which: list[int]):
        self._source, self._which = source, which
        self._one_at_a_time = threading.Lock()
        self._turn = 0
        self._open(anew=False)
        firsts = [part.look() for part in self.parts]
        if any(first is None for first in firsts):
            raise InputError("The pipeline ended before its first batch.")
        self.spec = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in firsts[0])

    @property
    def steps(self) -> int | None:
        return self.parts[0].steps

    def rows_at(self, epoch: int, step: int) -> int:
        batch = self._source.batch
        return sum(int(np.clip(part.count(epoch) - step * batch, 0, batch)) for part in self.parts)

    def epoch(self, number: int) -> Iterator[list[Rows]]:
        """The batches of an epoch, each as the rows of every shard."""
        with self._one_at_a_time:
            self._turn += 1
            turn = self._turn
            self._go_to(number)
        while True:
            with self._one_at_a_time:
                if turn != self._turn:
                    raise MachineError("Another iteration of this DALI data has begun. Use one at a time.")
                rows = self._next()
            if rows is None:
                return
            yield rows

    def _open(self, *, anew: bool) -> None:
        self.parts = [_Shard(self._source, number, anew) for number in self._which]
        self._epoch, self._step = 0, 0
        self._ended = [False] * len(self.parts)

    def _go_to(self, epoch: int) -> None:
        if (self._epoch, self._step) > (epoch, 0):
            self._open(anew=True)
        while self._epoch < epoch:
            self._next()

    def _next(self) -> list[Rows] | None:
        """One batch of each shard, without what is padded; None, and the next epoch, where all have ended."""
        found = []
        if self.steps is None or self._step < self.steps:
            for at, part in enumerate(self.parts):
                rows = None if self._ended[at] else part.take()
                self._ended[at] = rows is None
                if rows is not None and self.steps is not None:
                    batch = self._source.batch
                    kept = int(np.clip(part.count(self._epoch) - self._step * batch, 0, batch))
                    rows = tuple(array[:kept] for array in rows)
                found.append(rows)
        if all(rows is None for rows in found):
            if self._step == 0:
                raise InputError(
                    f"The pipeline has no batch in epoch {self._epoch}. An `external_source` over a list needs "
                    'cycle="raise", to begin anew.'
                )
            self._epoch, self._step, self._ended = self._epoch + 1, 0, [False] * len(self.parts)
            return None
        self._step += 1
        empty = tuple(np.zeros((0, *spec.shape[1:]), spec.dtype.as_numpy_dtype) for spec in self.spec)
        return [empty if rows is None else rows for rows in found]


def _dataset(run: _Run, counter: position.Counter, pieces: int, steps: int | None = None) -> tf.data.Dataset:
    """An epoch's batches, each in `pieces` elements one after the other."""
    each, batch, drop = len(run.parts) // pieces, run._source.batch, run._source.last == "drop"

    def generate(epoch: np.int64) -> Iterator[Rows | np.ndarray]:
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
    """A TensorList's rows as one array, which is a copy: DALI uses its memory again at the next run."""
    try:
        on_host = output.as_cpu() if hasattr(output, "as_cpu") else output
        return np.array(on_host.as_array() if hasattr(on_host, "as_array") else on_host)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(
            f"Output {at} of the pipeline must have rows of one shape. DALI says: {str(error).splitlines()[0]} "
            "Crop, resize or pad them in the pipeline."
        ) from error
