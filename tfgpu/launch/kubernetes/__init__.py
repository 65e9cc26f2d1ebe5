"""Kubernetes: renders a launch as manifests for `kubectl apply`; the same input gives the same text.

Example:
    >>> from tfgpu.launch.job import Job
    >>> job = Job("/app/train.py", workers=2, gpus_per_worker=1)
    >>> text = render(job, Kubernetes(name="digits", image="registry.example/tfgpu:1.0", claim="runs"))
    >>> [line for line in text.splitlines() if line.startswith("kind")]
    ['kind: Service', 'kind: Job']
"""

import re
from collections.abc import Iterable, Mapping

import yaml

from tfgpu.launch.job import Job
from tfgpu.launch.kubernetes.facts import KINDS, Kubernetes
from tfgpu.launch.kubernetes.jobs import manifests

__all__ = ["KINDS", "Kubernetes", "manifests", "render"]

# Only what every version of YAML reads as a string stays unquoted; "1e3", "0o17", "12:30" and "on" are quoted.
_PLAIN = re.compile(r"[A-Za-z/](?:[A-Za-z0-9 ._/-]*[A-Za-z0-9._/-])?")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf", "infinity"}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    if "\n" in text:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _string)


def documents(manifests: Iterable[Mapping]) -> str:
    """Writes manifests as one YAML text, in the given order of manifests and keys.

    Example:
        >>> print(documents([{"kind": "A", "value": "1e3"}, {"kind": "B", "list": ["on", 1]}]), end="")
        kind: A
        value: "1e3"
        ---
        kind: B
        list:
          - "on"
          - 1
    """
    options = {"Dumper": _Dumper, "sort_keys": False, "allow_unicode": True, "width": 10_000}
    return "---\n".join(yaml.dump(dict(each), **options) for each in manifests)


def render(job: Job, facts: Kubernetes) -> str:
    """Returns the manifests as YAML, one document each, to be piped into `kubectl apply -f -`.

    Args:
        job: what to start, and how many restarts.
        facts: the settings of the launch.

    Raises:
        InputError: the job and the settings contradict each other; the message names the fix.
    """
    return documents(manifests(job, facts))
