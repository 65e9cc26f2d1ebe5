"""Facts of the cluster: names, addresses, the port of this process, and the other workers, if they answer."""

import contextlib
import os
import socket
import threading
from collections.abc import Sequence

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, MachineError
from tfgpu.rendezvous import facts as preflight_facts
from tfgpu.rendezvous import wire
from tfgpu.rendezvous.holding import hold
from tfgpu.rendezvous.meeting import Meeting
from tfgpu.rendezvous.members import Member, members
from tfgpu.rendezvous.peers import answers, serves

MEET_S = 8.0
"""Seconds for the doctors of other workers to answer."""
ATTEMPT = "doctor"
"""Distinguishes the doctor from a training that waits for this worker."""
_RESOLVE_S = 5.0


def _cluster(*, meet_s: float = MEET_S, **_) -> dict:
    """The cluster as seen from this process; empty for a single process."""
    try:
        cluster = Cluster.from_environment(os.environ)
    except InputError:  # `checks/cluster.py` reports it.
        return {}
    everyone, me = members(cluster)
    if me < 0 or len(everyone) < 2:
        return {}
    own, addresses = everyone[me], resolved([each.host for each in everyone])
    found = {
        "own": str(own),
        "names": {str(each): addresses[each.host] for each in everyone},
        "here": own_addresses(),
        "own_addresses": addresses[own.host],
        "port": _port(own),
    }
    return found | (_met(everyone, me, meet_s) if not found["port"] else _called(everyone, me))


def resolved(hosts: Sequence[str]) -> dict[str, list[str]]:
    """The addresses of host names; empty if a name does not resolve in time."""
    found: dict[str, list[str]] = {host: [] for host in hosts}

    def ask(host: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found[host] = sorted({str(each[4][0]) for each in socket.getaddrinfo(host.strip("[]"), None)})

    threads = [threading.Thread(target=ask, args=(host,), daemon=True) for host in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_RESOLVE_S)
    return dict(found)


def own_addresses() -> list[str]:
    """The addresses of this machine's interfaces."""
    import psutil

    kinds = (socket.AF_INET, socket.AF_INET6)
    interfaces = psutil.net_if_addrs().values()
    return sorted({each.address.partition("%")[0] for found in interfaces for each in found if each.family in kinds})


def _port(own: Member) -> str:
    """Why TensorFlow cannot listen at this process's port; `""` if it can."""
    try:
        wire.listener(own.port).close()
        return ""
    except OSError as error:
        if serves(f"127.0.0.1:{own.port}"):
            return "TensorFlow already listens there"
        return f"{wire.words(error)}{_holder(own.port)}"


def _holder(port: int) -> str:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN and each.pid:
                return f": {psutil.Process(each.pid).name()} (process {each.pid})"
    return ""


def _met(everyone: Sequence[Member], me: int, meet_s: float) -> dict:
    """Holds a rendezvous with the doctors of the other workers; missing ones are not an error."""
    facts = preflight_facts.gather()
    facts.pop(preflight_facts.SCRIPT, None)
    meeting = Meeting(everyone, me, facts=facts, attempt=ATTEMPT, timeout_s=meet_s)
    differs, all_came = "", False
    try:
        hold(meeting)
        all_came = True
    except InputError as error:
        differs = str(error)
    except MachineError:
        pass  # `reached` shows who is missing.
    clocks = {name: [clock.ahead_s, clock.within_s] for name, clock in meeting.clocks_of_others().items()}
    others = [each.name for index, each in enumerate(everyone) if index != me]
    reached = others if all_came else meeting.reached()
    return {"reached": reached, "clocks": clocks, "differs": differs, "others": len(everyone) - 1}


def _called(everyone: Sequence[Member], me: int) -> dict:
    """The processes that accept connections, if this process cannot hold a rendezvous."""
    found = {each.name: answers(each.address) for index, each in enumerate(everyone) if index != me}
    reached = [name for name, is_there in found.items() if is_there]
    return {"reached": reached, "clocks": {}, "differs": "", "others": len(everyone) - 1}


QUESTIONS = {"cluster": _cluster}
