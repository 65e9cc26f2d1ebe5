"""Before TensorFlow starts: does every process of the cluster reach every other, and are they alike?

TensorFlow waits for ever for a peer that never comes. So every process first listens on the port that TensorFlow will
use, calls every other one there, and compares versions, seeds, recipe and code. Either all go on together, or all end
with one message that names who is missing or who differs. `meeting.py` holds the conversation, `chair.py` the leader's
part in it, `facts.py` what is compared, `clocks.py` how far clocks are apart,
`sentences.py` what is said, `wire.py` one message.

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
# What this process has told the others of the clusters that it has joined, by their TF_CONFIG.
_joined: dict[str, dict[str, str]] = {}


def join(
    cluster: Cluster | None = None,
    *,
    script: str | None = None,
    facts: Mapping[str, str] | None = None,
    again: bool = False,
) -> None:
    """Meets the other processes of the cluster, once a process; every one of them must call it.

    Chief, workers and parameter servers take part; an evaluator and a process by itself do not. Waits up to
    TFGPU_STARTUP_TIMEOUT seconds (60; 0 leaves all of this out). Afterwards the ports are free for TensorFlow. A worker
    that comes back alone (TFGPU_REJOIN) meets nobody: the others have long gone on.

    Args:
        cluster: the facts of the cluster; `None` reads them from the environment.
        script: the file whose content must be the same everywhere; `None` is the running program's.
        facts: what else must be equal, by name, such as `{"recipe": "5f2c..."}`.
        again: meet even where this process has met the others before, and tell them the same, and the script's
            arguments: a warning names those that differ. Only before TensorFlow has started, which then has the port.

    Raises:
        InputError: the processes differ, two are the same task, or TFGPU_STARTUP_TIMEOUT is malformed.
        MachineError: a process did not answer in time, or this one's port is in use; the message names it.
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    wait_s = timeout_s()
    everyone, me = members(cluster)
    key = cluster.tf_config()
    if not wait_s or me < 0 or len(everyone) < 2 or os.environ.get(REJOIN) or (key in _joined and not again):
        return
    # asyncio takes a tenth of a second to import, which a command that meets nobody need not spend.
    from tfgpu.rendezvous.facts import ARGUMENTS, arguments, fitting, gather
    from tfgpu.rendezvous.holding import hold
    from tfgpu.rendezvous.meeting import Meeting

    here = {ARGUMENTS: arguments()} if again else {}
    own = {**(_joined.get(key) or gather(script)), **here, **fitting(facts or {})}
    hold(Meeting(everyone, me, facts=own, attempt=os.environ.get(ATTEMPT, ""), timeout_s=wait_s))
    _joined[key] = own


def timeout_s(environ: Mapping[str, str] | None = None) -> float:
    """Reads TFGPU_STARTUP_TIMEOUT: the seconds to wait for the others; 0 for not at all.

    Args:
        environ: environment variables by name; `None` means this process's.

    Raises:
        InputError: it is no number of seconds.

    Example:
        >>> timeout_s({}), timeout_s({"TFGPU_STARTUP_TIMEOUT": "300"})
        (60.0, 300.0)
    """
    value = (os.environ if environ is None else environ).get(TIMEOUT, "").strip()
    if not value:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 7 * 86400:
        raise InputError(
            f"{TIMEOUT} must be a number of seconds from 0 (no waiting, no comparison) to a week. Received: {value!r}. "
            f"Set for example {TIMEOUT}=300."
        )
    return seconds
