"""Error messages of the rendezvous; each names the processes and what to do."""

from collections.abc import Mapping, Sequence

from tfgpu.rendezvous import wire
from tfgpu.rendezvous.members import Member


def other_attempt(process: str, attempt: str, own: Member, own_process: str, own_attempt: str) -> str:
    """For a process left over from another start of the job."""
    return (
        f"This is {process}, of attempt {attempt!r}, but {own} is {own_process}, of attempt {own_attempt!r}. "
        "End the processes of the older attempt."
    )


def other_cluster(hello: Mapping, process: str, everyone: Sequence[Member], own: Member, own_process: str) -> str:
    """For a process whose TF_CONFIG has other addresses."""
    return (
        f"TF_CONFIG differs: {process} is {hello['name']} at {hello['address']}, one of {hello['count']}, but in the "
        f"TF_CONFIG of {own}, {own_process}, it is {_place(hello, everyone)}. Use the same addresses everywhere."
    )


def twice(task: Member, one: str, other: str) -> str:
    """For two processes with the same task."""
    return (
        f"Two processes are {task}: {one}, and {other}. Give each process its own task (TF_CONFIG's `task`), or end "
        "the one left over."
    )


def port_in_use(own: Member, error: OSError) -> str:
    """For a process that cannot listen."""
    return (
        f"Port {own.port} of this machine, which TensorFlow needs for {own}, cannot be opened: {wire.words(error)}. "
        f"`ss -ltnp 'sport = :{own.port}'` shows the process that uses it: end it, or choose another port."
    )


def not_met(lines: Sequence[str], timeout_s: float) -> str:
    """For missing processes at the deadline."""
    return (
        f"The processes of the cluster did not connect within {timeout_s:g} s. {'; '.join(lines)}. Start what is "
        "missing, or increase TFGPU_STARTUP_TIMEOUT."
    )


def is_older(attempt: str, than: str) -> bool:
    """Whether an attempt's number is lower than another's; False unless both are numbers."""
    return attempt.isdecimal() and than.isdecimal() and int(attempt) < int(than)


def _place(hello: Mapping, everyone: Sequence[Member]) -> str:
    names = [each.address for each in everyone if each.name == hello["name"]]
    if len(everyone) != hello["count"]:
        return f"one of {len(everyone)}"
    return f"at {names[0]}" if names and names[0] != hello["address"] else "among other addresses"
