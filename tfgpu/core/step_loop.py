"""What `fit`, `evaluate` and `train_on_batch` call: blocks of steps, each one call of a compiled loop.

`loop_builder` compiles the loops, `metric_logs` reads the logs, and `worker_vote` lets workers agree after each block.
"""

import collections
import contextlib
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.patch import wrap
from tfgpu.compat.training import strategy_of
from tfgpu.core import (
    batch_sharding,
    block_event,
    extensions,
    input_stats,
    iterator_end,
    replication,
    step_blocks,
    traffic,
    worker_vote,
)
from tfgpu.core.feed import read_ahead, sharded_dataset
from tfgpu.core.loop_builder import TOGETHER, LoopBuilder, LoopKind, Updates
from tfgpu.core.metric_logs import LogReader
from tfgpu.core.row_mixing import fingerprints
from tfgpu.core.row_mixing.trials import step_trial
from tfgpu.core.state import takeover
from tfgpu.core.step_blocks import Block
from tfgpu.core.workers import ledger
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)


@dataclass
class _Timed:
    """A block that has run: its steps, and how long it took."""

    steps: int = 0
    seconds: float = 0.0


class StepRunner:
    """Runs steps of a model on an iterator, many per call, and returns the logs of the last.

    `model.train_function` and `model.test_function` hold one.

    Args:
        model: the compiled model.
        step_function: `model.train_step` or `model.test_step`.

    Attributes:
        kind: "train" or "test".
        strategy: the model's.
        pace: how long blocks are if no length was requested.
        logs: what the last call returned.
        log_reader: reads them.
        averager: how the replicas update their own copies (`loop_builder.Updates`); None if they train together.
        done: number of steps so far.
        traffic: counts the bytes that each replica has passed to collectives.
        loops: compiles the loops.
    """

    def __init__(self, model: keras.Model, step_function: Callable):
        self._model, self.strategy = model, model.distribute_strategy
        self._is_replicated = replication.is_replicated(self.strategy)
        self.kind = "train" if step_function == model.train_step else "test"
        self._jit = bool(model.jit_compile) and not model.run_eagerly
        self._last = _Timed()
        self.pace, self.logs, self.done = step_blocks.Pace(), None, 0
        self._computing_s: collections.deque[float] = collections.deque(maxlen=100)  # of the last blocks
        self._waited_s: float | None = None
        self.log_reader, self.traffic = LogReader(model), traffic.Meter()
        local = replication.local_training_of(self.strategy) if self._is_replicated else None
        self.averager = local.averager(model) if local is not None and self.kind == "train" else None
        self.loops = LoopBuilder(model, step_function, self.log_reader, self.traffic)
        self._needs_whole_batch = functools.partial(step_trial.needs_whole_batch, model, step_function)
        self._is_tried = not self._is_replicated or self.strategy.num_replicas_in_sync == 1 or local is not None
        if self.kind == "train" and (forgotten := replication.forgotten_scope(self.strategy)):
            _log.warning(forgotten)
        self._retries, self._code = model.run_eagerly and not self._is_tried, None  # a key of eager steps

    def __call__(self, batches: Any) -> dict:
        """Runs steps.

        Args:
            batches: a `Block`; or an iterator, for up to the model's `steps_per_execution` steps.

        Raises:
            tf.errors.OutOfRangeError: no batch was left.
        """
        if isinstance(batches, Block):
            return self._run_block(batches)
        count = self._model.steps_per_execution
        if _is_dataset_iterator(batches) and not self._model.run_eagerly:
            return self._run_block(Block(batches, count))
        return self._run_one_by_one(batches, count)

    @property
    def sees_whole_batch(self) -> bool | None:
        """Whether the step must see the whole batch; None until it was tried."""
        return self.loops.sees_whole_batch if self._is_tried else None

    def _run_one_by_one(self, batches: Any, count: int) -> dict:
        """Up to `count` steps, one per call, on batches from Python."""
        self._begin(batches)
        logs, is_sharded = None, _is_dataset_iterator(batches) or not self._is_replicated
        for _, data in zip(range(count), batches, strict=False):
            began = time.perf_counter()
            kind = LoopKind(self._jit, updates=self._updates(), is_wrapped=_is_wrapped())
            self._try_step(batches if is_sharded else data)
            data = data if is_sharded else batch_sharding.shard(self.strategy, data)
            with self._around_call(kind, 1):
                ballot = worker_vote.ballot(self._last.seconds)
                logs, result = self.loops.single(kind)(data, ballot, self._since())
            self._count(1, kind)
            self.logs = logs
            seconds = worker_vote.accept(self.strategy, result)
            self._last = _Timed(1, time.perf_counter() - began)
            self._follow(seconds if replication.spans_processes(self.strategy) else self._last.seconds)
        if logs is None:
            raise _end_of_data()
        return logs

    def _run_block(self, block: Block) -> dict:
        self.loops.batch_rows = block.rows
        self._try_step(block.iterator)
        self._begin(block)
        began, block.done, result, self._waited_s = time.perf_counter(), 0, None, None
        while block.done < block.count:
            iterator, kind = self._loop_of(block)
            count = self._steps_of(block, kind)
            if block.first is not None:
                iterator, count, block.first = block.first, 1, None
            done, logs, result = self._call_loop(iterator, kind, count)
            block.done += done
            if done:
                self.logs = logs
            if done < count:
                break
        if not block.done:
            raise _end_of_data()
        self._note_time(_Timed(block.done, time.perf_counter() - began), result)
        block.computing_s = input_stats.mean_gap(self._computing_s)
        return self.logs

    def _run(self) -> step_blocks.Run | None:
        """The `fit` or `evaluate` whose steps these are."""
        run = step_blocks.current()
        return run if run is not None and run.model is self._model and run.kind == self.kind else None

    def _begin(self, batches: Any) -> None:
        run = self._run()
        while run is not None and run.before_steps:
            run.before_steps.pop(0)(batches)

    def _follow(self, seconds: float) -> None:
        run = self._run()
        for follow in run.after_block if run is not None else ():
            follow(self._last.steps, seconds)

    def _steps_of(self, block: Block, kind: LoopKind) -> int:
        """How many steps of a block the next call runs: one, until a first step has told whether it can be more."""
        if not (self.log_reader.is_traced and self.loops.can_run_many(kind)):
            return 1
        left = (block.full if kind.rows is not None else block.count) - block.done
        return int(min(left, block.count - block.done, float("inf") if self.averager is None else self.averager.left()))

    def _call_loop(self, iterator: Any, kind: LoopKind, count: int) -> tuple[int, dict, tf.Tensor]:
        with self._around_call(kind, count):
            ballot = worker_vote.ballot(self._last.seconds)
            done, waited, logs, result = self.loops.loop(kind)(iterator, tf.constant(count), ballot, self._since())
        done = count if kind.is_sure else int(done)
        if kind.is_timed:
            self._waited_s = (self._waited_s or 0.0) + int(waited) / 1e6
        self._count(done, kind)
        return done, logs, result

    def _try_step(self, data: object) -> None:
        """Finds out whether a step of the user's own must see the whole batch; `data` is one, or an iterator.

        This is done once, and for eager steps whenever their code or settings have changed.
        """
        if not self._is_tried or self._code_now() != self._code:
            self._is_tried, run = True, self._run()
            self.loops.sees_whole_batch = self._needs_whole_batch(
                sharded_dataset.spec_of(data),
                self.loops.batch_rows,
                arguments=run.arguments if run is not None else {},
                python=self.loops.python,
                log_reader=self.log_reader,
            )
            self._code = self._code_now()

    def _code_now(self) -> tuple | None:
        return fingerprints.of_code(self._model, self.loops.python.names) if self._retries else None

    def _loop_of(self, block: Block) -> tuple[Any, LoopKind]:
        """The block's iterator as the compiled loop takes it, and the kind of loop."""
        iterator, gives_row_ranges = sharded_dataset.source_of(block.iterator)
        is_ahead = sharded_dataset.is_ahead(block.iterator)
        is_sure = block.is_sure and (is_ahead or isinstance(iterator, tf.data.Iterator))
        rows = None if gives_row_ranges is None and not is_ahead else self._rows_of(block)
        has_rows = sharded_dataset.has_rows(block.iterator)
        known = {"has_own_rows": True, "batch_rows": block.iterator.data.batch_rows} if has_rows else {}
        device = read_ahead.device_of(iterator)
        if is_ahead or device is not None:
            known |= {"device": device, "is_ahead": is_ahead, "is_timed": read_ahead.can_time()}
        kind = LoopKind(self._jit, is_sure, gives_row_ranges, self._updates(), _is_wrapped(), rows, **known)
        return iterator, kind

    def _rows_of(self, block: Block) -> int | None:
        """The rows of the block's next batch, if the loop must know them to run many steps, and replicas share evenly.

        Another trace costs as much as the first. So only those steps get one whose collectives have varying shapes.
        """
        is_full = block.rows is not None and (block.done or 0) < block.full
        if not (is_full and self.loops.has_varying_shapes) or block.rows % self.strategy.num_replicas_in_sync:
            return None
        return block.rows

    def _note_time(self, block: _Timed, result: tf.Tensor) -> None:
        """Records how long a block took; on several workers, how long they say that the previous one took."""
        if self._waited_s is not None:
            self._computing_s.append((block.seconds - self._waited_s) / block.steps)
        before, self._last = self._last, block
        seconds = worker_vote.accept(self.strategy, result)
        if replication.spans_processes(self.strategy):
            block = _Timed(before.steps, seconds)
        in_a_call = self.loops.collectives and self.loops.collectives + 1  # metrics meet at a call's end
        self.pace.note(block.steps, block.seconds, in_a_call)
        self._follow(block.seconds)

    @contextlib.contextmanager
    def _around_call(self, kind: LoopKind, count: int):
        set_by, batches = step_blocks.set_by(self._model, self.kind), self.loops.batch_count
        with kind.updates.running(), block_event.steps_begin(self.done, count, self.kind, set_by, jit=self._jit):
            if batches is not None:
                batches.begin()
            with ledger.waiting(batches, (self.done, count)):
                yield

    def _updates(self) -> Updates:
        """How the replicas update the weights in the next step."""
        return self.averager if self.averager is not None and self.averager.is_due() else TOGETHER

    def _since(self) -> tf.Tensor:
        return tf.constant(0 if self.averager is None else self.averager.since)

    def _count(self, steps: int, kind: LoopKind) -> None:
        """Records that `steps` steps have run in a call."""
        self.done += steps
        self.traffic.count(steps, kind.updates)
        kind.updates.count(steps)


