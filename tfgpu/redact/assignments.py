"""Values of secret names: `NAME=value`, `"name": "value"`, `name: value`, `--name value`."""

import functools
import re
from collections.abc import Iterator

from tfgpu.redact.names import is_strong, is_weak

# A name may stand behind an escaped line break (`\n`), and end with a quote that is escaped itself (JSON in JSON).
_ASSIGNED = re.compile(
    r"(?<![\w.\-])(?:(?<=\\)[nrt])?(?P<name>[\w.\-]++)\\{0,32}+[\"']?\]?"
    r"(?:[ \t]*+(?P<mark>:?=(?![=>])|:(?![:/=])|=>)[ \t]*+|(?P<equal>[ \t]++==[ \t]++))"
)
_FLAG = re.compile(
    r"(?<![\w.\-])(?P<name>--?[A-Za-z][\w.\-]*+)(?=[\s,\"'\\])(?:\\{0,32}+[\"'])?\s*+,?(?:\s|\\++[nrt]?)*+(?:-\s++)?"
)
# One quote or three, each escaped alike. The value runs to the same quote, unless a backslash escapes it; quotes right
# behind that continue the value (shell, YAML).
_QUOTED = re.compile(
    r"(?P<open>[bfruBFRU]{0,2}(?P<mark>(?P<one>\\{0,32}+[\"'])(?:(?P=one){2})?))"
    r"(?P<value>(?:(?!(?<!\\)(?P=mark))[^\n])*+(?:(?P=mark)(?=(?P=mark)|\"'|'\")[^\n]*+)?)"
)
_BARE = re.compile(r"(?P<value>(?:(?i:bearer|basic|digest|token)[ \t]++)?\S++)")
_LINE = re.compile(r"(?P<value>\S[^\n]*+)")
_CLOSING = "\"'`,;)}]\\\r"
_PLAIN = re.compile(r"(?i:true|false|none|null)\s*(?:[,;)}\]]|\Z)|(?:[\[({]|\$[A-Z_]{3,}|\$\{\w+\}|)[\s,;)}\]\"']*\Z")
"""No secrets: a constant, an opening bracket with its content on other lines, a shell's variable."""
_LOOK = 128
"""Characters of a value that decide whether it looks like a secret."""
_LOOKS_SECRET = re.compile(r"(?=[A-Za-z+/_.~=\-]*\d)(?=[\d+/_.~=\-]*[A-Za-z])[A-Za-z0-9+/_.~=\-]{8,}+(?!\()")

Span = tuple[int, int]


def secrets(text: str) -> Iterator[Span]:
    """Where the values of secret names begin and end, in order; none overlaps another."""
    done = 0
    strong, weak = functools.cache(is_strong), functools.cache(is_weak)  # A log repeats its names.
    for found in sorted([*_ASSIGNED.finditer(text), *_FLAG.finditer(text)], key=lambda each: each.start()):
        if found.end() < done:
            continue
        if strong(found["name"]):
            span = _strong(text, found)
        elif weak(found["name"]):
            span = _weak(text, found.end())
        else:
            continue
        if span:
            yield span
            done = span[1]


def _strong(text: str, found: re.Match) -> Span | None:
    """Takes too much rather than too little: a YAML value runs to the end of its line."""
    first = found.end()
    if quoted := _QUOTED.match(text, first):
        return _kept(text, *quoted.span("value"))
    to_end = found.re is _ASSIGNED and found["mark"] == ":" or text[first : first + 1] in "([{"
    value = (_LINE if to_end else _BARE).match(text, first)
    if value is None or (found.re is _FLAG and value["value"].startswith("-")):
        return None
    last = first + len(value["value"].rstrip(_CLOSING))
    return _kept(text, first, last)


def _weak(text: str, first: int) -> Span | None:
    quoted = _QUOTED.match(text, first, first + _LOOK)
    start = quoted.end("open") if quoted else first
    if not _LOOKS_SECRET.match(text, start, start + _LOOK):
        return None
    value = (_QUOTED if quoted else _BARE).match(text, first)
    return start, start + len(value["value"].rstrip(_CLOSING))


def _kept(text: str, first: int, last: int) -> Span | None:
    return None if last <= first or _PLAIN.match(text, first, last) else (first, last)
