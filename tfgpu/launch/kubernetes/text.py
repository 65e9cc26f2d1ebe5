"""Manifests as YAML that all parsers read alike: YAML 1.1 (PyYAML), YAML 1.2 and Go's."""

import re
from collections.abc import Iterable, Mapping

import yaml

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
    texts = (
        yaml.dump(dict(each), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000) for each in manifests
    )
    return "---\n".join(texts)
