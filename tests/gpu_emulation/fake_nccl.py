"""What NCCL, as TensorFlow uses it, refuses or gets wrong; and a layer before TensorFlow's collectives that says so.

The rules are those of `nccl_manager.cc`, `collective_param_resolver_local.cc` and `ring_reducer.cc` in TensorFlow.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import tensorflow as tf
from step_facts import StepFacts
from tensorflow.python.ops import collective_ops

DTYPES = ("float16", "float32", "float64", "int32", "int64")
FUNCTIONS = {"all_reduce_v2": "all-reduce", "all_gather_v2": "all-gather", "all_to_all_v2": "all-to-all"}
"""Of `tensorflow.python.ops.collective_ops`, by which the package and `tf.distribute` make collectives."""


class NcclError(Exception):
    """A collective that would fail, or give a wrong result, between GPUs."""


@dataclass
class Nccl:
    """What has been asked for while `fake_nccl` is there.

    Attributes:
        calls: of each device, in order: (group, kind, dtype, shape, hint).
    """

    calls: dict[str, list[tuple]] = field(default_factory=dict)

    def check_order(self) -> None:
        """Raises an `NcclError` where devices of a group were asked for different collectives, or in another order."""
        for first, device in itertools.combinations(self.calls, 2):
            shared = {group for group, *_ in self.calls[first]} & {group for group, *_ in self.calls[device]}
            mine, theirs = ([each for each in self.calls[of] if each[0] in shared] for of in (first, device))
            for at, (one, other) in enumerate(zip(mine, theirs, strict=False)):
                if one != other:
                    raise NcclError(f"Collective {at} is {one} on {first}, but {other} on {device}.")
            if len(mine) != len(theirs):
                raise NcclError(f"{first} has {len(mine)} collectives, but {device} {len(theirs)}.")


def refusal(kind: str, dtype: str, hint: str, machines: int = 1) -> str | None:
    """Why a collective between GPUs fails or gives a wrong result, or None.

    Args:
        kind: as in `step_facts.Collective`.
        dtype: of the tensor.
        hint: the communication hint. TensorFlow takes NCCL for "nccl", its own algorithms for all else.
        machines: how many processes take part.
    """
    if kind == "permute":
        return "NCCL has no permutation"
    if hint == "nccl":
        if dtype not in DTYPES:
            return f"NCCL takes no {dtype}"
        if kind == "all-to-all" and machines > 1:
            return "an all-to-all over NCCL counts the devices of one machine, and loses the others' parts"
        return None
    if kind == "all-reduce" and dtype == "int32":
        return "TensorFlow's ring adds int32 on the CPU, with pointers to the GPU's memory"
    if kind == "reduce-scatter":
        return "TensorFlow has a reduce-scatter over NCCL alone"
    return None


def refusals(facts: StepFacts, machines: int = 1) -> list[str]:
    """What would fail, be wrong, or be slow in a step's collectives between GPUs, each once."""
    found = []
    for device, collectives in facts.collectives.items():
        for each in collectives if device.startswith("GPU") else ():
            if (why := refusal(each.kind, each.dtype, each.hint, machines)) is not None:
                found.append(f"{each.kind} {each.dtype}: {why}")
            elif each.hint != "nccl" and machines > 1:
                found.append(f"{each.kind} {each.dtype}: the hint {each.hint!r} means gRPC, not NCCL")
    return list(dict.fromkeys(found + ([] if facts.has_one_order else ["the devices have different orders"])))


@contextlib.contextmanager
def fake_nccl(machines: int = 1) -> Iterator[Nccl]:
    """Within the block, a collective that fails or errs between GPUs raises an `NcclError` as it is traced.

    At its end, all devices must have asked for the same collectives in the same order.
    """
    nccl = Nccl()
    with contextlib.ExitStack() as stack:
        for name, kind in FUNCTIONS.items():
            stack.enter_context(_checked(nccl, name, kind, machines))
        yield nccl
    nccl.check_order()


@contextlib.contextmanager
def _checked(nccl: Nccl, name: str, kind: str, machines: int) -> Iterator[None]:
    stock = getattr(collective_ops, name)

    def collective(t, group_size, group_key, *args, communication_hint="auto", **options):
        asked = group_key, kind, t.dtype.name, str(t.shape), communication_hint.lower()
        if tf.get_static_value(group_size) == 1:
            return stock(t, group_size, group_key, *args, communication_hint=communication_hint, **options)
        if (why := refusal(kind, t.dtype.name, communication_hint.lower(), machines)) is not None:
            raise NcclError(f"{kind} of {t.dtype.name}{t.shape}: {why}.")
        found = stock(t, group_size, group_key, *args, communication_hint=communication_hint, **options)
        nccl.calls.setdefault(found.device, []).append(asked)
        return found

    setattr(collective_ops, name, collective)
    try:
        yield
    finally:
        setattr(collective_ops, name, stock)
