"""Checks, before TensorFlow starts, that all processes of the cluster reach each other and agree.

TensorFlow waits forever for a missing peer. So each process first listens on the port that TensorFlow will use,
connects to every other process there, and compares versions, seeds, recipe and code. Either all processes continue
together, or all end with one message that names the missing or differing process. `meeting.py` holds the protocol,
`leader.py` the leader's part in it, `facts.py` the comparison, `wire.py` the message format.

Example:
    >>> from tfgpu import rendezvous
    >>> rendezvous.join()        # one process: nothing to do
"""

import os
from collections.abc import Mapping

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError
from tfgpu.rendezvous.members import members

__all__ = ["ATTEMPT", "TIMEOUT", "join", "timeout_s"]

TIMEOUT = "TFGPU_STARTUP_TIMEOUT"
ATTEMPT = "TFGPU_ATTEMPT"
REJOIN = "TFGPU_REJOIN"
DEFAULT_TIMEOUT_S = 60.0
# The facts that this process has sent to the clusters it has joined, by their TF_CONFIG.
_joined: dict[str, dict[str, str]] = {}


def join(
    cluster: Cluster | None = None,
    *,
    script: str | None = None,
    facts: Mapping[str, str] | None = None,
    again: bool = False,
) -> None:
    """Waits for the other processes of the cluster and compares facts; every process must call it once.

    Chief, workers and parameter servers take part; evaluators and single processes do not. It waits up to
    TFGPU_STARTUP_TIMEOUT seconds (default 60; 0 skips the rendezvous). Afterward the ports are free for TensorFlow. A
    single worker that rejoins (TFGPU_REJOIN) skips it, since the others are already training.

    Args:
        cluster: the facts of the cluster; `None` reads them from the environment.
        script: the file whose content must be the same everywhere; `None` is the running program.
        facts: further facts that must be equal, by name, such as `{"recipe": "5f2c..."}`.
        again: repeat the rendezvous if this process has already joined, and also compare the script's arguments, with a
            warning if they differ. Only before TensorFlow has started, which then occupies the port.

    Raises:
        InputError: the processes differ, two have the same task, or TFGPU_STARTUP_TIMEOUT is malformed.
        MachineError: a process did not answer in time, or this one's port is in use; the message names it.
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    wait_s = timeout_s()
    everyone, me = members(cluster)
    key = cluster.tf_config()
    if not wait_s or me < 0 or len(everyone) < 2 or os.environ.get(REJOIN) or (key in _joined and not again):
        return
    # Imported late: asyncio takes a tenth of a second.
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from tfgpu.rendezvous.facts import ARGUMENTS, arguments, fitting, gather
    from tfgpu.rendezvous.meeting import Meeting

    here = {ARGUMENTS: arguments()} if again else {}
    own = {**(_joined.get(key) or gather(script)), **here, **fitting(facts or {})}
    meeting = Meeting(everyone, me, facts=own, attempt=os.environ.get(ATTEMPT, ""), timeout_s=wait_s)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(meeting.hold())
    else:  # This thread already runs an event loop, as in a notebook.
        ThreadPoolExecutor(1, "preflight").submit(asyncio.run, meeting.hold()).result()
    _joined[key] = own


def timeout_s(environ: Mapping[str, str] | None = None, *, name: str = TIMEOUT) -> float:
    """Reads TFGPU_STARTUP_TIMEOUT: the seconds to wait for the others; 0 skips the rendezvous.

    Args:
        environ: environment variables by name; `None` means this process's.
        name: the variable, or the option that replaces it.

    Raises:
        InputError: it is not a number of seconds.

    Example:
        >>> timeout_s({}), timeout_s({"TFGPU_STARTUP_TIMEOUT": "300"})
        (60.0, 300.0)
    """
    value = (os.environ if environ is None else environ).get(name, "").strip()
    if not value:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 7 * 86400:
        why = f"{name} must be a number of seconds from 0 (no waiting, no comparison) to a week. Received: {value!r}."
        raise InputError(f"{why} Set, for example, {name}=300.")
    return seconds
