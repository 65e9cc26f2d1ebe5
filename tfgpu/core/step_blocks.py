"""`fit` and `evaluate` in blocks of steps: each block is one call of a compiled loop, and callbacks run between blocks.

Keras returns to Python after every batch unless `steps_per_execution` says otherwise, which on a small model takes
several times as long as the step. Only callbacks can observe how long a block is. So unless a callback needs per-batch
hooks or `steps_per_execution` is above 1, blocks grow to 0.1 or 0.2 seconds: long enough for speed, short enough for
progress bars and Ctrl-C. Where replicas meet in many collectives they grow on, to 2 or 4 seconds at most: TensorFlow
keeps a record of each for each call, and never frees it. Batches and steps, and so the result, stay the same.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import keras
import tensorflow as tf

from tfgpu.compat import tensorflow as private
from tfgpu.compat import training
from tfgpu.compat.callbacks import traces_batches
from tfgpu.compat.keras import ArrayDataAdapter, CallbackList, TFDatasetAdapter
from tfgpu.compat.patch import wrap
from tfgpu.core import error_messages, extensions, step_context
from tfgpu.core.state import compilation

MOST_STEPS = 4096
BLOCK_S = 0.2
LONG_BLOCK_S = 4.0
RECORD_BYTES = 1600
"""Of TensorFlow's record of a collective in one call; `python -m benchmarks.memory_slope` measures it."""
STEP_BYTES = 1024
"""Of records that a step may leave: about 100 MiB in 100,000 steps. Blocks up to `LONG_BLOCK_S` grow until it holds."""
CALLBACKS = "callbacks: "
"""Prefix of `Run.set_by` if callbacks need per-batch hooks; their classes follow."""


class Pace:
    """How many steps the next block has: 1, doubled until a block takes half of its limit.

    The limit is `BLOCK_S`; `LONG_BLOCK_S` while the records of collectives are more than `STEP_BYTES` a step.
    """

    def __init__(self):
        self.steps = 1

    def note(self, done: int, seconds: float, collectives: float = 0) -> None:
        """Records how long a block of `done` steps took, and how many collectives its function has."""
        longest = LONG_BLOCK_S if collectives * RECORD_BYTES > done * STEP_BYTES else BLOCK_S
        if done == self.steps and seconds < longest / 2:
            self.steps = min(2 * self.steps, MOST_STEPS)

    def of(self, left: float) -> int:
        """Steps of the next block; the epoch has `left` more."""
        return self.steps


@dataclass
class Block:
    """Steps that a compiled loop runs in one call.

    Attributes:
        iterator: yields their batches.
        count: number of steps.
        is_sure: the data is known to have that many batches.
        begin: index of the first step in the epoch.
        rows: of each of the first `full` batches; None if unknown.
        full: how many of the first batches have that many rows.
        done: how many steps ran, once the block has run.
        first: yields the batch of the first step, if that has been read from `iterator` already.
        computing_s: seconds a step without its wait for data, once the block has run: the mean of the last blocks; None
            unless the data is read ahead to a GPU.
    """

    iterator: object
    count: int
    is_sure: bool = False
    begin: int = 0
    rows: int | None = None
    full: float = 0
    done: int | None = None
    first: object | None = None
    computing_s: float | None = None

    @property
    def end(self) -> int:
        """Index of the last step in the epoch."""
        return self.begin + self.count - 1

    def skip(self, steps: int) -> "Block":
        """The block without its first batches."""
        rest = self.count - steps, self.is_sure, self.begin + steps, self.rows, max(0, self.full - steps)
        return Block(self.iterator, *rest)


class StopRequest(Protocol):
    """A request to stop the training, on which all workers act after the same block.

    Attributes:
        is_requested: this process was asked to stop.
        is_agreed: all processes of the run know of it.
    """

    is_requested: bool
    is_agreed: bool


class StepWrapper(Protocol):
    """Runs each training step of a `fit`."""

    def run(self, step: Callable, data):
        """Runs `step(data)` on a replica, within the graph of the step, and returns its logs."""


