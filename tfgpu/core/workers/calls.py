"""The calls of `fit`, `evaluate` and `predict` on several workers: where they compare, and stop together.

A rule for `model.stop_training`: set after an epoch by one worker, all stop after it. Set within an epoch by all, they
stop after that step, as one device would; set by some, all stop after the next call of steps.
"""

import contextlib
from collections.abc import Iterator

from tfgpu.compat import training
from tfgpu.compat.keras import CallbackList
from tfgpu.compat.patch import wrap
from tfgpu.core import extensions, step_blocks
from tfgpu.core.workers import ledger, sentences, user_line, watch
from tfgpu.core.workers.ledger import Ledger

_COMPARED = {
    "epochs": 1,
    "initial_epoch": 0,
    "batch_size": None,
    "steps_per_epoch": None,
    "steps": None,
    "validation_split": 0.0,
    "validation_steps": None,
    "validation_freq": 1,
}
"""Arguments that set which steps run, and their defaults."""


def of(model) -> Ledger | None:
    """The ledger of a model on several workers; None for others."""
    return ledger.of(training.strategy_of(model), watch.watch)


@contextlib.contextmanager
def together(model, name: str, arguments: dict) -> Iterator[None]:
    """A call that all workers make together.

    Args:
        model: whose method is called.
        name: "fit", "evaluate" or "predict".
        arguments: its arguments, by name.

    Raises:
        InputError: the workers make different calls.
        MachineError: a worker has failed.
    """
    mine = of(model)
    if mine is None:
        yield
        return
    facts = {} if isinstance(arguments.get("callbacks"), CallbackList) else _facts(model, arguments)
    mine.meet(f"called `{name}`", facts)
    line, step, mine.step = user_line.of_thread(), mine.step, -1
    mine.calls.append(f"`{name}`")
    try:
        yield
    except BaseException as error:
        if error is not mine.failure:  # which the others have too
            event = sentences.of_error(f"left `{name}`", error, line)
            mine.tell(event.what, event.line, is_failure=True)
        raise
    else:
        mine.tell(f"returned from `{name}`", line)
    finally:
        mine.calls.pop()
        mine.step = step


def _facts(model, arguments: dict) -> dict[str, str]:
    found = {"steps_per_execution": model.steps_per_execution}
    found |= {name: arguments.get(name, default) for name, default in _COMPARED.items()}
    found["validation_data"] = None if arguments.get("validation_data") is None else "given"
    return {name: str(value) for name, value in found.items()}


def call_together() -> None:
    """Makes workers compare their calls, and stop together."""

    @wrap("tf.distribute.MultiWorkerMirroredStrategy.__init__")
    def init(stock, self, *args, **kwargs):
        stock(self, *args, **kwargs)
        ledger.of(self, watch.watch)

    extensions.method_calls.register(together)
    extensions.after_callbacks.register(_stop_together)


def _stop_together(callbacks: CallbackList, name: str, at: int | None) -> None:
    """Makes `fit` compare at each epoch's end, and stop on all workers."""
    run = step_blocks.current()
    mine = of(run.model) if run is not None and run.kind == "train" else None
    if mine is None:
        return
    if name == "on_epoch_end":
        wants = bool(run.model.stop_training) or run.wants_to_stop
        facts = {} if run.block is None or not run.block.done else {"batches": str(run.block.begin + run.block.done)}
        run.model.stop_training = mine.meet(f"ended epoch {at + 1} of `fit`", facts, stop=wants)
        mine.step = -1
    elif name == "on_train_batch_end":
        if run.stops:
            run.model.stop_training = True
        elif run.model.stop_training and not mine.agrees_to_stop(at):
            run.model.stop_training, run.wants_to_stop = False, True
        mine.step = at
