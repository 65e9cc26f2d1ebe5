"""The script that `tfgpu launch` runs in each process of a self-test; the chief prints the answers."""

import os
import sys

from tfgpu.cluster import Cluster
from tfgpu.doctor import facts, selftest
from tfgpu.doctor.facts import asking
from tfgpu.doctor.selftest import training

_BYTES, _SUMS, _REPEATS = 16 * 2**20, 3, 3


def main(kind: str) -> None:
    """Measures all-reduces, and trains; with parameter servers it only trains.

    Args:
        kind: the strategy, or `"machine"` to measure only this machine.
    """
    if kind == "machine":
        asking.tell(kind, _machine())
        return
    cluster = Cluster.from_environment()
    found = {"workers": cluster.size}
    if kind == "multi_worker":
        found |= _sums()
    found["weights"] = training.train(kind)
    if cluster.is_chief:
        asking.tell(kind, found)


def _machine() -> dict:
    """The answers by part, and `facts`: this machine's devices."""
    environ = {**asking.with_tfgpu(os.environ), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ.pop("TF_CONFIG", None)
    return {**selftest.parts(environ), "facts": facts.hardware(environ)}


def _sums() -> dict:
    import tensorflow as tf

    import tfgpu
    from tfgpu.doctor.selftest import sums

    strategy = tfgpu.strategy("multi_worker")
    measure = sums.of_strategy(tf, strategy, _BYTES, _SUMS)
    measure()
    rates = [measure() for _ in range(_REPEATS)]
    return {"sum": {"values": rates}, "replicas": strategy.num_replicas_in_sync, "bytes": _BYTES}


if __name__ == "__main__":
    main(*sys.argv[1:])
