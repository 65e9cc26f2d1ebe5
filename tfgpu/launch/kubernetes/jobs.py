"""The two kinds of launch: an indexed Job, and Kubeflow's TFJob.

Both restart the group: TensorFlow's other workers fail within seconds of a worker's death, so every process
ends, and each is started again. They differ in what counts the restarts. See docs/guides/kubernetes.md.
"""

from tfgpu.errors import InputError
from tfgpu.launch.job import Job
from tfgpu.launch.kubernetes.facts import KINDS, LABEL_LENGTH, Kubernetes
from tfgpu.launch.kubernetes.pods import labels, script_name, script_path, template
from tfgpu.launch.restarts import PREEMPTED, WRONG_INPUT

CONTAINER = "train"
TFJOB_CONTAINER = "tensorflow"
_SCRIPT_BYTES = 2**19  # A ConfigMap holds 1 MiB, including the copy that `kubectl apply` keeps in it.


def manifests(job: Job, facts: Kubernetes) -> list[dict]:
    """Makes the objects that run a job, in the order in which to apply them.

    Args:
        job: what to start, and how many restarts. `gpus_per_worker` is required, since no machine is inspected.
        facts: the settings of the launch.

    Returns:
        Plain dicts, one per object, with the fields of the published schemas.

    Raises:
        InputError: the job and the settings contradict each other; the message names the fix.

    Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/
    """
    _check(job, facts)
    makers = {"job": _indexed_job, "tfjob": _tfjob}
    return [*_shared(job, facts), *makers[facts.kind](job, facts)]


def _check(job: Job, facts: Kubernetes) -> None:
    if job.gpus_per_worker is None:
        raise InputError("On Kubernetes, `gpus_per_worker` is required; 0 for none.")
    if job.logs is not None:
        raise InputError(f"On Kubernetes, read logs with `kubectl logs`. Received: logs={str(job.logs)!r}.")
    if (job.parameter_servers or job.evaluator) and facts.kind != "tfjob":
        raise InputError(
            "Parameter servers and an evaluator need the kind 'tfjob'. Received: "
            f"parameter_servers={job.parameter_servers}, evaluator={job.evaluator}, kind={facts.kind!r}."
        )
    script_path(job, facts)
    last = max(job.workers, job.parameter_servers) - 1
    longest = KINDS[facts.kind].format(name=facts.name, role="evaluator" if job.evaluator else "worker", index=last)
    if len(longest) > LABEL_LENGTH:
        raise InputError(
            f"`name` is too long: a pod would be named {longest!r}, and the limit is {LABEL_LENGTH} characters. "
            f"Shorten it by {len(longest) - LABEL_LENGTH}. Received: {facts.name!r}."
        )


def _object(api: str, kind: str, facts: Kubernetes, name: str | None = None) -> dict:
    metadata = {"name": name or facts.name, "labels": labels(facts)}
    if facts.namespace:
        metadata = {"name": metadata["name"], "namespace": facts.namespace, "labels": metadata["labels"]}
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _shared(job: Job, facts: Kubernetes) -> list[dict]:
    objects = []
    if facts.claim_size is not None:
        several = job.workers + job.parameter_servers + job.evaluator > 1
        spec = {
            "accessModes": ["ReadWriteMany" if several else "ReadWriteOnce"],
            "resources": {"requests": {"storage": facts.claim_size}},
        }
        if facts.storage_class is not None:
            spec["storageClassName"] = facts.storage_class
        objects.append({**_object("v1", "PersistentVolumeClaim", facts, facts.claim), "spec": spec})
    if facts.source is not None:
        size = len(facts.source.encode())
        if size > _SCRIPT_BYTES:
            raise InputError(f"A script over {_SCRIPT_BYTES} bytes must be part of the image. Received: {size} bytes.")
        objects.append({**_object("v1", "ConfigMap", facts), "data": {script_name(job): facts.source}})
    return objects


def _who(facts: Kubernetes, job: Job) -> dict[str, str]:
    """What `Cluster.from_environment` reads besides JOB_COMPLETION_INDEX, which Kubernetes sets."""
    return {
        "TFGPU_WORKERS": str(job.workers),
        "TFGPU_JOB_NAME": facts.name,
        "TFGPU_SERVICE": facts.name,
        "TFGPU_PORT": str(facts.port),
    }


def _failure_policy() -> dict:
    """Maps the launcher's exit codes to actions; the first matching rule applies."""

    def exits(code: int) -> dict:
        return {"onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [code]}}

    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", **exits(PREEMPTED)},
            {"action": "FailJob", **exits(WRONG_INPUT)},
        ]
    }


def _indexed_job(job: Job, facts: Kubernetes) -> list[dict]:
    service = _object("v1", "Service", facts)
    service["spec"] = {
        "clusterIP": "None",
        # Peers look up a worker while it starts, long before it is ready.
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": facts.name},
        "ports": [{"name": "tensorflow", "port": facts.port, "protocol": "TCP"}],
    }
    batch = _object("batch/v1", "Job", facts)
    batch["spec"] = {
        "completionMode": "Indexed",
        "completions": job.workers,
        "parallelism": job.workers,
        # Each restart of the group counts as one failure of every index, so this limits the group's restarts.
        "backoffLimitPerIndex": job.max_restarts,
        "maxFailedIndexes": 0,
        # The next pod starts only when the previous one has ended, so two never write at once.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": _failure_policy(),
        # The chief writes all results, so the job is done when the chief is.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": template(
            job,
            facts,
            container=CONTAINER,
            environment=_who(facts, job),
            pod={"restartPolicy": "Never", "subdomain": facts.name},
        ),
    }
    return [service, batch]


def _tfjob(job: Job, facts: Kubernetes) -> list[dict]:
    # The operator adds up the restarts of all containers; a restart of the group restarts every process.
    counts = {"Chief": int(job.parameter_servers > 0), "Worker": job.workers, "PS": job.parameter_servers}
    counts = {role: count for role, count in {**counts, "Evaluator": int(job.evaluator)}.items() if count}
    again = job.max_restarts > 0
    specs = {
        role: {
            "replicas": count,
            "restartPolicy": "OnFailure" if again else "Never",
            "template": template(job, facts, container=TFJOB_CONTAINER),
        }
        for role, count in counts.items()
    }
    tfjob = _object("kubeflow.org/v1", "TFJob", facts)
    tfjob["spec"] = {
        "runPolicy": {
            "backoffLimit": job.max_restarts * sum(counts.values()) + 1 if again else 0,
            "cleanPodPolicy": "Running",
        },
        "tfReplicaSpecs": specs,
    }
    return [tfjob]
