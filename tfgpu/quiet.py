"""Keeps TensorFlow's start-up messages from the screen; warnings and errors stay."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
_NOISE = re.compile(
    rb"^(WARNING: All log messages before absl::InitializeLog"
    rb"|To enable the following instructions"
    rb"|I\d{4} \d\d:\d\d:[\d.]+ .*|I0000 .*|\d{4}-\d\d-\d\d [\d:.]+: I .*"  # with a date up to TensorFlow 2.20
    rb"|([EW]0000|\d{4}-\d\d-\d\d [\d:.]+: [EW]) .*(failed call to cuInit|Unable to register cu\w+ factory"
    rb"|computation placer already registered|TF-TRT Warning: Could not find TensorRT).*)"
)


@contextlib.contextmanager
def starting(level: str = "1") -> Iterator[None]:
    """Hides what TensorFlow writes while it starts, unless TF_CPP_MIN_LOG_LEVEL is 0.

    TensorFlow writes its first messages to file descriptor 2 before it reads that variable. What else is written there
    follows at the end, and everything if the block fails.

    Args:
        level: the least level that TensorFlow's C++ code writes from then on, unless the user has set it; 1 is
            warnings, 3 is none.

    Example:
        >>> with starting():
        ...     import tensorflow
    """
    if os.environ.setdefault(LEVEL, level) == "0":
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as aside:
        screen = os.dup(2)
        os.dup2(aside.fileno(), 2)
        failed = False
        try:
            yield
        except Exception:  # not Ctrl-C
            failed = True
            raise
        finally:
            sys.stderr.flush()
            os.dup2(screen, 2)
            aside.seek(0)
            kept = [line for line in aside if failed or not _NOISE.match(line)]
            os.write(screen, b"".join(kept))
            os.close(screen)


def start_tensorflow() -> None:
    """Imports TensorFlow; without a GPU it looks for one now, so that its complaint is hidden too.

    With a GPU it does not look: a script may still choose by CUDA_VISIBLE_DEVICES.
    """
    import tensorflow as tf

    if not any(Path(name).exists() for name in _GPU_FILES):
        tf.config.list_physical_devices()
