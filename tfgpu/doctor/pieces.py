"""Finds how each piece of a script's step runs on replicas. Another process runs the script up to its first step."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfgpu.doctor.facts import asking
from tfgpu.errors import no_script

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
        command = [*asking.INTERPRETER, "-m", "tfgpu.doctor.first_step", str(told), str(script), *arguments]
        environ = {name: value for name, value in environ.items() if name != "TF_CONFIG"}
        ended = asking.run(command, environ=asking.with_tfgpu(environ), seconds=_LIMIT_S)
        if not told.is_file():
            return Rehearsal((), 0, f"{ended.how}\n{ended.err[-_TAIL:]}".strip())
        return Rehearsal(**json.loads(told.read_text(encoding="utf-8")))


def to_json(rehearsal: Rehearsal) -> str:
    """The pieces as a JSON object."""
    found = {"pieces": list(rehearsal.pieces), "replicas": rehearsal.replicas, "error": rehearsal.error}
    return json.dumps(found, indent=2)
