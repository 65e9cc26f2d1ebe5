"""Choices that Python code makes while a step is traced, such as with `random`: all traces of a step share them.

One device traces a step once. Replicas of a process trace it once each, and a step is traced again with the loop around
it. The first trace chooses, and the others reuse its choices in the same order.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tfgpu.core import step_context


@dataclass
class Choices:
    """The choices of one trace.

    Attributes:
        made: the choices so far, shared by all traces of the step.
        places: yields the index of the next choice.
    """

    made: list
    places: Iterator[int] = field(default_factory=itertools.count)


def shared(made: list):
    """Inside the block, this thread reuses the choices in `made`, in order, and appends new ones."""
    return step_context.scope(choices=Choices(made))


def choose(make: Callable):
    """What `make()` returned in the first trace that reached this point of the step; outside a step, `make()`."""
    choices = step_context.current().choices
    if choices is None:
        return make()
    at = next(choices.places)
    if at == len(choices.made):
        choices.made.append(make())
    return choices.made[at]
