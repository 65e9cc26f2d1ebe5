"""Judges the results of a self-test against the peak of the device or link, or a simple reference program."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tfgpu.doctor.check import Check
from tfgpu.parallel.planning.hardware import driven
from tfgpu.sensors.gpus import LANE_BYTES_PER_S

Facts = Mapping[str, dict]
LEAST = {"GPU products": 0.4, "CPU products": 0.5, "GPU sums": 0.3, "CPU sums": 0.02}
"""The ratios below which something is wrong. Healthy machines reach at least twice these."""
MOST_DIFFERENCE = {"CPU": 1e-5, "GPU": 1e-4}
"""The tolerated difference of a weight from one device's, relative to weights above 1: rounding only."""
_AMPERE = (8, 0)
"""The first compute capability with bfloat16 and TF32."""
_BUSY = "Check for other programs (`nvidia-smi`, `top`), heat and power ('GPU clocks' here), and run it again."


def judge(found: Facts, facts: Facts, hosts: Sequence[str], machines: Facts | None = None) -> list[Check]:
    """Judges the results of a self-test, also partial ones.

    Args:
        found: answers by part: `multiply`, `sums`, `training`, `multi_worker`, `parameter_server`.
        facts: the facts of the machine, from the doctor's `gather`.
        hosts: the machines of the workers.
        machines: the results of other machines, by host.
    """
    kinds = [each["training"].get("kind") for each in (found, *(machines or {}).values()) if "training" in each]
    most = MOST_DIFFERENCE["GPU" if "GPU" in kinds else "CPU"]
    checks = _alone(found, facts)
    if "multi_worker" in found:
        checks.append(_between_workers(found["multi_worker"], hosts))
    if "training" in found:
        checks += _trainings(found, most)
    for host, each in (machines or {}).items():
        checks += _elsewhere(host, each, found["training"].get("one_device"), most)
    return checks


def _alone(found: Mapping[str, dict], facts: Mapping[str, dict]) -> list[Check]:
    checks = _products(found["multiply"], facts) if "multiply" in found else []
    return checks + ([_sums(found["sums"], facts)] if "sums" in found else [])


def _elsewhere(host: str, found: dict, reference: Sequence[float] | None, most: float) -> list[Check]:
    """The checks of another machine; its training on one device is compared with this machine's."""
    if "error" in found:
        fix = f"Run `tfgpu doctor` there; `ssh {host}` must work without prompts."
        return [_failed(f"Machine {host}", found, fix)]
    checks = _alone(found, found["facts"])
    here = found["training"]
    if "error" in here:
        checks.append(_failed("Training", here))
    else:
        checks += [_strategy(name, here.get(name), here["one_device"], most) for name in ("mirrored", "averaging")]
        checks.append(_compared("Training one_device", here["one_device"], reference or here["one_device"], most))
    there = [replace(check, name=f"{check.name} on {host}") for check in checks]
    return [replace(check, fix=f"On {host}: {check.fix}") if check.fix else check for check in there]


def _products(found: dict, facts: Mapping[str, dict]) -> list[Check]:
    name = "Matrix products"
    if "error" in found:
        return [_failed(name, found)]
    gpus, checks = facts["tensorflow"].get("gpus") or [], []
    for index, each in enumerate(found["devices"]):
        if each["kind"] == "CPU":
            rate, peak = _median(each["float32"]), _median(each["numpy"])
            text = f"CPU: {rate / 1e9:.0f} GFLOP/s in float32, {rate / peak:.2f} of numpy's rate"
            checks.append(_rated(name, text, rate, peak, "CPU products"))
            continue
        gpu = gpus[index] if index < len(gpus) else {"name": ""}
        known = driven(gpu["name"])
        rates = {kind: _median(each[kind]) for kind in ("bfloat16", "float32")}
        text = f"GPU:{index}: {_tera(rates['bfloat16'])} TFLOP/s in bfloat16, {_tera(rates['float32'])} in float32"
        capability = tuple(map(int, re.findall(r"\d+", gpu.get("capability", "")))) or _AMPERE
        judged = "bfloat16" if capability >= _AMPERE else "float32"
        peak = known and known.flops_in(judged)
        text += " with TF32" if found["tf32"] and judged == "bfloat16" else ""
        text += f"; {rates[judged] / peak:.2f} of {known.name}'s peak" if known else ""
        text += f" in {judged}" if known else f"; the peak of {gpu['name']} is unknown"
        checks.append(_rated(name, text, rates[judged], peak, "GPU products"))
    return checks


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.0f}" if rate >= 1e13 else f"{rate / 1e12:.1f}"


