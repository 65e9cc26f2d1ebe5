"""Layouts: the ways to spread a model over devices."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tfgpu.errors import InputError, unknown, whole_number

SCHEDULES = ("1f1b", "gpipe", "gpipe-kept")
"""`gpipe-kept` is `gpipe` with `recompute=False`."""
LOSSES = ("batch", "microbatch")
_MAX_PARTS = 16  # micro-batches per stage, where the idle share is below 6%


@dataclass(frozen=True)
class Layout:
    """One way to spread a model over devices.

    Args:
        data: copies of the model.
        pipeline: stages; see `Mesh`.
        tensor: shards of large layers; see `Mesh`.
        expert: devices that share the experts of a mixture, each with rows of its own; see `Mesh`. It goes with `data`
            and `accumulate` alone.
        zero: 1 shards the optimizer's slots over the copies, 2 also gradients, 3 also parameters; 0 shards nothing.
        accumulate: `gradient_accumulation_steps`: parts of the batch, each of which is one step.
        microbatches: parts that the pipeline splits each of these into.
        schedule: of the pipeline.
        recompute: whether blocks keep only their inputs.
        loss: `"batch"`: the loss of all micro-batches comes before the first gradient, as in `parallel.pipeline`.
            `"microbatch"`: each micro-batch has a loss and a gradient of its own, as in Megatron-LM.

    Raises:
        InputError: a number is below 1, a name is unknown, or `expert` is combined with what it does not go with.

    Example:
        >>> str(Layout(data=2, pipeline=4, microbatches=8))
        'data 2, pipeline 4, 8 micro-batches, 1f1b'
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    zero: int = 0
    accumulate: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    recompute: bool = False
    loss: str = "batch"
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "pipeline", "tensor", "accumulate", "microbatches", "expert"):
            whole_number(name, getattr(self, name))
        if self.zero not in (0, 1, 2, 3):
            raise InputError(f"`zero` must be 0, 1, 2 or 3. Received: {self.zero!r}.")
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, LOSSES)
        if self.expert > 1 and (self.pipeline > 1 or self.tensor > 1 or self.zero or self.recompute):
            raise InputError(
                f"`expert` goes with `data` alone. Received: {self}. Leave out stages, tensor, ZeRO and recomputation."
            )

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.tensor * self.expert

    @property
    def copies(self) -> int:
        """The devices among which the rows of a batch are dealt, but for those of one copy."""
        return self.data * self.expert

    @property
    def parts(self) -> int:
        """The number of equal parts that the batch is split into."""
        return self.copies * self.accumulate * self.microbatches

    @property
    def forwards(self) -> int:
        """How many times the forward pass runs in a step."""
        again = self.pipeline > 1 and self.loss == "batch" and self.schedule != "gpipe-kept"
        return 1 + again + self.recompute

    @property
    def idle(self) -> float:
        """The share of a step in which a device waits for other stages."""
        return (self.pipeline - 1) / (self.microbatches + self.pipeline - 1)

    def under_way(self, stage: int) -> int:
        """The number of micro-batches whose activations a stage keeps at once."""
        if self.pipeline == 1 or self.schedule == "gpipe":
            return 1
        if self.schedule == "gpipe-kept":
            return self.microbatches
        return min(self.pipeline - stage, self.microbatches)

    def __str__(self) -> str:
        names = ("data", "pipeline", "expert", "tensor")
        axes = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        extra = [f"ZeRO {self.zero}"] if self.zero else []
        extra += [f"{self.accumulate} accumulated"] if self.accumulate > 1 else []
        extra += [f"{self.microbatches} micro-batches, {self.schedule}"] if self.pipeline > 1 else []
        extra += ["recompute"] if self.recompute else []
        return ", ".join(axes + extra) or "one device"


def tensor_sizes(devices: int, per_host: int) -> list[int]:
    """The possible sizes of the tensor axis, which stays within a host."""
    return [size for size in _divisors(devices) if size <= per_host]


def candidates(devices: int, batch: int, *, stages: Mapping[int, int], loss: str, experts: int = 1) -> Iterator[Layout]:
    """All layouts that multiply to the devices and divide the model and the batch, each once.

    ZeRO 2 is combined with no pipeline, whose stages keep the full sum of their gradients until the step ends. ZeRO 3
    is combined with nothing, and recomputes.

    Args:
        stages: for each possible size of the tensor axis, the largest number of stages.
        devices, batch, loss: as for `plan`.
        experts: the number that the size of the expert axis divides.
    """
    for expert in _divisors(math.gcd(devices, experts))[1:]:
        for accumulate, _ in _parts(batch // devices, 1) if batch % devices == 0 else ():
            yield Layout(devices // expert, accumulate=accumulate, loss=loss, expert=expert)
    for tensor, blocks in stages.items():
        for pipeline in _divisors(devices // tensor):
            data = devices // tensor // pipeline
            if pipeline > blocks or batch % data:
                continue
            zeros = [0] if data == 1 else [0, 1] if pipeline > 1 else [0, 1, 2] if tensor > 1 else [0, 1, 2, 3]
            schedules = SCHEDULES if pipeline > 1 and loss == "batch" else ("1f1b",)
            ways = itertools.product(_parts(batch // data, pipeline), schedules, zeros, (False, True))
            for (accumulate, microbatches), schedule, zero, recompute in ways:
                if recompute or zero < 3:
                    yield Layout(data, pipeline, tensor, zero, accumulate, microbatches, schedule, recompute, loss)


def _parts(rows: int, pipeline: int) -> Iterator[tuple[int, int]]:
    """Steps to accumulate over, in powers of two, and micro-batches of each."""
    accumulate = 1
    while rows % accumulate == 0:
        left = rows // accumulate
        found = [1] if pipeline == 1 else [at for at in _divisors(left) if pipeline <= at <= _MAX_PARTS * pipeline]
        if pipeline > 1 and left < pipeline:
            found = [left]
        for microbatches in found:
            yield accumulate, microbatches
        accumulate *= 2


def _divisors(count: int) -> list[int]:
    low = [number for number in range(1, math.isqrt(count) + 1) if count % number == 0]
    return sorted({*low, *(count // number for number in low)})
