"""Runs an unmodified script with the Keras repairs: `tfgpu run script.py` or `python -m tfgpu.run script.py`."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from tfgpu.errors import InputError


def run(script: str | Path, arguments: Sequence[str] = ()) -> None:
    """Runs a script as `python script.py` would, in this process, after `tfgpu.repair_keras()`.

    Args:
        script: the file to run.
        arguments: what the script finds in `sys.argv[1:]`.

    Raises:
        InputError: there is no such file.

    Example:
        >>> run("train.py", ["--epochs", "3"])
        Traceback (most recent call last):
        tfgpu.errors.InputError: There is no script 'train.py'. Give the path of a Python file.
    """
    path = Path(script)
    if not path.is_file():
        raise InputError(f"There is no script {str(script)!r}. Give the path of a Python file.")
    from tfgpu import keras_fixes

    keras_fixes.install()
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tfgpu.run script.py [arguments]")
    run(sys.argv[1], sys.argv[2:])