@dataclass
class Run:
    """A running `fit` or `evaluate`, and what it asks of its blocks.

    Attributes:
        model: the model that runs.
        kind: "train" or "test".
        every_batch: by kind, whether a callback needs per-batch hooks.
        steps: the length of all blocks, if one was requested.
        block: the block that ran last.
        ends: each returns the largest number of steps before a callback must be called.
        on_all: classes of the callbacks that every worker must have, because they communicate with the other workers'.
        stop_request: the request to stop, if a callback listens for one.
        step_wrapper: runs each step, if a callback requires it.
        exits: closed when the run ends, even by an error.
        asides: each makes a context for an `evaluate` that a callback calls between steps.
        logs: the last epoch's logs.
        per_batch: by kind, the classes of this worker's callbacks that need per-batch hooks.
        arguments: what `fit` or `evaluate` was called with, by name.
        on_meeting: each is called with the strategy when all workers have come to this run, before all else.
        before_steps: each is called once, with the first block, before its steps.
        after_block: each is called after a block with its steps and seconds, equal on all workers (`worker_vote`).
        epoch_ends: each is called after an epoch's steps and validation, before any callback's `on_epoch_end`.
        wants_to_stop: this worker has set `stop_training` within an epoch, and the others are to hear of it.
        stops: all workers stop after this block.
        looks_at_first_batch: something in `before_steps` looks at the whole first batch.
    """

    model: object
    kind: str
    every_batch: dict[str, bool] = field(default_factory=dict)
    steps: int | None = None
    block: Block | None = None
    ends: list[Callable[[], int]] = field(default_factory=list)
    on_all: tuple[str, ...] = ()
    stop_request: StopRequest | None = None
    step_wrapper: StepWrapper | None = None
    exits: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    asides: list[Callable[[], contextlib.AbstractContextManager]] = field(default_factory=list)
    logs: dict | None = None
    per_batch: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arguments: dict[str, object] = field(default_factory=dict)
    on_meeting: list[Callable[[tf.distribute.Strategy], None]] = field(default_factory=list)
    before_steps: list[Callable[[object], None]] = field(default_factory=list)
    after_block: list[Callable[[int, float], None]] = field(default_factory=list)
    epoch_ends: list[Callable[[], None]] = field(default_factory=list)
    wants_to_stop: bool = False
    stops: bool = False
    looks_at_first_batch: bool = False

    def wanted(self, left: float = float("inf")) -> int | None:
        """Steps of the next block; None leaves Keras to run batch by batch.

        Args:
            left: steps that the epoch has left, if known.
        """
        function = getattr(self.model, f"{self.kind}_function")
        if not hasattr(function, "pace") or self.model.run_eagerly or self.model.steps_per_execution != 1:
            return None
        steps = self.steps
        if steps is None:
            steps = 1 if self.every_batch[self.kind] else function.pace.of(left)
        return min([steps, *(most() for most in self.ends)])

    @property
    def set_by(self) -> str:
        """What sets the length of its blocks, for profiles; "pace" if they grow."""
        if self.model.run_eagerly:
            return "run_eagerly"
        if self.model.steps_per_execution != 1:
            return "steps_per_execution"
        if self.steps is not None:
            return "steps_per_call"
        if self.every_batch[self.kind]:  # The callback may be another worker's.
            return CALLBACKS + (", ".join(self.per_batch[self.kind]) or "another worker's")
        return "pace"


def run_in_blocks() -> None:
    """Lets the epoch iterator yield blocks of steps instead of single steps."""
    compilation.let_extensions_act()
    _track_runs()
    _yield_blocks()
    _follow_callbacks()


def current() -> Run | None:
    """The `fit` or `evaluate` that this thread is in, or None."""
    return step_context.current().run


def set_by(model, kind: str) -> str:
    """What sets how many steps the next call of a model runs: `Run.set_by`, or the `..._on_batch` method."""
    run = current()
    return f"{kind}_on_batch" if run is None or run.model is not model else run.set_by


