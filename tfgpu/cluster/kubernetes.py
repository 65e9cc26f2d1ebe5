"""Pods of one training job: an indexed Job with a headless service, or a Kubeflow TrainJob (v2).

Kubeflow's TFJob (v1) sets TF_CONFIG itself, with the names of its services as hosts.

Sources: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode and
https://www.kubeflow.org/docs/components/trainer/
"""

import re
from collections.abc import Mapping

from tfgpu.cluster import hostlist, values
from tfgpu.errors import InputError

PORT = 2222
TRAIN_JOB_PORT = 29400
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
# A TrainJob's pods are those of a JobSet: JOB-node-0-INDEX, in the service that has the job's name.
_FIRST_POD = re.compile(r"(?P<pod>[^.:\s]+-)0(?P<service>\.[^:\s]+)")


def read(environ: Mapping[str, str]) -> dict | None:
    """Reads the variables that an indexed Job or a TrainJob sets in a pod.

    Args:
        environ: environment variables by name. For an indexed Job: Kubernetes's JOB_COMPLETION_INDEX, and from the
            manifest TFGPU_WORKERS (the Job's completions), TFGPU_JOB_NAME, TFGPU_SERVICE and optionally TFGPU_PORT. For
            a TrainJob: PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.

    Returns:
        Keyword arguments of `Cluster`, or None if these are not set or there is only one pod.

    Raises:
        InputError: a variable is malformed or missing.
    """
    if values.text(environ, "TFGPU_WORKERS"):
        addresses, place = _indexed_job(environ)
    elif values.text(environ, "PET_NNODES") and values.text(environ, "PET_NODE_RANK"):
        addresses, place = _train_job(environ)
    else:
        return None
    if len(addresses) == 1:
        return None
    return values.numbered(addresses, place, source="Kubernetes", parameter_servers=values.parameter_servers(environ))


def _indexed_job(environ: Mapping[str, str]) -> tuple[list[str], int]:
    count = values.whole(environ, "TFGPU_WORKERS", least=1, most=hostlist.MOST)
    if count == 1:
        return ["localhost:1"], 0
    if not values.text(environ, "JOB_COMPLETION_INDEX"):
        raise InputError(
            f"JOB_COMPLETION_INDEX is not set, although TFGPU_WORKERS={count}: Kubernetes sets it in the pods of a Job "
            "with `completionMode: Indexed`. Set that in the Job, or unset TFGPU_WORKERS to train in one process."
        )
    place = values.whole(environ, "JOB_COMPLETION_INDEX", most=count - 1)
    job, service = (_name(environ, name) for name in ("TFGPU_JOB_NAME", "TFGPU_SERVICE"))
    port = values.whole(environ, values.PORT, default=PORT, least=1, most=65535)
    return [f"{job}-{index}.{service}:{port}" for index in range(count)], place


def _train_job(environ: Mapping[str, str]) -> tuple[list[str], int]:
    nodes = values.text(environ, "PET_NNODES")
    if re.fullmatch(r"[0-9]+:[0-9]+", nodes):
        raise values.malformed("PET_NNODES", nodes, "a variable number of nodes is not supported.", "PET_NNODES=2")
    count = values.whole(environ, "PET_NNODES", least=1, most=hostlist.MOST)
    place = values.whole(environ, "PET_NODE_RANK", most=count - 1)
    if count == 1:
        return ["localhost:1"], 0
    port = values.whole(environ, "PET_MASTER_PORT", default=TRAIN_JOB_PORT, least=1, most=65535)
    port = values.whole(environ, values.PORT, default=port, least=1, most=65535)
    master = values.text(environ, "PET_MASTER_ADDR")
    match = _FIRST_POD.fullmatch(master)
    if not match:
        why = "the other pods' names cannot be derived from it. Set TF_CONFIG, or use the value that a TrainJob sets."
        raise values.malformed("PET_MASTER_ADDR", master, why, "PET_MASTER_ADDR=myjob-node-0-0.myjob")
    return [f"{match['pod']}{index}{match['service']}:{port}" for index in range(count)], place


def _name(environ: Mapping[str, str], name: str) -> str:
    value = values.text(environ, name)
    if not _NAME.fullmatch(value):
        problem = "it must be a DNS name." if value else "it is not set."
        raise values.malformed(name, value, problem, f"{name}=myjob")
    return value
