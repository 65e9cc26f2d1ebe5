"""The settings of a launch on Kubernetes: image, storage, resources, names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tfgpu.errors import InputError, unknown, whole_number
from tfgpu.launch.kubernetes import quantities

KINDS = {"job": "{name}-{index}", "tfjob": "{name}-{role}-{index}", "trainjob": "{name}-node-0-{index}"}
"""The kinds that can be rendered (an indexed Job, Kubeflow's TFJob v1 and TrainJob v2), and how each names its pods."""

LABEL_LENGTH = 63
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(?:\.{_LABEL.pattern})*")
_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(rf"(?:{_SUBDOMAIN.pattern}/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
_PATH = re.compile(r"/[^:\0]+")


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
        grace_s: seconds between SIGTERM and SIGKILL, for saving a checkpoint.
        scheduling_s: seconds by which pods may start apart, while a node is added or an image pulled; added to the
            job's startup timeout.
        port: TCP port on which the workers communicate.
        user: numeric user of the container, and group of the volume.
        pull_secret: the Secret for the image registry.
        node_selector: labels of the nodes that may be used.
        labels: labels of all objects, such as Kueue's `kueue.x-k8s.io/queue-name`, which starts all pods or none.

    Raises:
        InputError: the API server would reject a value, or misread it.
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
    grace_s: int = 60
    scheduling_s: int = 600
    port: int = 2222
    user: int = 10001
    pull_secret: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of manifest", self.kind, KINDS)
        _check_name(self.name)
        if not isinstance(self.image, str) or not re.fullmatch(r"\S+", self.image):
            raise InputError(f"`image` must name an image, such as 'registry/tfgpu:1.0'. Received: {self.image!r}.")
        if self.namespace is not None and not _is_label(self.namespace):
            raise InputError(f"`namespace` must be {_label_words()}. Received: {self.namespace!r}.")
        for name in ("claim", "storage_class", "pull_secret"):
            _check_object(name, getattr(self, name), optional=name != "claim")
        if self.storage_class is not None and self.claim_size is None:
            raise InputError("`storage_class` applies only to a created claim: set `claim_size` too, or omit it.")
        if not isinstance(self.mount, str) or not _PATH.fullmatch(self.mount):
            raise InputError(f"`mount` must be an absolute path, such as '/checkpoints'. Received: {self.mount!r}.")
        self._check_amounts()
        for name in ("node_selector", "labels"):
            _check_labels(name, getattr(self, name))

    def _check_amounts(self) -> None:
        quantities.cores("cpu", self.cpu)
        memory = quantities.memory_bytes("memory", self.memory)
        if quantities.memory_bytes("shared_memory", self.shared_memory) >= memory:
            raise InputError(
                "`shared_memory` is part of `memory` and must be below it. "
                f"Received: shared_memory={self.shared_memory!r}, memory={self.memory!r}."
            )
        if self.claim_size is not None:
            quantities.memory_bytes("claim_size", self.claim_size)
        for name, least, most in (
            ("grace_s", 1, 86_400),
            ("scheduling_s", 0, 86_400),
            ("port", 1024, 65_535),
            ("user", 1, 2**31 - 1),
        ):
            value = whole_number(name, getattr(self, name), minimum=least, maximum=most)
            object.__setattr__(self, name, value)  # a plain int, which YAML can represent


def _is_label(text: object) -> bool:
    return isinstance(text, str) and len(text) <= LABEL_LENGTH and bool(_LABEL.fullmatch(text))


def _label_words() -> str:
    return f"at most {LABEL_LENGTH} lower-case letters, digits and '-', with a letter or digit at both ends"


def _check_name(name: object) -> None:
    # A Service's name must begin with a letter (RFC 1035); those of other objects may begin with a digit (RFC 1123).
    if _is_label(name) and name[0].isalpha():
        return
    suggested = re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")[:LABEL_LENGTH].strip("-")
    suggested = suggested if suggested[:1].isalpha() else f"run-{suggested}".strip("-")
    raise InputError(
        f"`name` must be {_label_words()}, and start with a letter. Received: {name!r}. Use {suggested!r}, for example."
    )


def _check_object(name: str, value: object, *, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, str) or len(value) > 253 or not _SUBDOMAIN.fullmatch(value):
        raise InputError(
            f"`{name}` must be a Kubernetes object name: lower-case letters, digits, '-' and '.', with a letter or "
            f"digit at both ends. Received: {value!r}."
        )


def _check_labels(name: str, labels: Mapping[str, str]) -> None:
    for key, value in labels.items():
        if not isinstance(key, str) or not _LABEL_KEY.fullmatch(key):
            raise InputError(f"A key in `{name}` must look like 'team' or 'example.com/team'. Received: {key!r}.")
        if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
            raise InputError(
                f"A value in `{name}` must be at most {LABEL_LENGTH} letters, digits, '-', '_' and '.', with a letter "
                f"or digit at both ends. Received: {key!r}: {value!r}."
            )
