"""What a meeting says where it cannot be held: each sentence names the processes, and ends with what to do."""

from collections.abc import Mapping, Sequence

from tfgpu.rendezvous import wire
from tfgpu.rendezvous.members import Member


def other_attempt(process: str, attempt: str, own: Member, own_process: str, own_attempt: str) -> str:
    """To a process that was left over from another start of the job."""
    return (
        f"This is {process}, of attempt {attempt!r}, but {own} is {own_process}, of attempt {own_attempt!r}. "
        "End the processes of the older attempt."
    )


def other_cluster(hello: Mapping, process: str, everyone: Sequence[Member], own: Member, own_process: str) -> str:
    """To a process whose TF_CONFIG has other addresses."""
    return (
        f"TF_CONFIG differs: {process} is {hello['name']} at {hello['address']}, one of {hello['count']}, but by the "
        f"addresses of {own}, {own_process}, it is {_place(hello, everyone)}. Give all the same."
    )


def twice(task: Member, one: str, other: str) -> str:
    """To two processes of one task."""
    return (
        f"Two processes are {task}: {one}, and {other}. Give each process its own task (TF_CONFIG's `task`), or end "
        "the one that was left over."
    )


def port_in_use(own: Member, error: OSError) -> str:
    """From a process that cannot listen."""
    return (
        f"Port {own.port} of this machine, where TensorFlow is to listen for {own}, cannot be had: "
        f"{wire.words(error)}. `ss -ltnp 'sport = :{own.port}'` shows who has it: end that, or choose another port."
    )


def not_met(lines: Sequence[str], timeout_s: float) -> str:
    """At the deadline: who is missing."""
    return (
        f"The processes of the cluster did not meet within {timeout_s:g} s. {'; '.join(lines)}. Start what is missing, "
        "or allow more time: TFGPU_STARTUP_TIMEOUT."
    )


def is_older(attempt: str, than: str) -> bool:
    """Whether an attempt's number is below another's; False where they are no numbers."""
    return attempt.isdecimal() and than.isdecimal() and int(attempt) < int(than)


def _place(hello: Mapping, everyone: Sequence[Member]) -> str:
    names = [each.address for each in everyone if each.name == hello["name"]]
    if len(everyone) != hello["count"]:
        return f"one of {len(everyone)}"
    return f"at {names[0]}" if names and names[0] != hello["address"] else "beside others"