def fixed_steps_per_call(count: int | None):
    """Inside the block, every `fit` and `evaluate` runs `count` steps per call; None lets their blocks grow."""
    return step_context.scope(steps_per_call=count)


def needs_every_batch(callback, kind: str = "train") -> bool:
    """Whether a callback must be called after every batch.

    A custom callback opts out with the attribute `every_batch = False`.

    Args:
        callback: a Keras callback.
        kind: "train", or "test" for `evaluate`.
    """
    if hasattr(callback, "every_batch"):
        return callback.every_batch
    if isinstance(callback, (keras.callbacks.History, keras.callbacks.ProgbarLogger)):
        return False
    for attribute in ("save_freq", "update_freq"):  # ModelCheckpoint, BackupAndRestore, TensorBoard
        if hasattr(callback, attribute):
            return getattr(callback, attribute) != "epoch" or traces_batches(callback)
    stock = keras.callbacks.Callback()
    hooks = [f"on_{kind}_batch_begin", f"on_{kind}_batch_end"]
    hooks += ["on_batch_begin", "on_batch_end"] if kind == "train" else []
    # By function, because LambdaCallback puts its hooks on the instance.
    return any(_function(callback, hook) is not _function(stock, hook) for hook in hooks)


def _function(callback, name: str):
    hook = getattr(callback, name)
    return getattr(hook, "__func__", hook)


def _track_runs() -> None:
    for name, kind in (("fit", "train"), ("evaluate", "test"), ("predict", None)):

        @wrap(f"TensorFlowTrainer.{name}")
        def method(stock, self, *args, name=name, kind=kind, **kwargs):
            arguments = dict(inspect.signature(stock).bind(self, *args, **kwargs).arguments)
            with contextlib.ExitStack() as surrounding:
                for around in extensions.method_calls:
                    surrounding.enter_context(around(self, name, arguments))
                run = None if kind is None else _begun(self, kind, arguments)
                exits = run.exits if run is not None else contextlib.nullcontext()
                # Epoch iterators made elsewhere give the rows alone, as in stock Keras; those of `predict` as it says.
                scope = step_context.scope(run=run, **({} if kind is None else {"gives_row_ranges": True}))
                with scope, error_messages.explained(self), exits:
                    return stock(self, *args, **kwargs)


def _begun(model, kind: str, arguments: dict[str, object]) -> Run:
    callbacks = arguments.get("callbacks")
    asked, per_batch = _asked(model, callbacks)
    steps = step_context.current().steps_per_call
    run = Run(model, kind, asked, steps, per_batch=per_batch, arguments=arguments)
    _take_over(run, current(), callbacks)
    for start in extensions.run_starts:
        start(run)
    return run


def _take_over(run: Run, outer: Run | None, callbacks) -> None:
    """Copies settings from the callbacks and from the enclosing `fit` to a run."""
    if outer is not None and outer.model is run.model:
        run.stop_request, run.on_all = outer.stop_request, outer.on_all
        if run.kind == "test" and not isinstance(callbacks, CallbackList):  # not the `fit`'s own validation
            for aside in outer.asides:
                run.exits.enter_context(aside())
    if run.kind == "train":
        meeting = [callback for callback in listed(callbacks) if getattr(callback, "on_all_workers", False)]
        run.on_all = tuple(sorted(type(callback).__name__ for callback in meeting))


def listed(callbacks) -> list:
    """The callbacks that were passed to `fit`, as a list."""
    if isinstance(callbacks, CallbackList):
        return callbacks.callbacks
    return tf.nest.flatten(callbacks) if callbacks else []


def _asked(model, callbacks) -> tuple[dict[str, bool], dict[str, tuple[str, ...]]]:
    """Whether a callback needs per-batch hooks, and the classes of those that do, by kind."""
    outer = current()
    if isinstance(callbacks, CallbackList):
        if outer is not None and outer.model is model:
            return outer.every_batch, outer.per_batch  # the validation of a `fit`, whose workers have agreed
    per_batch = {}
    for kind in ("train", "test"):
        found = [type(callback).__name__ for callback in listed(callbacks) if needs_every_batch(callback, kind)]
        per_batch[kind] = tuple(dict.fromkeys(found))
    return {kind: bool(found) for kind, found in per_batch.items()}, per_batch


