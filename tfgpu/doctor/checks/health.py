"""Checks of the state of GPUs: memory in use, ECC, MIG, persistence, heat and power, links, errors in the log."""

from collections import Counter
from collections.abc import Mapping

from tfgpu.doctor.check import Check, worst
from tfgpu.doctor.checks.gpus import is_full, only, shared_out, visible_gpus

GIB = 2**30
_FEW_NAMED = 5
# NVIDIA's descriptions of Xid errors: https://docs.nvidia.com/deploy/xid-errors/
_XIDS = {
    13: "a fault in a program's kernel",
    31: "a program accessed invalid memory",
    43: "a program was stopped",
    45: "a program was ended",
    48: "memory error that ECC cannot correct",
    62: "the GPU's controller stopped",
    63: "a bad memory row will be replaced at the next reset",
    64: "a bad memory row cannot be replaced",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "memory error, contained in one program",
    95: "memory error, not contained",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
}
_PROGRAMS = (13, 31, 43, 45)


def checks(facts: Mapping[str, dict], environ: Mapping[str, str]) -> list[Check]:
    """All checks of this module, if the driver shows a GPU."""
    gpus = facts["driver"].get("gpus") or []
    found = xids(facts)
    if not gpus:
        return found
    each = [*memory(own(facts, environ)), *mig(gpus), *persistence(gpus), *ecc(gpus), *throttling(gpus)]
    return [*each, *(links(facts, environ) if len(gpus) > 1 else []), *found]


def own(facts: Mapping[str, dict], environ: Mapping[str, str]) -> list[dict]:
    """The GPUs that this process may choose from: all, or those assigned to it."""
    gpus, value = facts["driver"]["gpus"], environ.get("CUDA_VISIBLE_DEVICES")
    if value is None or not shared_out(environ):
        return gpus
    shown, _ = visible_gpus(value, gpus, facts["driver"].get("lost", []))
    return [gpu for gpu in gpus if gpu["index"] in shown]


def memory(gpus: list[dict]) -> list[Check]:
    """Memory in use before training starts, so that TensorFlow gets less or fails to start."""
    faults = []
    for gpu in gpus:
        if not is_full(gpu):
            continue
        total, used = gpu["memory_bytes"], gpu["used_bytes"]
        who = sorted(gpu.get("processes", []), key=lambda each: -each["bytes"])
        named = ", ".join(f"{each['name'] or 'process'} {each['pid']}" for each in who[:_FEW_NAMED])
        more = f" and {len(who) - _FEW_NAMED} more" if len(who) > _FEW_NAMED else ""
        text = f"{used / GIB:.1f} of {total / GIB:.1f} GiB of GPU {gpu['index']} are in use by "
        text += f"{named}{more}" if named else "processes that this one cannot see (another container or user)"
        free = [each["uuid"] for each in gpus if not is_full(each)]
        if free:
            command = only(free)
            faults.append(Check("GPU memory", "warning", text, f"{command}  (or end what uses it)", command))
        else:
            fix = f"End it if it is left over: `ps -o user,etime,args -p {','.join(str(each['pid']) for each in who)}`."
            faults.append(Check("GPU memory", "warning", text, fix if who else "Find out who else uses this machine."))
    used = sum(gpu.get("used_bytes") or 0 for gpu in gpus)
    return worst("GPU memory", f"{used / GIB:.1f} GiB in use in total", faults)


def mig(gpus: list[dict]) -> list[Check]:
    """Multi-instance GPUs: TensorFlow sees one slice per process, and NCCL does not work between slices."""
    faults = []
    for gpu in gpus:
        found, index = gpu.get("mig") or {}, gpu["index"]
        if found.get("enabled") != found.get("pending"):
            state = "on" if found["pending"] else "off"
            text = f"GPU {index}: turning MIG {state} needs a reset"
            faults.append(Check("MIG", "warning", text, command=f"sudo nvidia-smi -i {gpu['uuid']} --gpu-reset"))
        elif found.get("enabled") and not found["slices"]:
            text = f"GPU {index} is in MIG mode without slices, so no program can use it"
            faults.append(Check("MIG", "problem", text, command=f"sudo nvidia-smi -i {gpu['uuid']} -mig 0"))
        elif found.get("enabled"):
            text = f"GPU {index} has {len(found['slices'])} slices; a process gets one, and slices cannot be mirrored"
            command = f"export CUDA_VISIBLE_DEVICES={found['slices'][0]}"
            fix = f"{command}  (or use it whole: sudo nvidia-smi -i {gpu['uuid']} -mig 0)"
            faults.append(Check("MIG", "warning", text, fix, command))
    return worst("MIG", "off", faults)


def persistence(gpus: list[dict]) -> list[Check]:
    off = [str(gpu["index"]) for gpu in gpus if gpu.get("persistence") == 0]
    if off:
        text = f"off on GPU {', '.join(off)}: the driver restarts for each program, which takes seconds"
        return [Check("Persistence mode", "warning", text, command="sudo nvidia-smi -pm 1")]
    is_known = any(gpu.get("persistence") is not None for gpu in gpus)
    return [Check("Persistence mode", "ok", "on" if is_known else "not supported by this driver")]


