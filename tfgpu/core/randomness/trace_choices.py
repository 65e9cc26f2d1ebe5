"""Choices that Python code makes while a step is traced, with `random` say: all traces of a step make the same.

One device traces a step once. The replicas of a process trace it once each, and a step is traced again with the loop
around it. The first trace chooses, and the others take its choices, in the same order.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tfgpu.core import step_context


@dataclass
class Choices:
    """What one trace takes.

    Attributes:
        made: the choices so far, shared by all traces of the step.
        places: the place of the next choice.
    """

    made: list
    places: Iterator[int] = field(default_factory=itertools.count)


def shared(made: list):
    """For the length of the block this thread takes the choices in `made`, in order, and adds those that it lacks."""
    return step_context.scope(choices=Choices(made))


def choose(make: Callable):
    """What `make()` returned in the first trace that came to this place of the step; outside a step `make()`."""
    choices = step_context.current().choices
    if choices is None:
        return make()
    at = next(choices.places)
    if at == len(choices.made):
        choices.made.append(make())
    return choices.made[at]
