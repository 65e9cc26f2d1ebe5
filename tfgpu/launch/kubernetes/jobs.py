"""The two kinds of launch: an indexed Job, and Kubeflow's TFJob.

Both restart the group: TensorFlow's other workers fail within seconds of a worker's death, so every process
ends, and each is started again. They differ in what counts the restarts. See docs/guides/kubernetes.md.
"""

import math
import re

from tfgpu.errors import InputError
from tfgpu.launch.job import Job
from tfgpu.launch.kubernetes.facts import KINDS, LABEL_LENGTH, Kubernetes
from tfgpu.launch.restarts import PREEMPTED, WRONG_INPUT
from tfgpu.redact import is_secret

GPU = "nvidia.com/gpu"
PORT = "tfjob-port"  # The name by which the TFJob operator finds the container.
HEARTBEAT = "/tmp/tfgpu-heartbeat"
SCRIPTS = "/tmp/tfgpu-script"
PROBE_EVERY_S = 10
PROBE_FAILURES = 2
# Checks the age of the heartbeat file without a shell or other tools in the image.
PROBE = "import os, sys, time; sys.exit(time.time() - os.path.getmtime(sys.argv[1]) > float(sys.argv[2]))"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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
        why = f"`name` is too long: a pod would be named {longest!r}, and the limit is {LABEL_LENGTH} characters."
        raise InputError(f"{why} Shorten it by {len(longest) - LABEL_LENGTH}. Received: {facts.name!r}.")


