"""The settings of a launch on Kubernetes: image, storage, resources, names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tfgpu.errors import InputError, unknown, whole_number

KINDS = {"job": "{name}-{index}", "tfjob": "{name}-{role}-{index}"}
"""The kinds that can be rendered (an indexed Job, and Kubeflow's TFJob), and how each names its pods."""

LABEL_LENGTH = 63
_CORES = re.compile(r"[1-9][0-9]*m?|[0-9]+\.[0-9]+")
_BYTES = re.compile(r"(?:[1-9][0-9]*(?:\.[0-9]+)?|0\.[0-9]+)(?:[KMGTPE]i|[kMGTPE])")


@dataclass(frozen=True)
class Kubernetes:
    """The settings of a launch on Kubernetes.

    Args:
        name: name of all objects and part of the pods' DNS names: lower-case letters, digits and `-`, a letter first.
        image: the container image, with Python, tfgpu and, unless `source` is given, the script.
        claim: the PersistentVolumeClaim with the checkpoints, which restarts need. Pods on several nodes need one with
            the access mode ReadWriteMany.
        kind: one of `KINDS`.
        namespace: None leaves it to `kubectl`.
        claim_size: creates the claim with this size; None: it exists.
        storage_class: storage class of the created claim; None: the cluster's default.
        mount: where the claim is mounted. It is the script's working directory, so relative paths are kept.
        source: the script's text, for a ConfigMap; None: the image contains the script.
        cpu: cores that each pod requests.
        memory: limit of each pod, which is killed above it.
        shared_memory: limit of `/dev/shm`, which NCCL and data workers use; counts against `memory`.
        grace_period_s: seconds between SIGTERM and SIGKILL, for saving a checkpoint.
        scheduling_s: how many seconds apart pods may start, while a node is added or an image pulled; added to the
            job's startup timeout.
        port: TCP port on which the workers communicate.
        user: numeric user of the container, and group of the volume.
        pull_secret: the Secret for the image registry.
        node_selector: labels of the nodes that may be used.
        labels: labels of all objects, such as Kueue's `kueue.x-k8s.io/queue-name`, which starts all pods or none.

    Raises:
        InputError: a value is malformed, or would be misread. Other faults, as of labels, `kubectl apply` reports.
    """

    name: str
    image: str
    claim: str
    kind: str = "job"
    namespace: str | None = None
    claim_size: str | None = None
    storage_class: str | None = None
    mount: str = "/checkpoints"
    source: str | None = None
    cpu: str = "4"
    memory: str = "16Gi"
    shared_memory: str = "2Gi"
    grace_period_s: int = 60
    scheduling_s: int = 600
    port: int = 2222
    user: int = 10001
    pull_secret: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of manifest", self.kind, KINDS)
        # A Service's name must begin with a letter (RFC 1035).
        if not re.fullmatch(r"[a-z](?:[-a-z0-9]*[a-z0-9])?", self.name) or len(self.name) > LABEL_LENGTH:
            raise InputError(
                f"`name` must be at most {LABEL_LENGTH} lower-case letters, digits and '-', start with a letter, and "
                f"end with a letter or digit. Received: {self.name!r}."
            )
        if not re.fullmatch(r"\S+", self.image):
            raise InputError(f"`image` must name an image, such as 'registry/tfgpu:1.0'. Received: {self.image!r}.")
        if self.storage_class is not None and self.claim_size is None:
            raise InputError("`storage_class` applies only to a created claim: set `claim_size` too, or omit it.")
        if not re.fullmatch(r"/[^:\0]+", self.mount):
            raise InputError(f"`mount` must be an absolute path, such as '/checkpoints'. Received: {self.mount!r}.")
        self._check_amounts()

    def _check_amounts(self) -> None:
        if not _CORES.fullmatch(self.cpu):
            raise InputError(f"`cpu` must be a number of cores, such as '4' or '500m'. Received: {self.cpu!r}.")
        for name in ("memory", "shared_memory", "claim_size"):
            value = getattr(self, name)
            # Without a unit it would be bytes, and `m` thousandths of a byte.
            if value is not None and not _BYTES.fullmatch(value):
                raise InputError(f"`{name}` must have a unit, such as '16Gi' or '500M'. Received: {value!r}.")
        bounds = {"grace_period_s": (1, 86_400), "scheduling_s": (0, 86_400), "port": (1024, 65_535)}
        for name, (least, most) in {**bounds, "user": (1, 2**31 - 1)}.items():
            value = whole_number(name, getattr(self, name), minimum=least, maximum=most)
            object.__setattr__(self, name, value)  # a plain int, which YAML can represent
