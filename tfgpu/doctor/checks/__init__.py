"""Judges the facts of the machine; each check is a function of the facts and the environment."""

from collections.abc import Mapping
from typing import Any

from tfgpu.doctor.check import Check
from tfgpu.doctor.checks import gpus, health, libraries, machine, software

__all__ = ["judge"]


def judge(facts: Mapping[str, dict[str, Any]], environ: Mapping[str, str]) -> list[Check]:
    """Judges the facts collected by `gather`.

    Args:
        facts: the result of `gather`.
        environ: the environment variables passed to it.

    Returns:
        The checks, in reading order; each problem and warning has a fix. A check with several faults occurs once for
        each.
    """
    checks = [software.python(facts), software.tensorflow(facts), software.several_tensorflows(facts)]
    checks += [software.triton(facts), software.keras(facts, environ), software.legacy_keras(facts, environ)]
    checks += [software.build(facts), gpus.driver(facts), *gpus.lost(facts), machine.container(facts)]
    checks += [gpus.visible(facts, environ), gpus.seen(facts, environ), gpus.allocated(facts, environ)]
    checks += [*gpus.capability(facts), *libraries.cuda(facts), libraries.runtime(facts), libraries.cudnn(facts)]
    checks += [libraries.nccl(facts), libraries.tools(facts), *health.checks(facts, environ)]
    checks += [software.tensorboard(facts), gpus.cluster(environ), *machine.processor(facts, environ)]
    checks += [machine.memory(facts), machine.shared_memory(facts), *machine.limits(facts), machine.disk(facts)]
    checks += [*software.repairs(facts, environ), *software.patches(facts)]
    return [check for check in checks if check]