def _object(api: str, kind: str, facts: Kubernetes, name: str | None = None) -> dict:
    namespace = {"namespace": facts.namespace} if facts.namespace else {}
    metadata = {"name": name or facts.name, **namespace, "labels": labels(facts)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _shared(job: Job, facts: Kubernetes) -> list[dict]:
    objects = []
    if facts.claim_size is not None:
        several = job.workers + job.parameter_servers + job.evaluator > 1
        spec = {"accessModes": ["ReadWriteMany" if several else "ReadWriteOnce"]}
        spec["resources"] = {"requests": {"storage": facts.claim_size}}
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
    names = {"TFGPU_JOB_NAME": facts.name, "TFGPU_SERVICE": facts.name}
    return {"TFGPU_WORKERS": str(job.workers), **names, "TFGPU_PORT": str(facts.port)}


def _failure_policy() -> dict:
    """Maps the launcher's exit codes to actions; the first matching rule applies."""

    def exits(code: int) -> dict:
        return {"onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [code]}}

    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ended = [{"action": "Ignore", **exits(PREEMPTED)}, {"action": "FailJob", **exits(WRONG_INPUT)}]
    return {"rules": [evicted, *ended]}


def _indexed_job(job: Job, facts: Kubernetes) -> list[dict]:
    service = _object("v1", "Service", facts)
    service["spec"] = {
        "clusterIP": "None",
        # Peers look up a worker while it starts, long before it is ready.
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": facts.name},
        "ports": [{"name": "tensorflow", "port": facts.port, "protocol": "TCP"}],
    }
    pod = {"restartPolicy": "Never", "subdomain": facts.name}
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
        "template": template(job, facts, CONTAINER, _who(facts, job), pod),
    }
    return [service, batch]


def _tfjob(job: Job, facts: Kubernetes) -> list[dict]:
    # The operator adds up the restarts of all containers; a restart of the group restarts every process.
    counts = {"Chief": int(job.parameter_servers > 0), "Worker": job.workers, "PS": job.parameter_servers}
    counts = {role: count for role, count in {**counts, "Evaluator": int(job.evaluator)}.items() if count}
    again = job.max_restarts > 0
    pod = {"restartPolicy": "OnFailure" if again else "Never"}
    pod["template"] = template(job, facts, TFJOB_CONTAINER, {}, {})
    limit = job.max_restarts * sum(counts.values()) + 1 if again else 0
    spec = {"runPolicy": {"backoffLimit": limit, "cleanPodPolicy": "Running"}}
    spec["tfReplicaSpecs"] = {role: {"replicas": count, **pod} for role, count in counts.items()}
    return [{**_object("kubeflow.org/v1", "TFJob", facts), "spec": spec}]


def template(job: Job, facts: Kubernetes, container: str, environment: dict[str, str], pod: dict[str, str]) -> dict:
    """Makes the pod template of the processes.

    Args:
        job: what to start.
        facts: the settings of the launch.
        container: the container's name, which Kubeflow's operators prescribe.
        environment: variables that identify the process, if the engine sets none.
        pod: additional fields of the pod's spec.

    Returns:
        A `PodTemplateSpec`.
    """
    security = {"runAsNonRoot": True, "runAsUser": facts.user, "runAsGroup": facts.user, "fsGroup": facts.user}
    security |= {"fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {
        **pod,
        # Then Python is not process 1, for which Linux ignores SIGTERM without a handler: until the checkpoint installs
        # one, and in a script without one, TERM would do nothing and the pod would wait for the KILL.
        "shareProcessNamespace": True,
        # A Service called "tfgpu" would set TFGPU_PORT.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": facts.grace_period_s,
        "securityContext": security,
        "tolerations": _tolerations(job),
        "containers": [_container(job, facts, container, environment)],
        "volumes": _volumes(facts),
    }
    if facts.node_selector:
        spec["nodeSelector"] = dict(facts.node_selector)
    if facts.pull_secret:
        spec["imagePullSecrets"] = [{"name": facts.pull_secret}]
    return {"metadata": {"labels": labels(facts)}, "spec": spec}


def labels(facts: Kubernetes) -> dict[str, str]:
    """Returns the labels of every object of the launch."""
    return {**facts.labels, "app.kubernetes.io/name": "tfgpu", "app.kubernetes.io/instance": facts.name}


def script_path(job: Job, facts: Kubernetes) -> str:
    """Returns the script's path in the container.

    Raises:
        InputError: the path of a script in the image is not absolute.
    """
    if facts.source is not None:
        return f"{SCRIPTS}/{script_name(job)}"
    if not job.script.startswith("/"):
        why = f"`script` must be its absolute path in the image, such as '/app/train.py'. Received: {job.script!r}."
        raise InputError(f"{why} Or give its text as `source`.")
    return job.script


def script_name(job: Job) -> str:
    """Returns the script's file name as the key of a ConfigMap."""
    return re.sub(r"[^-._a-zA-Z0-9]", "_", job.script.rsplit("/", 1)[-1])


def literal(text: str) -> str:
    """Returns text that reaches the process as it is: Kubernetes replaces `$(NAME)` in commands and variables.

    Example:
        >>> literal("--pattern=$(HOME)")
        '--pattern=$$(HOME)'
    """
    return text.replace("$", "$$")


def _container(job: Job, facts: Kubernetes, name: str, environment: dict[str, str]) -> dict:
    mounts = [{"name": "checkpoints", "mountPath": facts.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    if facts.source is not None:
        mounts.append({"name": "script", "mountPath": SCRIPTS, "readOnly": True})
    limits = {"memory": facts.memory}
    if job.gpus_per_worker:
        limits[GPU] = str(job.gpus_per_worker)
    return {
        "name": name,
        "image": facts.image,
        # No shell in between: it would not forward SIGTERM.
        "command": ["python", "-m", "tfgpu.run", literal(script_path(job, facts))],
        "args": [literal(argument) for argument in job.arguments],
        "workingDir": facts.mount,
        "env": _environment(job, facts, environment),
        "ports": [{"name": PORT, "containerPort": facts.port, "protocol": "TCP"}],
        # No CPU limit: TensorFlow starts as many threads as the node has cores, and would be throttled in each period.
        "resources": {"requests": {"cpu": facts.cpu, **limits}, "limits": limits},
        **({"livenessProbe": _probe(job)} if job.heartbeat_timeout_s else {}),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }


def _environment(job: Job, facts: Kubernetes, environment: dict[str, str]) -> list[dict]:
    ours = {**environment, "TFGPU_STARTUP_TIMEOUT": f"{job.startup_timeout_s + facts.scheduling_s:g}"}
    ours |= {"TFGPU_HEARTBEAT": HEARTBEAT, "PYTHONUNBUFFERED": "1"}
    for name, value in job.environment.items():
        if not _VARIABLE.fullmatch(name):
            raise InputError(f"A variable's name may contain letters, digits and '_' only. Received: {name!r}.")
        if name in ours or name in ("TF_CONFIG", "JOB_COMPLETION_INDEX"):
            raise InputError(f"`environment` must not set {name}, which the launch sets. Received: {value!r}.")
    return [_variable(name, str(value), facts) for name, value in {**ours, **job.environment}.items()]


def secrets_name(facts: Kubernetes) -> str:
    """Returns the name of the Secret with the secret variables of a launch, which its user creates."""
    return f"{facts.name}-secrets"


def _variable(name: str, value: str, facts: Kubernetes) -> dict:
    if is_secret(name):  # Manifests are kept in files and repositories.
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": secrets_name(facts), "key": name}}}
    return {"name": name, "value": literal(value)}


def _probe(job: Job) -> dict:
    timeout_s = math.ceil(job.heartbeat_timeout_s)
    command = ["python", "-c", PROBE, HEARTBEAT, str(timeout_s)]
    probe = {"exec": {"command": command}, "initialDelaySeconds": timeout_s, "periodSeconds": PROBE_EVERY_S}
    # A process without heartbeats cannot save either.
    limits = {"failureThreshold": PROBE_FAILURES, "terminationGracePeriodSeconds": 5}
    return {**probe, "timeoutSeconds": PROBE_EVERY_S, **limits}


def _tolerations(job: Job) -> list[dict]:
    """Evicts the pods of an unreachable node after half a minute; Kubernetes waits for five minutes."""
    lost = [
        {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
        for state in ("not-ready", "unreachable")
    ]
    gpu = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}] if job.gpus_per_worker else []
    return lost + gpu


def _volumes(facts: Kubernetes) -> list[dict]:
    volumes = [
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": facts.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": facts.shared_memory}},
    ]
    if facts.source is not None:
        volumes.append({"name": "script", "configMap": {"name": facts.name}})
    return volumes
