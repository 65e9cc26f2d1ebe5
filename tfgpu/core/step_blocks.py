"""`fit` and `evaluate` in blocks of steps: each block is one call of a compiled loop, and callbacks run between blocks.

Keras goes back to Python after every batch unless `steps_per_execution` says otherwise, and on a small model that takes
several times as long as the step. What shows the length of a block are the callbacks alone. So where
`steps_per_execution` is 1, as by default, or "auto", and no callback looks at single batches, blocks grow to a tenth
or two of a second: long enough for speed, short enough for progress bars and Ctrl-C. The batches, the steps, and so the
result are the same.
"""

import contextlib
import inspect
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import tensorflow as tf
from keras.src import callbacks as keras_callbacks
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.trainer import Trainer

from tfgpu.checkpoint.preemption import Leaving
from tfgpu.compat.patch import wrap
from tfgpu.core import error_messages, iterator_end, step_context
from tfgpu.errors import InputError

MOST_STEPS = 4096
BLOCK_S = 0.2
CALLBACKS = "callbacks: "
"""How `Run.set_by` begins where callbacks look at single batches; their classes follow."""


class Pace:
    """How many steps the next block has: 1, doubled until a block takes half of `BLOCK_S`."""

    def __init__(self):
        self.steps = 1

    def note(self, done: int, seconds: float) -> None:
        """Takes in how long a block of `done` steps took."""
        if done == self.steps and seconds < BLOCK_S / 2:
            self.steps = min(2 * self.steps, MOST_STEPS)

    def of(self, left: float) -> int:
        """Steps of the next block, where the epoch has `left` more."""
        return self.steps


@dataclass
class Block:
    """Steps that a compiled loop runs in one call.

    Attributes:
        iterator: where their batches come from.
        count: how many steps.
        is_sure: it is known that the data has as many batches.
        begin: the epoch's number of the first step.
        done: how many there was data for, once the block has run.
    """

    iterator: object
    count: int
    is_sure: bool = False
    begin: int = 0
    done: int | None = None

    @property
    def end(self) -> int:
        """The epoch's number of the last step."""
        return self.begin + self.count - 1

    def after(self, steps: int) -> "Block":
        """What is left of the block where its first batches are passed over."""
        return Block(self.iterator, self.count - steps, self.is_sure, self.begin + steps)


@dataclass
class Run:
    """What a running `fit` or `evaluate` asks of its blocks.

    Attributes:
        model: which model runs.
        kind: "train" or "test".
        every_batch: by kind, whether a callback looks at single batches.
        steps: the length of all blocks, where somebody has asked for one.
        block: the block that ran last.
        ends: each says how many steps the next block may have at most, because a callback must be called then.
        on_all: the callbacks that every worker must have, because they meet in collectives; names of their classes.
        leaving: the wish to leave, where somebody listens for one.
        guard: what leaves steps out that bring a number that is none, where somebody asks for it.
        exits: what is closed when the run has ended, however it ended.
        asides: each makes a context for an `evaluate` that a callback calls between the steps.
        logs: what the last epoch's steps came to.
        lookers: by kind, the classes of the callbacks here that look at single batches.
    """

    model: object
    kind: str
    every_batch: dict[str, bool] = field(default_factory=dict)
    steps: int | None = None
    block: Block | None = None
    ends: list[Callable[[], int]] = field(default_factory=list)
    on_all: tuple[str, ...] = ()
    leaving: Leaving | None = None
    guard: object = None
    exits: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    asides: list[Callable[[], contextlib.AbstractContextManager]] = field(default_factory=list)
    logs: dict | None = None
    lookers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def wanted(self, left: float = float("inf")) -> int | None:
        """Steps of the next block; None where Keras is to decide, batch by batch.

        Args:
            left: steps that the epoch has left, as far as is known.
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
        """What sets the length of its blocks; "pace" where they grow. A profile tells what helps by it."""
        if self.model.run_eagerly:
            return "run_eagerly"
        if self.model.steps_per_execution != 1:
            return "steps_per_execution"
        if self.steps is not None:
            return "steps_per_call"
        if self.every_batch[self.kind]:  # A worker may have none of the callbacks for which all go step by step.
            return CALLBACKS + (", ".join(self.lookers[self.kind]) or "another worker's")
        return "pace"


def run_in_blocks() -> None:
    """Lets the epoch's iterator hand out blocks of steps where it handed out single steps."""
    _accept_auto()
    _remember_what_runs()
    _hand_out_blocks()
    _number_last_steps()
    iterator_end.end_data_elsewhere()


def current() -> Run | None:
    """The `fit` or `evaluate` that this thread is in, or None."""
    return step_context.current().run


def set_by(model, kind: str) -> str:
    """What sets how many steps the next call of a model runs: see `Run.set_by`; or its method for one batch."""
    run = current()
    return f"{kind}_on_batch" if run is None or run.model is not model else run.set_by


def steps_a_call(count: int | None):
    """The blocks of every `fit` and `evaluate` inside have `count` steps; None leaves it to them."""
    return step_context.scope(steps_per_call=count)


def needs_every_batch(callback, kind: str = "train") -> bool:
    """Whether a callback looks at single batches, so that it must be called after each.

    A callback of one's own that can do with blocks says so by an attribute `every_batch = False`.

    Args:
        callback: a Keras callback.
        kind: "train", or "test" for `evaluate`.
    """
    if hasattr(callback, "every_batch"):
        return callback.every_batch
    if isinstance(callback, (keras_callbacks.History, keras_callbacks.ProgbarLogger)):
        return False
    for attribute in ("save_freq", "update_freq"):  # ModelCheckpoint, BackupAndRestore, TensorBoard
        if hasattr(callback, attribute):
            return getattr(callback, attribute) != "epoch" or getattr(callback, "_should_trace", False)
    stock = keras_callbacks.Callback()
    hooks = [f"on_{kind}_batch_begin", f"on_{kind}_batch_end"]
    hooks += ["on_batch_begin", "on_batch_end"] if kind == "train" else []
    # By function, because LambdaCallback puts its hooks on the instance.
    return any(_function(callback, hook) is not _function(stock, hook) for hook in hooks)


