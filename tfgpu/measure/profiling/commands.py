"""NVIDIA's profilers: the command lines for a script, and the NVTX range that they capture."""

import contextlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfgpu.errors import InputError

DOMAIN, RANGE = "tfgpu", "profiled"
"""The NVTX range around the profiled steps."""


def lines(target: str, arguments: Sequence[str], folder: Path) -> dict[str, str]:
    """Returns the command lines of Nsight Systems and Nsight Compute that profile the same steps.

    Both record CUDA themselves. Only one profiler can do so, hence `--nvtx` turns off TensorFlow's.

    Args:
        target: the script or recipe.
        arguments: the arguments of the script.
        folder: where their files go.

    Returns:
        The shell commands by the program's name.

    Example:
        >>> print(lines("train.py", ["--epochs", "3"], Path("profile"))["ncu"].split(" -- ")[0][:40])
        ncu --nvtx --nvtx-include tfgpu@profiled
    """
    ours = [sys.executable, "-m", "tfgpu", "profile", "--nvtx", target, *arguments]
    nsys = ["nsys", "profile", "--trace=cuda,nvtx,cudnn,cublas,osrt", "--sample=none", "--capture-range=nvtx"]
    nsys += [f"--nvtx-capture={RANGE}@{DOMAIN}", "--capture-range-end=stop"]
    nsys += ["--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0", f"--output={folder / 'nsys'}"]
    ncu = ["ncu", "--nvtx", "--nvtx-include", f"{DOMAIN}@{RANGE}", "--launch-count", "50", "--set", "basic"]
    ncu += ["--export", str(folder / "ncu")]
    return {"nsys": shlex.join([*nsys, *ours]), "ncu": shlex.join([*ncu, *ours])}


def check_nvtx() -> None:
    """Checks that the package nvtx is installed.

    Raises:
        InputError: it is not.
    """
    if importlib.util.find_spec("nvtx") is None:
        raise InputError(
            "--nvtx, which marks the profiled steps for nsys and ncu, needs the package nvtx. Run: pip install nvtx."
        )


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Opens an NVTX range; has no effect unless one of NVIDIA's profilers is attached."""
    import nvtx

    mark = nvtx.start_range(message=RANGE, domain=DOMAIN)
    try:
        yield
    finally:
        nvtx.end_range(mark)
