"""Checks of the cluster: its description, this machine's address and port, and the other workers."""

import ipaddress
from collections.abc import Mapping

from tfgpu.cluster import Cluster
from tfgpu.doctor.check import Check
from tfgpu.errors import InputError
from tfgpu.rendezvous import clocks

_NAME = "Cluster"


def cluster(environ: Mapping[str, str]) -> Check:
    try:
        found = Cluster.from_environment(environ)
    except InputError as error:
        if environ.get("TF_CONFIG", "").strip():
            return Check(_NAME, "problem", str(error), "unset TF_CONFIG  (or correct it)", "unset TF_CONFIG")
        return Check(_NAME, "problem", str(error), "Correct the variable that it names.")
    if found.source == "none":
        return Check(_NAME, "ok", "none: one process")
    counts = ", ".join(f"{len(addresses)} {job}" for job, addresses in found.jobs().items())
    return Check(_NAME, "ok", f"{found.source}: {found.task_type} {found.task_index} of {counts}")


def reality(facts: Mapping[str, dict], environ: Mapping[str, str]) -> list[Check]:
    """Compares the cluster's description with reality; empty for a single process."""
    found = facts["cluster"]
    if not found:
        return []
    if "error" in found:
        return [Check("Cluster addresses", "warning", found["error"], "Run `tfgpu doctor` again.")]
    checks = [_names(found), _own(found, environ), _port(found), _others(found), _clocks(found)]
    return [check for check in checks if check]


def gpus(facts: Mapping[str, dict], environ: Mapping[str, str]) -> Check | None:
    """Compares the GPUs that the scheduler allocated with those that TensorFlow sees."""
    promised, by = _promise(environ)
    seen = facts["tensorflow"].get("gpus")
    if promised is None or seen is None:
        return None
    text = f"{by}; TensorFlow sees {len(seen)}"
    if promised > len(seen):
        fix = "See 'GPUs' here; in Slurm, start the processes with `srun --gpus-per-task`, which assigns each its own."
        return Check("GPUs allocated", "problem", text, fix)
    return Check("GPUs allocated", "ok", text)


def _promise(environ: Mapping[str, str]) -> tuple[int | None, str]:
    """The number of GPUs allocated to this process, and the variable that says so."""
    try:
        own = Cluster.from_environment(environ).gpus
    except InputError:
        own = None
    if own is not None:
        return len(own), f"this process's share is {len(own)}"
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPUS_ON_NODE"):
        value = environ.get(name, "").rpartition(":")[2]
        if value.isdecimal():
            return int(value), f"{name}={environ[name]}"
    value = environ.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    if value and value not in ("all", "none", "void"):
        count = len(value.split(","))
        return count, f"NVIDIA_VISIBLE_DEVICES names {count}"
    return None, ""


def _names(found: dict) -> Check:
    unknown = [name for name, addresses in found["names"].items() if not addresses]
    if unknown:
        text = f"no address is known for {', '.join(unknown)}"
        fix = "Correct the names in TF_CONFIG, or add them to DNS or /etc/hosts."
        return Check("Cluster addresses", "problem", text, fix)
    return Check("Cluster addresses", "ok", f"all {len(found['names'])} names resolve")


def _own(found: dict, environ: Mapping[str, str]) -> Check | None:
    addresses, here = found["own_addresses"], found["here"]
    if not addresses:
        return None  # `_names` says so.
    if any(each in here or _is_loopback(each) for each in addresses):
        return Check("Own address", "ok", f"{found['own']} is this machine")
    text = f"{found['own']} is {', '.join(addresses)}, but this machine is {', '.join(here) or 'without a network'}"
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return Check("Own address", "ok", f"{text}: the address of a Kubernetes service")
    fix = "Correct the address, or TF_CONFIG's `task`: its index may be that of another machine."
    return Check("Own address", "problem", text, fix)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _port(found: dict) -> Check:
    port = found["own"].rpartition(":")[2].rstrip(")")
    if not found["port"]:
        return Check("Own port", "ok", f"{port} is free")
    text = f"{port} cannot be opened: {found['port']}"
    fix = f"`ss -ltnp 'sport = :{port}'` shows the process that uses it: end it, or choose another port in TF_CONFIG."
    status = "warning" if found["port"].startswith("TensorFlow") else "problem"
    return Check("Own port", status, text, fix)


def _others(found: dict) -> Check:
    if found["differs"]:
        text, _, fix = found["differs"].rpartition(". ")
        return Check("Other workers", "problem", text or found["differs"], fix or "Make them equal.")
    text = f"{len(found['reached'])} of {found['others']} answer"
    if len(found["reached"]) < found["others"]:
        text += "; they may not be running yet. Run `tfgpu doctor` on all at the same time to compare them"
    return Check("Other workers", "ok", text)


def _clocks(found: dict) -> Check | None:
    known = {name: clocks.Clock(*each) for name, each in found["clocks"].items()}
    if not known:
        return None
    off = [f"{name}'s is {clocks.shown(clock)}" for name, clock in known.items() if clock.is_off]
    if off:
        fix = clocks.FIX.replace("Set the clocks", "Set the wrong clock")
        return Check("Clocks", "warning", f"compared with this machine's, {', '.join(off)}", fix)
    most = max(abs(clock.ahead_s) for clock in known.values())
    return Check("Clocks", "ok", f"within {max(most, 0.001):.3f} s of {len(known)} other(s)")
