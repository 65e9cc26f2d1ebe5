"""Finds how each piece of a script's step runs on replicas.

Another process runs the script up to its first step: `python -m tfgpu.doctor.pieces TOLD SCRIPT`, which writes what it
found to the file TOLD.
"""

import contextlib
import functools
import json
import runpy
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfgpu.doctor.facts import asking
from tfgpu.errors import no_script

_TWO = ["CPU:0", "CPU:1"]
_OF_DEVICES = ("reduce_dtype", "top_k", "batch_norm", "unproven")
"""Options of `tfgpu.strategy` that do not depend on which devices there are."""
_LIMIT_S = 3600.0
_TAIL = 2000


@dataclass(frozen=True)
class Rehearsal:
    """What a script's first step has shown.

    Attributes:
        pieces: of the step, each with `name`, `verdict`, `why`, `source` and `traffic`
            (`tfgpu.core.row_mixing.verdicts.Piece`).
        replicas: the number in the first step; 0 if there was no step.
        error: why the script ended before its first step; "" if it did not fail.
    """

    pieces: tuple[Mapping[str, Any], ...]
    replicas: int
    error: str

    @property
    def failed(self) -> bool:
        """Whether a piece was refused, or the script ended with an error before its first step."""
        return bool(self.error) or any(piece["verdict"] == "refused" for piece in self.pieces)


def rehearse(script: str | Path, arguments: Sequence[str] = (), *, environ: Mapping[str, str]) -> Rehearsal:
    """Runs a script up to the end of its first training step, and returns the pieces of that step.

    It trains on all GPUs if there are several, else on two logical CPU devices. Everything before the
    first step really happens: the script reads data, and a callback may write files.

    Args:
        script: the file to run.
        arguments: its `sys.argv[1:]`.
        environ: its environment.

    Raises:
        InputError: there is no such file.
    """
    if not Path(script).is_file():
        raise no_script(str(script))
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told.json")
        command = [*asking.INTERPRETER, "-m", "tfgpu.doctor.pieces", str(told), str(script), *arguments]
        environ = {name: value for name, value in environ.items() if name != "TF_CONFIG"}
        ended = asking.run(command, environ=asking.with_tfgpu(environ), seconds=_LIMIT_S)
        if not told.is_file():
            return Rehearsal((), 0, f"{ended.how}\n{ended.err[-_TAIL:]}".strip())
        return Rehearsal(**json.loads(told.read_text(encoding="utf-8")))


def to_json(rehearsal: Rehearsal) -> str:
    """The pieces as a JSON object."""
    return json.dumps(asdict(rehearsal), indent=2)


class _Stop(BaseException):
    """The first step has run."""


class _FirstStep:
    """Lets a script train on replicas, collects the pieces of its step, and stops it."""

    def __init__(self):
        self.pieces: dict = {}
        self.replicas = 0
        self._is_in_keras = False

    def prepare(self) -> None:
        """Before the script starts."""
        import tensorflow as tf

        import tfgpu
        from tfgpu import environment, repairs, strategies
        from tfgpu.compat.patch import wrap
        from tfgpu.core import extensions

        has_gpus = len(tf.config.list_physical_devices("GPU")) > 1
        if not has_gpus:
            tf.config.set_visible_devices([], "GPU")
            environment.set_logical_devices(2)
        repairs.repair_keras()
        extensions.verdict_listeners.register(self._hear)
        if not has_gpus:
            spread = _on_two(strategies.strategy)
            for owner in (tfgpu, strategies):
                owner.strategy = spread

            @wrap("tf.distribute.MirroredStrategy.__init__")  # which the script may create too
            def initialize(stock, self, devices=None, *args, **kwargs):
                stock(self, devices or _TWO, *args, **kwargs)

        self._stop_after_step()

    def _hear(self, piece) -> None:
        self.pieces[piece.name] = {**asdict(piece), "traffic": piece.traffic}

    @contextlib.contextmanager
    def _in_keras(self) -> Iterator[None]:
        """What runs inside is not the script's own loop."""
        before, self._is_in_keras = self._is_in_keras, True
        try:
            yield
        finally:
            self._is_in_keras = before

    def _stop_after_step(self) -> None:
        import tensorflow as tf

        from tfgpu.compat.patch import wrap
        from tfgpu.core import step_loop
        from tfgpu.core.replication import is_replicated, replica_context

        @wrap(step_loop.StepRunner, "__call__")
        def call(stock, runner, batches):
            with self._in_keras():
                logs = stock(runner, batches)
            if runner.kind == "train":
                self.replicas = runner.strategy.num_replicas_in_sync
                raise _Stop
            return logs

        @wrap("TensorFlowTrainer.predict")
        def predict(stock, *args, **kwargs):
            with self._in_keras():
                return stock(*args, **kwargs)

        @wrap("tf.distribute.Strategy.run")
        def run(stock, strategy, fn, args=(), kwargs=None, options=None):
            found = stock(strategy, fn, args, kwargs, options)
            given = tf.nest.flatten((args, kwargs or {}))
            has_data = any(isinstance(each, tf.distribute.DistributedValues) for each in given)
            if not self._is_in_keras and has_data and is_replicated(strategy) and replica_context() is None:
                self.replicas = strategy.num_replicas_in_sync
                raise _Stop
            return found


def _on_two(stock):
    """`tfgpu.strategy` with two logical devices instead of this machine's or a cluster's."""

    @functools.wraps(stock)
    def strategy(kind="auto", devices=None, **options):
        if kind not in ("auto", "one_device", "mirrored", "multi_worker"):
            return stock(kind, devices, **options)
        kept = {name: value for name, value in options.items() if name in _OF_DEVICES}
        return stock("mirrored", _TWO, **kept)

    return strategy


def main(words: Sequence[str]) -> None:
    """Runs the script, and writes what was found.

    Args:
        words: the file to write, the script, and its arguments.
    """
    told, script, *arguments = words
    rehearsal, error = _FirstStep(), ""
    rehearsal.prepare()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except _Stop:
        pass
    except SystemExit as ended:
        error = f"the script ended with {ended.code}" if ended.code else ""
    except BaseException as failed:
        error = "".join(traceback.format_exception_only(failed)).strip()
        traceback.print_exc()
    found = {"pieces": list(rehearsal.pieces.values()), "replicas": rehearsal.replicas, "error": error}
    Path(told).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
