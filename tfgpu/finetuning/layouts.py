"""How a model is laid out over devices: `--layout`."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.core import replication
from tfgpu.errors import InputError
from tfgpu.parallel import connection, hybrid, loading
from tfgpu.parallel.mesh import Mesh
from tfgpu.parallel.zero import sharded_optimizer

LAYOUTS = ("one", "mirrored", "zero1", "zero2", "zero3", "pipeline", "tensor")
_SPREAD = ("zero3", "pipeline", "tensor")
"""Layouts of which no device holds the whole model: it is made without memory for its variables."""


@dataclass(frozen=True)
class Layout:
    """Where a model's parts are.

    Attributes:
        name: one of `LAYOUTS`.
        strategy: of the replicas, and of `"one"`; None for a pipeline and tensor parallelism, which make their own.
        devices: their names.
        microbatches: of a pipeline.
    """

    name: str
    strategy: tf.distribute.Strategy | None
    devices: tuple[str, ...]
    microbatches: int | None = None

    @property
    def _is_made_on_host(self) -> bool:
        several = self.strategy is not None and replication.spans_processes(self.strategy)
        return self.name in _SPREAD and not several

    def scope(self) -> contextlib.AbstractContextManager:
        """Where the model is made and compiled."""
        if self._is_made_on_host:
            return loading.deferred()
        held = contextlib.ExitStack()
        held.enter_context(self.strategy.scope())
        if self.name == "zero3":
            held.enter_context(loading.deferred())
        return held

    def spread(self, model: keras.Model, *, batch: object) -> keras.Model:
        """Spreads a model that was made in the scope.

        Args:
            model: functional.
            batch: inputs of the model, to find where a pipeline is cut.

        Raises:
            InputError: it cannot be spread so.
        """
        count = len(self.devices)
        if self.name.startswith("zero") and not self._is_made_on_host:
            return sharded_optimizer.shard(model, int(self.name[-1]))
        if self.name == "zero3":
            return hybrid.apply(model, Mesh(data=count, devices=self.devices), zero=3)
        if self.name == "pipeline":
            mesh = Mesh(pipeline=count, devices=self.devices)
            return hybrid.apply(model, mesh, stages=count, microbatches=self.microbatches, batch=batch)
        if self.name == "tensor":
            return hybrid.apply(model, Mesh(tensor=count, devices=self.devices))
        return model

    def compile_scope(self, model: keras.Model) -> contextlib.AbstractContextManager:
        """Where the model is compiled."""
        return contextlib.nullcontext() if self._is_made_on_host else self.strategy.scope()


def make(
    name: str,
    *,
    strategy_of: Callable[[str], tf.distribute.Strategy],
    devices: int | tuple[str, ...] | None,
    is_multi_worker: bool,
    microbatches: int | None,
) -> Layout:
    """The layout of a run.

    Args:
        name: one of `LAYOUTS`; `"auto"`: the replicas of all devices, or one device where there is one.
        strategy_of: makes the strategy of a name.
        devices: how many or which; None: all.
        is_multi_worker: whether the run has several workers.
        microbatches: of a pipeline.

    Raises:
        InputError: the layout needs several devices, or one process.
    """
    if microbatches is not None and name != "pipeline":
        raise InputError(f"`microbatches` applies to a pipeline only. Received: layout={name}. Remove it.")
    if name in ("pipeline", "tensor"):
        if is_multi_worker:
            raise InputError(
                f"The layout {name} runs in one process here. Use --layout zero3 on several workers, or a script with "
                "tfgpu.parallel.connect()."
            )
        chosen = tuple(device.name for device in connection.select(devices))
        _check_several(name, len(chosen))
        return Layout(name, None, chosen, microbatches)
    strategy = strategy_of(
        "one_device" if name == "one" else "auto" if name == "auto" or is_multi_worker else "mirrored"
    )
    specs = map(tf.DeviceSpec.from_string, strategy.extended.worker_devices)
    found = tuple(f"{spec.device_type}:{spec.device_index}" for spec in specs)
    if name == "auto":
        name = "mirrored" if strategy.num_replicas_in_sync > 1 else "one"
    if name != "one":
        _check_several(name, strategy.num_replicas_in_sync)
    return Layout(name, strategy, found)


def _check_several(name: str, count: int) -> None:
    if count < 2:
        raise InputError(
            f"The layout {name} needs two devices or more. Received: {count}. Use --layout one, or --virtual-devices 2 "
            "to try it on a CPU."
        )