def _sums(found: dict, facts: Mapping[str, dict]) -> Check:
    name = "All-reduce between devices"
    if "error" in found:
        return _failed(name, found)
    if found["devices"] < 2:
        return Check(name, "ok", "one device: nothing to reduce")
    rate = _median(found["sum"])
    text = f"{found['devices']} devices: {rate / 1e9:.1f} GB/s"
    if found["kind"] == "CPU":
        peak = _median(found["copy"])
        text += f" between logical CPU devices, {rate / peak:.2f} of a memory copy"
        return _rated(name, text, rate, peak, "CPU sums")
    peak, link = _link(facts["driver"])
    text += f"; {rate / peak:.2f} of {link}" if peak else "; the bandwidth of the link is unknown"
    return _rated(name, text, rate, peak, "GPU sums")


def _link(driver: Mapping) -> tuple[float | None, str]:
    """The bandwidth in one direction of the slowest link between GPUs, in bytes per second, and its kind."""
    gpus, pairs = driver.get("gpus") or [], driver.get("links") or []
    known = driven(gpus[0]["name"]) if gpus else None
    if pairs and all(each["path"] == "NVLink" for each in pairs):
        return (known.bandwidth, "NVLink") if known and known.link == "NVLink" else (None, "")
    slots = [gpu.get("pcie") or {} for gpu in gpus]
    rates = [
        LANE_BYTES_PER_S[each["generation"]] * each["width"]
        for each in slots
        if each.get("generation") in LANE_BYTES_PER_S and each["width"]
    ]
    return (min(rates), "PCIe") if rates else (None, "")


def _between_workers(found: dict, hosts: Sequence[str]) -> Check:
    name = "All-reduce between workers"
    if "error" in found:
        return _failed(name, found, "Try it separately: `tfgpu launch -n 2 SCRIPT`, with --hosts for other machines.")
    rate, where = _median(found["sum"]), ", ".join(dict.fromkeys(hosts))
    return Check(name, "ok", f"{found['workers']} workers on {where}: {rate / 1e9:.2f} GB/s", figures={"rate": rate})


def _trainings(found: Mapping[str, dict], most: float) -> list[Check]:
    """Compares the final weights of each strategy with those of one device."""
    here = found["training"]
    if "error" in here:
        return [_failed("Training", here)]
    weights: dict[str, object] = {name: here.get(name) for name in ("mirrored", "averaging")}
    several = [name for name in ("multi_worker", "parameter_server") if name in found]
    weights |= {name: found[name].get("weights") or found[name] for name in several}
    reference = here["one_device"]
    checks = [Check("Training one_device", "ok", f"{len(reference)} weights after two epochs")]
    return checks + [_strategy(name, each, reference, most) for name, each in weights.items()]


def _strategy(name: str, weights: object, reference: Sequence[float], most: float) -> Check:
    title = f"Training {name}"
    if weights is None:
        return Check(title, "ok", "not tried: there is only one GPU")
    if isinstance(weights, Mapping):
        return _failed(title, weights, f"Try it separately: `tfgpu launch` or `tfgpu train --strategy {name}`.")
    return _compared(title, weights, reference, most)


def _compared(title: str, weights: Sequence[float], reference: Sequence[float], most: float) -> Check:
    if len(weights) != len(reference):
        text = f"{len(weights)} weights, but one device has {len(reference)}"
        return Check(title, "problem", text, "Install the same versions of tfgpu and Keras on all machines.")
    each = [abs(one - other) / max(1.0, abs(other)) for one, other in zip(weights, reference, strict=True)]
    far = math.nan if any(map(math.isnan, each)) else max(each)
    text, figures = f"largest difference from the weights of one device: {far:.1e}", {"difference": far, "most": most}
    if not far <= most:
        fix = "Report it with `tfgpu doctor --bundle`; until then, train on one device."
        return Check(title, "problem", f"{text}, more than {most:g}", fix, figures=figures)
    return Check(title, "ok", text, figures=figures)


def _rated(name: str, text: str, rate: float, peak: float | None, kind: str) -> Check:
    """The check of a rate against its peak."""
    if not peak:
        return Check(name, "ok", text, figures={"rate": rate})
    figures = {"rate": rate, "peak": peak, "ratio": rate / peak}
    if rate / peak < LEAST[kind]:
        return Check(name, "warning", f"{text}: less than {LEAST[kind]:g}", _BUSY, figures=figures)
    return Check(name, "ok", text, figures=figures)


def _failed(name: str, found: Mapping, fix: str = "See 'TensorFlow' and 'GPUs' here, and run it again.") -> Check:
    return Check(name, "problem", f"failed: {found['error']}", fix)


def _median(rate: Mapping) -> float:
    return statistics.median(rate["values"])
