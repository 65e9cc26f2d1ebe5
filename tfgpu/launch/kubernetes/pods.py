"""The pod of one process: command, environment, resources, volumes."""

import math
import re

from tfgpu.errors import InputError
from tfgpu.launch.job import Job
from tfgpu.launch.kubernetes.facts import Kubernetes
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


def template(
    job: Job,
    facts: Kubernetes,
    *,
    container: str,
    environment: dict[str, str] | None = None,
    pod: dict[str, str] | None = None,
) -> dict:
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
    spec = {
        **(pod or {}),
        # Then Python is not process 1, for which Linux ignores SIGTERM without a handler: until the checkpoint installs
        # one, and in a script without one, TERM would do nothing and the pod would wait for the KILL.
        "shareProcessNamespace": True,
        # A Service called "tfgpu" would set TFGPU_PORT.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": facts.grace_period_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": facts.user,
            "runAsGroup": facts.user,
            "fsGroup": facts.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": _tolerations(job),
        "containers": [_container(job, facts, container, environment or {})],
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
        raise InputError(
            f"`script` must be its absolute path in the image, such as '/app/train.py'. Received: {job.script!r}. "
            "Or give its text as `source`."
        )
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
    ours = {
        **environment,
        "TFGPU_STARTUP_TIMEOUT": f"{job.startup_timeout_s + facts.scheduling_s:g}",
        "TFGPU_HEARTBEAT": HEARTBEAT,
        "PYTHONUNBUFFERED": "1",
    }
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
    heartbeat_timeout_s = math.ceil(job.heartbeat_timeout_s)
    return {
        "exec": {"command": ["python", "-c", PROBE, HEARTBEAT, str(heartbeat_timeout_s)]},
        "initialDelaySeconds": heartbeat_timeout_s,
        "periodSeconds": PROBE_EVERY_S,
        "timeoutSeconds": PROBE_EVERY_S,
        "failureThreshold": PROBE_FAILURES,
        # A process without heartbeats cannot save either.
        "terminationGracePeriodSeconds": 5,
    }


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