def _function(callback, name: str):
    hook = getattr(callback, name)
    return getattr(hook, "__func__", hook)


def _accept_auto() -> None:
    @wrap(Trainer, "compile")
    def compile_model(stock, self, *args, **kwargs):
        arguments = inspect.signature(stock).bind(self, *args, **kwargs).arguments
        steps = arguments.get("steps_per_execution", 1)
        if steps == "auto":
            arguments["steps_per_execution"] = 1  # what stock Keras can read in a saved model too
        elif isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 1:
            raise InputError(f'`steps_per_execution` must be a whole number from 1, or "auto". Received: {steps!r}.')
        arguments.pop("self")
        return stock(self, **arguments)


def _remember_what_runs() -> None:
    for name, kind in (("fit", "train"), ("evaluate", "test"), ("predict", None)):

        @wrap(keras_trainer.TensorFlowTrainer, name)
        def method(stock, self, *args, kind=kind, **kwargs):
            run = None
            if kind is not None:
                callbacks = inspect.signature(stock).bind(self, *args, **kwargs).arguments.get("callbacks")
                asked, lookers = _asked(self, callbacks)
                run = Run(self, kind, asked, step_context.current().steps_per_call, lookers=lookers)
                _take_over(run, current(), callbacks)
            exits = run.exits if run is not None else contextlib.nullcontext()
            with step_context.scope(run=run), error_messages.explained(self), exits:
                return stock(self, *args, **kwargs)


def _take_over(run: Run, outer: Run | None, callbacks) -> None:
    """What a run takes from the callbacks, and from the `fit` that it is a part of."""
    if outer is not None and outer.model is run.model:
        run.leaving, run.on_all = outer.leaving, outer.on_all
        if run.kind == "test" and not isinstance(callbacks, keras_callbacks.CallbackList):  # no validation of the `fit`
            for aside in outer.asides:
                run.exits.enter_context(aside())
    if run.kind == "train":
        meeting = [callback for callback in listed(callbacks) if getattr(callback, "on_all_workers", False)]
        run.on_all = tuple(sorted(type(callback).__name__ for callback in meeting))


def listed(callbacks) -> list:
    """The callbacks that somebody has given to `fit`, in whatever form."""
    if isinstance(callbacks, keras_callbacks.CallbackList):
        return callbacks.callbacks
    return tf.nest.flatten(callbacks) if callbacks else []


def _asked(model, callbacks) -> tuple[dict[str, bool], dict[str, tuple[str, ...]]]:
    """Whether a callback looks at single batches, and the classes of those that do, by kind."""
    outer = current()
    if isinstance(callbacks, keras_callbacks.CallbackList):
        if outer is not None and outer.model is model:
            return outer.every_batch, outer.lookers  # the validation of a `fit`, whose workers have agreed
    lookers = {}
    for kind in ("train", "test"):
        found = [type(callback).__name__ for callback in listed(callbacks) if needs_every_batch(callback, kind)]
        lookers[kind] = tuple(dict.fromkeys(found))
    return {kind: bool(found) for kind, found in lookers.items()}, lookers


def _hand_out_blocks() -> None:
    @wrap(keras_trainer.TFEpochIterator, "_enumerate_iterator")
    def enumerate_iterator(stock, self):
        run, steps = current(), stock(self)
        if run is None or run.wanted() is None:
            yield from steps
            return
        is_sure = _has_known_length(self)
        for begin, _, iterator in steps:
            left = _left(self, begin)
            count = min(run.wanted(left), left)
            for _ in range(count - 1):
                next(steps)
            block = run.block = Block(iterator, count, is_sure, begin)
            yield begin, block.end, block


def _left(data, begin: int) -> float:
    """Steps that Keras's own count still allows: beyond its last one it tells the data that the epoch has ended."""
    limit = data.steps_per_epoch or data._num_batches
    left = limit - begin if limit else float("inf")
    return min(left, data._num_batches - data._steps_seen + 1) if data._num_batches else left


def _has_known_length(data) -> bool:
    if isinstance(data.data_adapter, ArrayDataAdapter):
        return True
    source = data.data_adapter.get_tf_dataset() if isinstance(data.data_adapter, TFDatasetAdapter) else None
    return isinstance(source, tf.data.Dataset) and int(source.cardinality()) != tf.data.UNKNOWN_CARDINALITY


def _number_last_steps() -> None:
    """A block that the data's end cut short tells callbacks the number of its last step."""
    for name in ("on_train_batch_end", "on_test_batch_end"):

        @wrap(keras_callbacks.CallbackList, name)
        def on_batch_end(stock, self, batch, logs=None):
            return stock(self, last_step(batch), logs)


def last_step(batch: int) -> int:
    """The epoch's number of the last step that ran, where Keras's count says `batch`."""
    run = current()
    block = run.block if run is not None else None
    if block is not None and block.done and batch == block.end:
        return block.begin + block.done - 1
    return batch


def single_batches(iterator) -> Iterator:
    """The iterator of the batches themselves, whether Keras was handed a block or not."""
    return iterator.iterator if isinstance(iterator, Block) else iterator