def ecc(gpus: list[dict]) -> list[Check]:
    """Memory errors since the driver started, which corrupt results or end programs."""
    faults = []
    for gpu in gpus:
        found, named = gpu.get("ecc") or {}, f"GPU {gpu['index']} ({gpu['uuid']})"
        reset = f"sudo nvidia-smi -i {gpu['uuid']} --gpu-reset"
        if found.get("failed"):
            text = f"{named}: bad memory rows can no longer be replaced"
            faults.append(Check("ECC errors", "problem", text, "Have this GPU replaced, and hide it until then."))
        elif found.get("uncorrected"):
            text = f"{named}: {found['uncorrected']} uncorrected error(s) since the driver started"
            fix = f"{reset}  (end its programs first; have it replaced if the errors return)"
            faults.append(Check("ECC errors", "problem", text, fix, reset))
        elif found.get("pending"):
            text = f"{named}: bad memory will be replaced at the next reset"
            faults.append(Check("ECC errors", "warning", text, command=reset))
    corrected = sum((gpu.get("ecc") or {}).get("corrected") or 0 for gpu in gpus)
    is_on = any((gpu.get("ecc") or {}).get("enabled") for gpu in gpus)
    fine = f"none uncorrected, {corrected} corrected" if is_on else "not counted: ECC is off"
    return worst("ECC errors", fine, faults)


def throttling(gpus: list[dict]) -> list[Check]:
    """Clocks throttled by heat or power, and reduced power limits."""
    faults = []
    for gpu in gpus:
        hot, index = gpu.get("temperature_c"), gpu["index"]
        reasons = [each for each in gpu.get("slowed_by", []) if each != "power cap"]
        limit, default = gpu.get("power_limit_w"), gpu.get("default_power_limit_w")
        if reasons:
            text = f"GPU {index} is throttled by {', '.join(reasons)}" + (f", at {hot} °C" if hot is not None else "")
            fix = "Check fans, airflow and power cables: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`."
            faults.append(Check("GPU clocks", "warning", text, fix))
        if limit and default and limit < 0.95 * default:
            text = f"GPU {index} is limited to {limit:.0f} W, of {default:.0f} W by default"
            command = f"sudo nvidia-smi -i {gpu['uuid']} -pl {default:.0f}"
            faults.append(Check("GPU clocks", "warning", text, command=command))
    busy = [str(gpu["index"]) for gpu in gpus if "power cap" in gpu.get("slowed_by", [])]
    text = f"GPU {', '.join(busy)} at its power limit, as under full load" if busy else "not throttled"
    return worst("GPU clocks", text, faults)


def links(facts: Mapping[str, dict], environ: Mapping[str, str]) -> list[Check]:
    """The links between GPUs."""
    name, faults = "GPU links", []
    for variable, words in (("NCCL_P2P_DISABLE", "from GPU to GPU"), ("NCCL_SHM_DISABLE", "through shared memory")):
        if environ.get(variable, "0") not in ("", "0"):
            text = f"{variable}={environ[variable]}: NCCL sends nothing {words}"
            faults.append(Check(name, "warning", text, command=f"unset {variable}"))
    for gpu in facts["driver"]["gpus"]:
        index, found, pcie = gpu["index"], gpu.get("nvlinks") or {}, gpu.get("pcie") or {}
        if found.get("fabric") in ("not started", "under way"):
            text = f"GPU {index}: the NVLink fabric is {found['fabric']}, so CUDA does not start"
            faults.append(Check(name, "problem", text, command="sudo systemctl restart nvidia-fabricmanager"))
        elif 0 < found.get("up", 0) < found["of"]:
            text = f"GPU {index}: {found['of'] - found['up']} of {found['of']} NVLinks are down"
            fix = "See `nvidia-smi nvlink -s` and `-e`; a reset may bring them back."
            faults.append(Check(name, "warning", text, fix))
        if pcie.get("width") and pcie.get("most_width") and pcie["width"] < pcie["most_width"]:
            text = f"GPU {index} uses {pcie['width']} of {pcie['most_width']} possible PCIe lanes"
            faults.append(Check(name, "warning", text, "Check its slot and riser (BIOS: lane bifurcation)."))
    pairs = facts["driver"].get("links", [])
    without = [each for each in pairs if each["reads"] is False and each["path"] != "NVLink"]
    if without:
        named = ", ".join("-".join(map(str, each["gpus"])) for each in without[:_FEW_NAMED])
        text = f"{len(without)} of {len(pairs)} pairs ({named}) cannot read each other's memory: NCCL uses the host's"
        fix = "Turn off IOMMU and ACS in the BIOS, if the GPUs support it (consumer GPUs do not)."
        faults.append(Check(name, "warning", text, fix))
    kinds = Counter(each["path"] for each in pairs)
    text = ", ".join(f"{count} by {path}" for path, count in kinds.most_common())
    slow = " (SYS and NODE cross the links between CPUs)" if kinds.keys() & {"NODE", "SYS"} else ""
    return worst(name, f"pairs: {text or 'unknown'}{slow}", faults)


def xids(facts: Mapping[str, dict]) -> list[Check]:
    """NVIDIA's errors in the kernel log."""
    found, has_gpus = facts["xid"], bool(facts["driver"].get("gpus") or facts["machine"].get("pci_gpus"))
    lines = found.get("lines", [])
    if not lines:
        if not has_gpus:
            return []
        unread = found.get("unread") or found.get("error")
        return [Check("GPU errors (Xid)", "ok", f"not read: {unread}" if unread else "none in the kernel's log")]
    hard = [each for each in lines if each["number"] not in _PROGRAMS]
    each = (hard or lines)[-1]
    text = f"{len(lines)} in the kernel's log; Xid {each['number']}"
    text += f" ({_XIDS.get(each['number'], 'see the list')}) of {each['gpu']}: {each['text']}"
    fix = "Look it up: https://docs.nvidia.com/deploy/xid-errors/. "
    fix += "Reset or reboot, and have the GPU checked." if hard else "It was caused by a program, not by the GPU."
    return [Check("GPU errors (Xid)", "problem" if hard else "warning", text, fix)]
