"""What NCCL, as TensorFlow uses it, refuses or gets wrong; and a layer before TensorFlow's collectives that says so.

The rules are those of `nccl_manager.cc`, `collective_param_resolver_local.cc` and `ring_reducer.cc` in TensorFlow.
"""

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import tensorflow as tf
from step_facts import StepFacts
from tensorflow.python.ops import collective_ops

DTYPES = ("float16", "float32", "float64", "int32", "int64")
FUNCTIONS = {
    (collective_ops, "all_reduce_v2"): "all-reduce",
    (collective_ops, "all_gather_v2"): "all-gather",
    (collective_ops, "all_to_all_v2"): "all-to-all",
    (tf.raw_ops, "CollectiveReduceScatterV2"): "reduce-scatter",
}
"""Those by which the package and `tf.distribute` make collectives in steps."""


class NcclError(Exception):
    """A collective that would fail, or give a wrong result, between GPUs."""


@dataclass
class Nccl:
    """What has been asked for while `fake_nccl` is there.

    Attributes:
        calls: of each device, in order: (group, kind, dtype, shape, hint).
        sizes: of each group, how many of its devices are on this machine.
    """

    calls: dict[str, list[tuple]] = field(default_factory=dict)
    sizes: dict[int, float] = field(default_factory=dict)

    def check_order(self) -> None:
        """Raises an `NcclError` where devices of a group were asked for different collectives, or in another order."""
        for group, size in self.sizes.items():
            asked = sum(any(each[0] == group for each in calls) for calls in self.calls.values())
            if asked not in (0, size):
                raise NcclError(f"Group {group} has {size:g} devices here, but {asked} were asked: they wait for ever.")
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
    found += [] if facts.has_one_order else ["the devices have different orders"]
    found += [] if facts.has_whole_groups(machines) else ["a device waits for one that does not take part"]
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def fake_nccl(machines: int = 1) -> Iterator[Nccl]:
    """Within the block, a collective that fails or errs between GPUs raises an `NcclError` as it is traced.

    At its end, all devices must have asked for the same collectives in the same order.
    """
    nccl = Nccl()
    with contextlib.ExitStack() as stack:
        for (owner, name), kind in FUNCTIONS.items():
            stack.enter_context(_checked(nccl, owner, name, kind, machines))
        yield nccl
    nccl.check_order()


@contextlib.contextmanager
def _checked(nccl: Nccl, owner: object, name: str, kind: str, machines: int) -> Iterator[None]:
    stock = getattr(owner, name)
    parameters = inspect.signature(stock)

    def collective(*args, **options):
        given = parameters.bind(*args, **options)
        given.apply_defaults()
        tensor, size, group = list(given.arguments.values())[:3]
        hint = given.arguments["communication_hint"].lower()
        count = tf.get_static_value(size)
        if count == 1:
            return stock(*args, **options)
        if (why := refusal(kind, tensor.dtype.name, hint, machines)) is not None:
            raise NcclError(f"{kind} of {tensor.dtype.name}{tensor.shape}: {why}.")
        found = stock(*args, **options)
        device = (found[0] if isinstance(found, tuple) else found).device
        key = tf.get_static_value(group)
        nccl.calls.setdefault(device, []).append((key, kind, tensor.dtype.name, str(tensor.shape), hint))
        if count is not None:
            nccl.sizes[key] = count / machines
        return found

    setattr(owner, name, collective)
    try:
        yield
    finally:
        setattr(owner, name, stock)
