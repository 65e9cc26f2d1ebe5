"""What workers tell each other of themselves, and the error when they differ."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from tfgpu.core.workers import user_line
from tfgpu.errors import InputError, MachineError

MOST_SAID = 200
"""Characters of another worker's error."""
RULE = (
    "Every worker must call `fit`, `evaluate`, `predict` and whatever else needs all workers (saving a sharded model, "
    "accumulated gradients) in the same order. The chief alone may only do what needs no other worker."
)
_DATA = (
    "Give every worker the same number of batches, with `take` or `steps_per_epoch`. Where tfgpu shards the data, give "
    "each worker the whole dataset."
)


@dataclass(frozen=True)
class Event:
    """What a worker does.

    Attributes:
        what: a verb in the past tense and its object, such as "called `fit`". Workers compare it.
        line: of the user's code; not compared.
        facts: arguments that all workers must give alike, by name.
        stop: this worker's `model.stop_training`.
        is_failure: an error or a signal ended the call, so a restart may help.
    """

    what: str
    line: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    stop: bool = False
    is_failure: bool = False

    def as_json(self) -> str:
        """The event as a text for other workers."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"{self.what} ({self.line})" if self.line else self.what


def of_error(what: str, error: BaseException, line: str | None = None) -> Event:
    """The event that an error ended a call, or the script.

    Args:
        what: "left `fit`", say.
        error: that ended it.
        line: where it was called; named if the error comes from no line of the user's.
    """
    said = (str(error).strip().splitlines() or [""])[0][:MOST_SAID]
    told = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return Event(f"{what} by {told}", user_line.of_error(error.__traceback__) or line or "", is_failure=True)


def read(text: str) -> Event:
    """The event that another worker has sent."""
    return Event(**json.loads(text))


def difference(events: Mapping[str, Event]) -> Exception | None:
    """The error for workers that do not do the same; None if they do.

    Args:
        events: what each worker did, by the worker's name.
    """
    first_name, first = next(iter(events.items()))
    for name, event in events.items():
        if event.what != first.what:
            return apart(first_name, first, name, event)
        for fact in [*first.facts, *(each for each in event.facts if each not in first.facts)]:
            one, other = first.facts.get(fact), event.facts.get(fact)
            if one != other:
                return InputError(
                    f"The workers {first.what}, but with different arguments: {fact}={one} on {first_name} "
                    f"({first.line}), {fact}={other} on {name} ({event.line}). Give every worker the same arguments."
                )
    return None


def apart(one: str, event: Event, other: str, other_event: Event) -> Exception:
    """The error for two workers that do different things."""
    if other_event.is_failure and not event.is_failure:
        one, event, other, other_event = other, other_event, one, event
    told = f"{one} {event}, while {other} {other_event}."
    if event.is_failure:
        return MachineError(f"{told} See the error of {one}, and start all workers again.")
    return InputError(f"The workers do different things: {told} {RULE}")


def data_ended(short: str, long: str, where: Event) -> InputError:
    """The error for workers whose data has different lengths, found at the end of the shorter.

    Args:
        short: the worker whose data has ended.
        long: one that has more.
        where: they were in.
    """
    return InputError(f"The data of {short} has ended, while {long}, which {where}, has more batches. {_DATA}")


def steps_differ(one: str, count: int, other: str, other_count: int, where: Event) -> InputError:
    """The error for workers that run different numbers of steps before they call their callbacks.

    Args:
        one: a worker.
        count: its steps in a call.
        other: another.
        other_count: its steps.
        where: the other's call.
    """
    return InputError(
        f"The workers run different numbers of steps in a call: {count} on {one}, {other_count} on {other}, which "
        f"{where}. Give every worker the same `steps_per_execution` and the same callbacks with their `every_steps`, "
        "and profile all workers or none."
    )


def as_text(error: Exception) -> str:
    """An error of this module as a text for other workers."""
    return json.dumps({"kind": type(error).__name__, "text": str(error)})


def from_text(text: str) -> Exception | None:
    """The error that another worker has sent; None for the text that all is well."""
    found = json.loads(text)
    kinds = {"InputError": InputError, "MachineError": MachineError}
    return kinds[found["kind"]](found["text"]) if found["kind"] else None
