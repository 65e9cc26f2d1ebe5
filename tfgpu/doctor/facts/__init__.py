"""Collects facts about this machine's Python, packages, driver, libraries, kernel, TensorFlow and Keras.

`asking.py` answers the questions in separate processes; the other files hold the questions, by subject.
"""

import re
from collections.abc import Mapping
from typing import Any

from tfgpu.doctor.facts import asking

QUICK_S, TENSORFLOW_S, REPAIRS_S = 60, 240, 600
"""Time limits of a group of questions in seconds; on an idle machine they take 1, 7 and 15."""
_HERE = "tfgpu.doctor.facts"
_LOG_LINES = 100
_LOGGING = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "dso_loader=1,gpu_device=0"}
"""Variables that make TensorFlow log the libraries it could not load."""
_FAILED = re.compile(r"Could not load dynamic library '([^']+)'; dlerror: (.*?)(?:; LD_LIBRARY_PATH: .*)?$")
_LONGEST = 300


def gather(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Collects facts about this machine's Python, packages, driver, libraries, kernel, TensorFlow and Keras.

    Args:
        environ: the environment of the answering processes.

    Returns:
        The answers by question. A failed one is `{"error": why}`.
    """
    environ = {**asking.with_tfgpu(environ), "TF_CPP_MIN_LOG_LEVEL": "3"}
    # The probes train tiny models on logical CPU devices, without GPU and cluster.
    away = ("TF_CONFIG", "TFGPU_REPAIR")
    alone = {name: value for name, value in environ.items() if name not in away} | {"CUDA_VISIBLE_DEVICES": ""}
    with asking.Askers() as pool:
        asked = [
            pool.submit(_ask, "software", ["repairs"], alone, REPAIRS_S, stop=pool.stop),
            pool.submit(_ask, "software", ["patches"], alone, REPAIRS_S, stop=pool.stop),  # the probes run without
            pool.submit(_ask, "software", ["python", "packages"], environ, QUICK_S, stop=pool.stop),
            pool.submit(_ask, "machine", ["machine", "xid"], environ, QUICK_S, stop=pool.stop),
            pool.submit(_ask, "machine", ["driver"], environ, QUICK_S, stop=pool.stop),
        ]
        facts = tensorflow(environ)
        found = facts["tensorflow"]
        built = {name: found.get("build", {}).get(name) for name in ("cuda_version", "cudnn_version")}
        facts |= _ask("libraries", ["libraries", "tools"], environ, QUICK_S, **built, tensorflow=found.get("folder"))
        for each in asked:
            facts |= each.result()
    return facts


def _ask(file: str, names: list[str], environ: Mapping[str, str], seconds: float, **options: object) -> dict[str, dict]:
    return asking.ask(f"{_HERE}.{file}", names, environ=environ, seconds=seconds, **options)


def hardware(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The answers to `tensorflow` and `driver`: this machine's devices."""
    return _ask("software", ["tensorflow"], environ, TENSORFLOW_S) | _ask("machine", ["driver"], environ, QUICK_S)


def tensorflow(environ: Mapping[str, str], seconds: float = TENSORFLOW_S) -> dict[str, dict[str, Any]]:
    """The facts of TensorFlow and Keras, with messages about libraries.

    Returns:
        The answers to `tensorflow` and `keras`. `tensorflow` also has `loading`: `failed` (libraries and the loader's
        errors) and `log`.
    """
    names, environ = ["tensorflow", "keras"], {**environ, **_LOGGING}
    facts, log = asking.ask_with_log(f"{_HERE}.software", names, environ=environ, seconds=seconds)
    facts["tensorflow"]["loading"] = {"failed": failures(log), "log": "\n".join(log.splitlines()[:_LOG_LINES])}
    return facts


def failures(log: str) -> dict[str, str]:
    """The libraries that TensorFlow could not load, with the loader's errors.

    Example:
        >>> failures("I0000 dso_loader.cc:144] Could not load dynamic library 'libcudnn.so.9'; dlerror: libcudnn.so.9: "
        ...          "cannot open shared object file: No such file or directory; LD_LIBRARY_PATH: /opt")
        {'libcudnn.so.9': 'cannot open shared object file: No such file or directory'}
    """
    found = [_FAILED.search(line) for line in log.splitlines()]
    # The error may name another library that this one needs.
    return {each[1]: each[2].removeprefix(f"{each[1]}: ").strip()[:_LONGEST] for each in found if each}
