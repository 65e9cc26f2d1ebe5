"""Which replicas differ from the others, in which variables, and the message that says so."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfgpu.errors import ReplicasDiffer

_MOST_NAMED = 4


@dataclass(frozen=True)
class Difference:
    """Where the replicas' digests differ.

    Attributes:
        variables: positions of the variables that are not the same on all replicas, in order.
        replicas: those that differ from the majority in the first of them; without a majority, all.
        are_known: a majority holds one value, so that the others are the ones that differ.
    """

    variables: tuple[int, ...]
    replicas: tuple[int, ...]
    are_known: bool


def find(table: np.ndarray) -> Difference | None:
    """Compares digests.

    Args:
        table: [replicas, variables].

    Returns:
        None if all replicas have the same.

    Example:
        >>> find(np.array([[1, 2], [1, 2], [1, 3]]))
        Difference(variables=(1,), replicas=(2,), are_known=True)
        >>> find(np.array([[1, 2], [1, 3]]))
        Difference(variables=(1,), replicas=(0, 1), are_known=False)
    """
    differing = tuple(int(at) for at in np.flatnonzero((table != table[:1]).any(0)))
    if not differing:
        return None
    column = table[:, differing[0]].tolist()
    (value, count), *_ = Counter(column).most_common(1)
    is_known = 2 * count > len(column)
    others = tuple(at for at, each in enumerate(column) if not is_known or each != value)
    return Difference(differing, others, is_known)


def message(found: Difference, paths: Sequence[str], devices: int | None, step: int, equal_at: int | None) -> str:
    """Says who differs.

    Args:
        found: from `find`.
        paths: of all variables.
        devices: replicas in each worker; None if there is one process.
        step: steps of this `fit` done.
        equal_at: the step after which all were last found equal.
    """
    names = [_name(replica, devices) for replica in found.replicas[:_MOST_NAMED]]
    names += ["others"] if len(found.replicas) > _MOST_NAMED else []
    told = ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
    verb = "differ" if len(names) > 1 else "differs"
    who = f"{told} {verb} from the other replicas" if found.are_known else f"{told} differ from each other"
    what = f"{paths[found.variables[0]]!r}"
    if len(found.variables) > 1:
        what += f", and in {len(found.variables) - 1} more variables, up to {paths[found.variables[-1]]!r}"
    before = "" if equal_at is None else f"; after step {equal_at} all were equal"
    return f"After step {step} of this `fit`, {who}, first in {what}{before}."


def stop(found: Difference, paths: Sequence[str], devices: int | None, step: int, equal_at: int | None):
    """The error that ends the training."""
    said = message(found, paths, devices, step, equal_at)
    return ReplicasDiffer(
        f"{said} Either memory or a device failed (see `tfgpu doctor`), or one worker runs code that the others do "
        "not, such as a callback. Checkpoints are written only if all are equal: start the same command again to "
        "resume from the newest. To continue from the chief's weights instead, use "
        "`tfgpu.strategy(on_difference='chief')`.",
        replicas=found.replicas,
        variable=paths[found.variables[0]],
        step=step,
    )


def _name(replica: int, devices: int | None) -> str:
    if devices is None:
        return f"replica {replica}"
    worker, device = divmod(replica, devices)
    return f"worker {worker}" if devices == 1 else f"replica {replica} (worker {worker}, device {device})"
