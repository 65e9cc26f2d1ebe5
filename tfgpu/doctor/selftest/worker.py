"""The script that `tfgpu launch` runs in each process of a self-test; the chief prints the answers."""

import sys

from tfgpu.cluster import Cluster
from tfgpu.doctor.facts import asking
from tfgpu.doctor.selftest import machine, network, training

_BYTES, _SUMS, _REPEATS = 16 * 2**20, 3, 3


def main(kind: str, *arguments: str) -> None:
    """Measures the network and all-reduces, and trains; with parameter servers it only trains.

    Args:
        kind: the strategy, or `"machine"` to measure only this machine.
        arguments: for `"machine"`, the folder for measuring the disk.
    """
    if kind == "machine":
        asking.tell(kind, machine.measured(*arguments))
        return
    cluster = Cluster.from_environment()
    found = {"workers": cluster.size}
    if kind == "multi_worker":
        # Before TensorFlow starts, since the connections use its ports.
        found |= network.measured(cluster)
        found |= _sums()
    found["weights"] = training.train(kind)
    if cluster.is_chief:
        asking.tell(kind, found)


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
