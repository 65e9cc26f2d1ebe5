"""`Tasks`: a training of several `fit`s in a row that can be stopped anywhere and resumed."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfgpu import repairs
from tfgpu.checkpoint import disks, storage
from tfgpu.checkpoint.callback import Checkpoint
from tfgpu.checkpoint.callback_state import ExtraState
from tfgpu.checkpoint.fetching import fail_together, fetch
from tfgpu.checkpoint.parts_writer import PartsWriter
from tfgpu.checkpoint.storage import Damaged, Position, Snapshot
from tfgpu.core.state import parts, training_state
from tfgpu.errors import InputError, MachineError, whole_number
from tfgpu.optim import parameter_groups
from tfgpu.training.incremental import names

_SETTING = "task"
_BEGUN = "begun"


class Tasks:
    """Resumes incremental learning at the task where it stopped; each task is one `fit` or several.

    At the beginning of a task it saves everything that the task depends on: weights, optimizer (with a learning rate
    that `rewarm` has set), random draws, which layers are trainable, and the states in `remember`. During its `fit`s,
    `checkpoint()` saves. Started again, the same script skips the tasks that are done, restores the states from the
    beginning of the running task, and resumes within it, bit for bit on the same devices. So it no longer needs the
    data of tasks that are done.

        DIRECTORY/begun/epoch-0003/     three tasks are done, the fourth begins
        DIRECTORY/task-0003/fit/        the checkpoints of the fourth's `fit`

    Args:
        directory: where the state is saved; one directory per training.
        remember: further state by name, as for `Checkpoint`: `{"replay": replay, "elastic": elastic}`.
        keep: how many of the newest tasks keep their checkpoints (default 2). If one is damaged, the training resumes
            from the previous one.

    Raises:
        InputError: an argument is out of range; in `begin`, the saved state is of another model, or all are damaged.
        MachineError: a checkpoint could not be written.

    Example:
        >>> from tfgpu.training import incremental
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, "softmax")])
        >>> model.compile("sgd", "sparse_categorical_crossentropy")
        >>> x, y = keras.ops.ones((8, 1)), keras.ops.zeros(8)
        >>> replay = incremental.Replay(4)
        >>> tasks = Tasks("run", remember={"replay": replay})
        >>> for task in range(tasks.begin(model), 2):  # begin: 0 in a new run
        ...     history = model.fit(x, y, verbose=0, callbacks=[tasks.checkpoint()])
        ...     _ = replay.add(x, y)
        ...     tasks.end(model)
        >>> tasks.done
        2
    """

    def __init__(self, directory: str | Path, *, remember: Mapping[str, Any] | None = None, keep: int = 2):
        keep = whole_number("keep", keep)
        if not repairs.repair_keras():
            raise InputError("Tasks needs the Keras repairs. Unset TFGPU_REPAIR.")
        self._directory, self._begun = Path(directory), Path(directory) / _BEGUN
        self._objects, self._extra_state, self._keep = remember, ExtraState(remember), keep
        self._at: int | None = None
        self._told: int | None = None
        self._names: set[str] = set()
        self._rows: list[dict[str, Any]] = []

    @property
    def done(self) -> int:
        """The number of finished tasks. Before `begin`, it is read from the directory, for scripts that grow the model.

        Raises:
            InputError: all saved states are damaged.
        """
        if self._at is not None:
            return self._at
        try:
            read = storage.newest(self._begun)
        except Damaged as error:
            raise InputError(str(error)) from error
        self._told = 0 if read is None else read.position.epoch
        return self._told

    @property
    def logs(self) -> list[dict[str, Any]]:
        """The logs passed to `end` for each finished task."""
        return [dict(row) for row in self._rows]

    def remembers(self, one: Any) -> bool:
        """Whether an object is in `remember`."""
        return self._extra_state.has(one)

    def begin(self, model: keras.Model) -> int:
        """Restores the beginning of the newest task. On several workers, each must call this.

        Args:
            model: compiled and built, as at the beginning of that task: if earlier tasks grow the model, grow it the
                same number of times first (see `done`), without training.

        Returns:
            The number of that task, from 0, which is the number of tasks done.
        """
        if self._at is not None:
            raise InputError("`begin` is for the start of the script. Call `end(model)` when a task is done.")
        if not isinstance(model, keras.Model) or not model.built or not model.compiled:
            raise InputError(f"`model` must be a built and compiled model. Received: {model!r}.")
        self._disks = disks.compare(model.distribute_strategy, self._begun)
        self._writer = PartsWriter(self._begun, self._disks)
        read = fetch(model.distribute_strategy, self._begun)
        found = 0 if read is None else read.position.epoch
        if self._told not in (None, found):
            raise InputError(
                f"This worker's {self._begun} says {self._told} tasks are done, the chief's {found}. Use a directory "
                "that all workers share."
            )
        self._at = found
        if read is None:
            self._save(model)
        else:
            self._put(model, read)
        return self._at

    def checkpoint(self, name: str = "fit", **settings: Any) -> Checkpoint:
        """Returns a `Checkpoint` for one `fit` of the running task.

        Args:
            name: the name of its folder; if a task calls `fit` several times, each needs another name.
            **settings: further arguments of `Checkpoint`, such as `every_steps`.
        """
        if self._at is None:
            raise InputError("No task has begun. Call `begin(model)` first.")
        if not re.fullmatch(r"[\w-]+", name) or name in self._names:
            raise InputError(f"Each `fit` of a task needs its own name of letters and digits. Received: {name!r}.")
        self._names.add(name)
        made = Checkpoint(self._task() / name, **{"remember": self._objects, **settings})
        made.warns_when_over = False
        return made

    def end(self, model: keras.Model, logs: Mapping[str, Any] | None = None) -> None:
        """Ends the running task and begins the next. Call it once all states in `remember` are up to date.

        On several workers, each must call this.

        Args:
            model: compiled and built, as at the beginning of the next task.
            logs: numbers or lists of numbers to record for the task.

        Raises:
            InputError: no task has begun, or `logs` contains something else.
        """
        if self._at is None:
            raise InputError("No task has begun. Call `begin(model)` first.")
        try:
            row = {str(name): np.asarray(value, float).tolist() for name, value in (logs or {}).items()}
        except (AttributeError, TypeError, ValueError):
            raise InputError(f"`logs` must map names to numbers or lists of numbers. Received: {logs!r}.") from None
        self._rows.append(row)
        self._at, self._names = self._at + 1, set()
        self._save(model)

    def _task(self) -> Path:
        return self._directory / f"task-{self._at:04d}"

    def _save(self, model: keras.Model) -> None:
        at = self.done
        places, saved = training_state.trained_weights(model), parts.copy(model)
        random = training_state.random_states()

        def prepare() -> dict[str, Any]:
            layers = {"": model} | names.layers(model)
            trainable = {name: layer.trainable for name, layer in layers.items()}
            setting = {"trainable": trainable, "rate": _rate(model), "places": places}
            memory = {"callbacks": {}, "random": random, "random_at_epoch": random, _SETTING: setting}
            if self._disks.is_chief:
                memory |= self._extra_state.take()
            if self._disks.is_leader:
                # A folder of this task is left over from an attempt whose saved beginning was damaged.
                shutil.rmtree(self._task(), ignore_errors=True)
            return memory

        strategy, what = model.distribute_strategy, f"Saving to {self._begun}"
        memory = fail_together(strategy, prepare, what)
        write = self._writer.job(Position(at, tuple(self._rows)), saved, memory, self._prune)

        def save() -> None:
            try:
                write()
            except OSError as error:
                raise MachineError(
                    f"{self._begun} cannot be written: {error}. Free space, grant write access, or choose another "
                    "directory. Restart the script to resume from the last saved state."
                ) from error

        fail_together(strategy, save, what)

    def _prune(self, path: Path) -> None:
        storage.prune(self._begun, path, keep=self._keep, best=None)
        oldest = min(map(storage.epoch_of, storage.found(self._begun)))
        for task in self._directory.glob("task-*"):
            if re.fullmatch(r"task-\d+", task.name) and int(task.name[5:]) < oldest:
                shutil.rmtree(task, ignore_errors=True)

    def _put(self, model: keras.Model, read: Snapshot) -> None:
        setting = read.memory.get(_SETTING)
        if setting is None:
            raise InputError(f"{read.position.directory} was not saved by Tasks. Give Tasks its own directory.")
        _put_rate(model, setting["rate"])
        training_state.build_optimizer(model, setting["places"])
        layers = {"": model} | names.layers(model)
        for name, flag in setting["trainable"].items():  # outer layers first: they set those inside them
            if name in layers and layers[name].trainable != flag:
                layers[name].trainable = flag
                names.retrace(model)
        training_state.restore_state(model, read.arrays, str(read.position.directory))
        self._extra_state.put(read, model)
        self._rows = [dict(row) for row in read.position.history]
        training_state.restore_random_states(read.memory["random"])


def _rate(model: keras.Model) -> str | None:
    """The optimizer's learning rate schedule as text; None for a number, which is a variable of the optimizer."""
    if model.optimizer is None:
        return None
    found = parameter_groups.inner_of(model.optimizer).get_config().get("learning_rate")
    return json.dumps(found, sort_keys=True, default=str) if isinstance(found, dict) else None


def _put_rate(model: keras.Model, text: str | None) -> None:
    """Restores a schedule that an earlier task has set, for example with `rewarm`."""
    if text is None or text == _rate(model):
        return
    try:
        schedule = keras.optimizers.schedules.deserialize(json.loads(text))
    except (TypeError, ValueError) as error:
        raise InputError(f"The learning rate schedule cannot be restored ({error}). Set it before `begin`.") from error
    model.optimizer.learning_rate = schedule
    names.retrace(model)
