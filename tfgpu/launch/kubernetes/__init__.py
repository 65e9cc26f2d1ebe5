"""Kubernetes: renders a launch as manifests for `kubectl apply`; the same input gives the same text.

Example:
    >>> from tfgpu.launch.job import Job
    >>> job = Job("/app/train.py", workers=2, gpus_per_worker=1)
    >>> text = render(job, Kubernetes(name="digits", image="registry.example/tfgpu:1.0", claim="runs"))
    >>> [line for line in text.splitlines() if line.startswith("kind")]
    ['kind: Service', 'kind: Job']
"""

from tfgpu.launch.job import Job
from tfgpu.launch.kubernetes.facts import KINDS, Kubernetes
from tfgpu.launch.kubernetes.jobs import manifests
from tfgpu.launch.kubernetes.text import documents

__all__ = ["KINDS", "Kubernetes", "manifests", "render"]


def render(job: Job, facts: Kubernetes) -> str:
    """Returns the manifests as YAML, one document each, to be piped into `kubectl apply -f -`.

    Args:
        job: what to start, and how many restarts.
        facts: the settings of the launch.

    Raises:
        InputError: the job and the settings contradict each other; the message names the fix.
    """
    return documents(manifests(job, facts))