def _yield_blocks() -> None:
    @wrap("TFEpochIterator.enumerate_iterator")
    def enumerate_iterator(stock, self):
        run, steps = current(), stock(self)
        if run is None or run.wanted() is None:
            yield from steps
            return
        is_sure, (rows, full) = _has_known_length(self), _full_batches(self.data_adapter)
        for begin, _, iterator in steps:
            left = _left(self, begin)
            count = min(run.wanted(left), left)
            full_left = max(0, full - training.batches_seen(self) + 1)
            for _ in range(count - 1):
                next(steps)
            block = run.block = Block(iterator, count, is_sure, begin, rows, full_left)
            yield begin, block.end, block


def _left(data, begin: int) -> float:
    """Steps that Keras's own count still allows: after the last one it tells the data that the epoch has ended."""
    batches = training.batches_known(data)
    limit = data.steps_per_epoch or batches
    left = limit - begin if limit else float("inf")
    return min(left, batches - training.batches_seen(data) + 1) if batches else left


def _has_known_length(data) -> bool:
    if isinstance(data.data_adapter, ArrayDataAdapter):
        return True
    source = data.data_adapter.get_tf_dataset() if isinstance(data.data_adapter, TFDatasetAdapter) else None
    return isinstance(source, tf.data.Dataset) and int(source.cardinality()) != tf.data.UNKNOWN_CARDINALITY


def _full_batches(adapter: object) -> tuple[int | None, float]:
    """The rows of a full batch, and how many full batches a pass over the data begins with; None where it hides them.

    Data that was batched without `drop_remainder` names no number of rows, because its last batch may have fewer. Known
    are arrays, and datasets that end with `batch`, before `prefetch`, `cache` and `with_options`.
    """
    if isinstance(adapter, ArrayDataAdapter):
        rows = training.batch_size_of(adapter)
        return rows, training.rows_of(adapter) // rows
    dataset = adapter.get_tf_dataset() if isinstance(adapter, TFDatasetAdapter) else None
    while private.passes_elements_on(dataset):
        (dataset,) = private.sources_of(dataset)
    rows = private.rows_of_batches(dataset)
    if rows is None:
        return None, 0
    (source,) = private.sources_of(dataset)
    length = int(source.cardinality())
    if length == tf.data.INFINITE_CARDINALITY:
        return rows, float("inf")
    return (None, 0) if length < 0 else (rows, length // rows)


def _follow_callbacks() -> None:
    """Tells callbacks the last step that ran, in case the data ended within a block; calls extensions after them."""

    @wrap("CallbackList.on_train_begin")
    def on_train_begin(stock, self, logs=None):
        stock(self, logs)
        _after(self, "on_train_begin", None)

    @wrap("CallbackList.on_epoch_end")
    def on_epoch_end(stock, self, epoch, logs=None):
        for act in getattr(current(), "epoch_ends", ()):
            act()
        stock(self, epoch, logs)
        _after(self, "on_epoch_end", epoch)

    for name in ("on_train_batch_end", "on_test_batch_end"):

        @wrap(f"CallbackList.{name}")
        def on_batch_end(stock, self, batch, logs=None, *, name=name):
            step = last_step(batch)
            stock(self, step, logs)
            _after(self, name, step)


def _after(callbacks: CallbackList, name: str, at: int | None) -> None:
    for after in extensions.after_callbacks:
        after(callbacks, name, at)


def last_step(batch: int) -> int:
    """The index in the epoch of the last step that ran; Keras counts to `batch`."""
    run = current()
    block = run.block if run is not None else None
    if block is not None and block.done and batch == block.end:
        return block.begin + block.done - 1
    return batch


def single_batches(iterator) -> Iterator:
    """The iterator of single batches, whether Keras was given a block or not."""
    return iterator.iterator if isinstance(iterator, Block) else iterator