def use_step_runner() -> None:
    """Gives models on one device, or on replicas, a `StepRunner` as their train and test functions."""
    _compile_only_what_xla_can()
    iterator_end.destroy_iterators_in_background()

    @wrap("TensorFlowTrainer.make_function")
    def make_function(stock, self, step_function):
        strategy = strategy_of(self)
        is_plain = strategy is None or isinstance(strategy, tf.distribute.OneDeviceStrategy)
        takeover.take_over(self, strategy)  # what a `compile` of the user's own has kept
        if is_plain or replication.is_replicated(strategy):
            return StepRunner(self, step_function)
        return stock(self, step_function)


def _compile_only_what_xla_can() -> None:
    """Makes `compile(jit_compile=True)` of a model over several devices compile the calls of its layers."""

    @extensions.compilations.register
    @contextlib.contextmanager
    def around_compile(model, arguments):
        asked = arguments.get("jit_compile")
        if asked not in (None, False, True, "auto"):
            raise InputError(f'`jit_compile` must be True, False or "auto". Received: {asked!r}.')
        is_prevented = any(prevents(model) for prevents in extensions.xla_obstacles)
        by_calls = is_prevented and asked is True
        if by_calls and not any(compiles(model) for compiles in extensions.xla_by_calls):
            raise InputError(
                "XLA can compile neither this model's step nor the calls of its layers, which several devices compute "
                "together (`sequence`). Compile with jit_compile=False."
            )
        yield
        slots.of(model).xla_by_calls = by_calls
        if is_prevented:
            model.jit_compile = False
        if by_calls:
            _log.info(
                "jit_compile=True: %r runs on several devices. XLA compiles the calls of its layers, forward and "
                "backward, each on its device, but not the loss, the metrics, the update or the communication.",
                model.name,
            )


def _is_dataset_iterator(batches: Any) -> bool:
    kinds = sharded_dataset.ShardedIterator, tf.distribute.DistributedIterator, tf.data.Iterator
    return isinstance(batches, kinds)


def _end_of_data() -> tf.errors.OutOfRangeError:
    return tf.errors.OutOfRangeError(None, None, "The data has ended.")


def _is_wrapped() -> bool:
    run = step_blocks.current()
    return run is not None and run.kind == "train" and run.step_wrapper is not None
