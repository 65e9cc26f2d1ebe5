"""Collects facts about this machine's Python, packages, driver, libraries, kernel, cluster, TensorFlow and Keras.

`asking.py` answers the questions in separate processes; the other files hold the questions, by subject.
"""

import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfgpu.doctor.facts import asking, loader

QUICK_S, TENSORFLOW_S, REPAIRS_S = 60, 240, 600
"""Time limits of a group of questions in seconds; on an idle machine they take 1, 7 and 15."""
_ENGINE = ("repairs", "patches")  # one process each: the probes must run without patches
_HERE = "tfgpu.doctor.facts"
_LOG_LINES = 100


def gather(environ: Mapping[str, str], *, root: str = "/", seconds: float | None = None) -> dict[str, dict[str, Any]]:
    """Collects facts about this machine's Python, packages, driver, libraries, kernel, cluster, TensorFlow and Keras.

    Args:
        environ: the environment of the answering processes.
        root: the folder below which the kernel's files are read.
        seconds: time limit for each group of questions; `None` allows enough for a busy machine.

    Returns:
        The answers by question. A failed one is `{"error": why}`.
    """
    environ = {**asking.with_tfgpu(environ), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with asking.Askers() as pool:
        repairs = [pool.submit(_repairs, [name], environ, seconds or REPAIRS_S, pool.stop) for name in _ENGINE]
        at_most = {"seconds": seconds or QUICK_S, "stop": pool.stop}
        quick = [
            pool.submit(_ask, "software", ["python", "packages"], environ, **at_most),
            pool.submit(_ask, "machine", ["machine", "xid"], environ, root=root, **at_most),
            pool.submit(_ask, "gpus", ["driver"], environ, root=root, **at_most),
            pool.submit(_ask, "cluster", ["cluster"], environ, **at_most),
        ]
        facts = tensorflow(environ, seconds or TENSORFLOW_S)
        facts |= _libraries(facts["tensorflow"], environ, root, seconds or QUICK_S)
        for each in [*quick, *repairs]:
            facts |= each.result()
    return facts


def _ask(
    file: str, names: list[str], environ: Mapping[str, str], seconds: float, **options: object
) -> dict[str, dict[str, Any]]:
    return asking.ask(f"{_HERE}.{file}", names, environ=environ, seconds=seconds, **options)


def hardware(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The answers to `tensorflow` and `driver`: this machine's devices."""
    found = _ask("software", ["tensorflow"], environ, TENSORFLOW_S)
    return found | _ask("gpus", ["driver"], environ, QUICK_S, root="/")


def tensorflow(environ: dict[str, str], seconds: float) -> dict[str, dict[str, Any]]:
    """The facts of TensorFlow and Keras, with messages of the loader.

    Returns:
        The answers to `tensorflow` and `keras`. `tensorflow` also has `loading`: `failed` (libraries and the loader's
        errors), `places` (the folders searched for each) and `log`.
    """
    with tempfile.TemporaryDirectory(prefix="tfgpu-doctor-") as folder:
        watched = loader.watched(environ, folder)
        names = ["tensorflow", "keras"]
        facts, log = asking.ask_with_log(f"{_HERE}.software", names, environ=watched, seconds=seconds)
        failed = loader.failures(log)
        loading = {"failed": failed, "places": loader.places(loader.notes(folder), failed)}
    loading["log"] = "\n".join(log.splitlines()[:_LOG_LINES])
    facts["tensorflow"]["loading"] = loading
    return facts


def _libraries(found: Mapping, environ: Mapping[str, str], root: str, seconds: float) -> dict[str, dict[str, Any]]:
    """CUDA's libraries, loaded as this TensorFlow does."""
    folder = str(Path(found["folder"])) if found.get("folder") else None
    built = found.get("build", {}).get("cuda_version")
    return _ask("libraries", ["libraries", "tools"], environ, seconds, cuda_version=built, tensorflow=folder, root=root)


def _repairs(
    names: list[str], environ: Mapping[str, str], seconds: float, stop: threading.Event
) -> dict[str, dict[str, Any]]:
    # The probes train tiny models on logical CPU devices, without GPU and cluster.
    away = ("TF_CONFIG", "TFGPU_REPAIR")
    alone = {name: value for name, value in environ.items() if name not in away} | {"CUDA_VISIBLE_DEVICES": ""}
    return _ask("software", names, alone, seconds, stop=stop)
