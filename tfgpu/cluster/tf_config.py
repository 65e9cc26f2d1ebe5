"""TF_CONFIG, TensorFlow's own variable; Kubeflow's TFJob, Vertex AI and tfgpu's launchers set it.

Source: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
"""

import json
import re

from tfgpu.cluster.values import JOBS, rank_of
from tfgpu.errors import InputError, unknown, whole_number

EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'


def read(text: str) -> dict:
    """Reads the value of TF_CONFIG.

    Args:
        text: JSON.

    Returns:
        Keyword arguments of `Cluster`; empty if it contains no cluster.

    Raises:
        InputError: it cannot be read. `Cluster` checks whether the task belongs to the cluster.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON ({str(error).replace(chr(10), ' ')}).") from None
    if not isinstance(config, dict):
        raise InputError("it must be a JSON object with the keys `cluster` and `task`.")
    if "sparseCluster" in config:
        why = "`sparseCluster` does not list the other workers;"
        raise InputError(f"{why} set the TFJob's `enableDynamicWorker` to false.")
    jobs = _jobs({} if config.get("cluster") is None else config["cluster"])
    if not jobs:
        # Some platforms set TF_CONFIG without a cluster on a single machine.
        return {}
    if config.get("rpc_layer") not in (None, "", "grpc"):
        raise InputError(f"`rpc_layer` must be 'grpc', got {config['rpc_layer']!r}.")
    task_type, task_index = _task(config.get("task"))
    chief = jobs.get("chief", ())
    place = {"task_type": task_type, "task_index": task_index, "rank": rank_of(task_type, task_index, bool(chief))}
    others = {"parameter_servers": jobs.get("ps", ()), "evaluators": jobs.get("evaluator", ())}
    workers = chief + jobs.get("worker", ())
    return {**place, **others, "workers": workers, "has_chief": bool(chief), "source": "TF_CONFIG"}


def _jobs(section: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(section, dict):
        raise InputError("`cluster` must map jobs to lists of addresses.")
    jobs = {}
    for name, addresses in section.items():
        job = _job(name)
        if not isinstance(addresses, list):
            raise InputError(f"`cluster.{name}` must be a list of 'host:port', got {addresses!r}.")
        if job in jobs:
            raise InputError("`cluster` has both a `chief` and a `master`; keep one.")
        jobs[job] = tuple(addresses)
    if len(jobs.get("chief", ())) > 1:
        raise InputError(f"`cluster` must have one chief, got {len(jobs['chief'])}.")
    return {job: addresses for job, addresses in jobs.items() if addresses}


def _task(section: object) -> tuple[str, int]:
    if not isinstance(section, dict):
        raise InputError("`task` must identify this process by `type` and `index`.")
    for key in ("type", "index"):
        if key not in section:
            raise InputError(f"`task.{key}` is missing.")
    index = section["index"]
    # Shell templates often leave the index quoted; TensorFlow accepts that too.
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
        index = int(index)
    return _job(section["type"]), whole_number("task.index", index, minimum=0)


def _job(name: object) -> str:
    if name == "master":  # The name that older platforms give the chief.
        return "chief"
    if name not in JOBS:
        raise unknown("task type", name, JOBS)
    return name
