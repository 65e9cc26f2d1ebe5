"""What stands behind a name: where it ends, whether it is a secret, and what is put in its place."""

import re
from collections.abc import Iterator

from tfgpu.redact import names

REMOVED = "<removed>"
Secret = tuple[int, int, str]
"""Where a secret begins and ends, and the character behind its name, which in JSON is a quote."""
_SMALL = re.compile(r"[-+]?(\d{1,3}|\d+\.\d+)(e[-+]?\d+)?(?![\w.])")
_CODE = re.compile(r"[\[({]|[A-Za-z_][\w.]*[(\[{]|lambda\b")
_STAND_IN = re.compile(r"[|>][-+\d]*$|<[a-z ]+>(?!\w)|\*{3}")
_VERSION = re.compile(r"v?\d+(\.\w+)*([+!-][\w.]+)?[\s;,]*$|\d[\w.+!]*$")
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?")
# Within a text that is itself quoted, `\"` and `\\\"` stand for a mark; the same one ends it.
_MARK = r"\\*+[\"']"
_MARKED = r"(?P<mark>\\++[\"'])(?:(?!(?<!\\)(?P=mark))[^\n])*+(?P=mark)?"
_PREFIX = r"(?:[bBrRuUfF]{1,2}(?=[\"']))?"
# A mark in single quotes, as a shell takes it: 'it'"'"'s'.
_SHELL = r"'[^'\n]*+'(?:(?:\"'\"|\\')'[^'\n]*+')++"
# A letter, a digit, `_`, `-` or `.` of a name as an address has it, or as an address within an address does: `%255F`.
_ENCODED = r"%(?:25){0,3}(?:2[DEde]|3\d|4[1-9A-Fa-f]|5[\dAFaf]|6[1-9A-Fa-f]|7[\dAa])"
_BLANK = r"(?:%(?:25){0,3}20|\+)"
# A name and what joins it to its value: in code, JSON, YAML, an environment, a query, a command line, an address.
_NAMED = re.compile(
    rf"(?<![\w.\-])(?P<name>[\w.\-]++(?:{_ENCODED}[\w.\-]*+){{0,40}}+)"
    rf"(?:(?P<equals>(?:{_MARK})?\]?[ \t]*+(?::=|=>|[=!]=|=)[ \t]*+{_PREFIX}(?:\\\n[ \t]*+)?)"
    rf"|(?P<colon>(?:{_MARK})?\s*+:[ \t]*+{_PREFIX})"
    rf"|(?P<encoded>(?:%(?:25){{0,3}}2[27])?{_BLANK}*+%(?P<depth>(?:25){{0,3}})3[ADad]"
    rf"{_BLANK}*+(?P<opened>%(?:25){{0,3}}2[27])?)"
    rf"|(?P<list>{_MARK}\s*+,\s*+(?={_MARK})|(?:{_MARK})?[ \t]*+\n[ \t]*+-[ \t]++)|(?P<space>[ \t]++(?:\\\n[ \t]*+)?))"
)
_VALUES = {
    "equals": re.compile(rf"{_SHELL}|{_QUOTED.pattern}|{_MARKED}|(?:[^\s&\"']|&(?![\w.\-%]{{1,60}}+=))++"),
    "colon": re.compile(rf"'(?:[^'\n]|'')*+'(?=\s|\Z)|{_QUOTED.pattern}|{_MARKED}|(?:[^\s\"'/]|(?<=[ \t])/)[^\n]*"),
    "list": re.compile(rf"{_QUOTED.pattern}|{_MARKED}|[^\s\"'\-][^\n]*"),
    "space": re.compile(rf"{_SHELL}|{_QUOTED.pattern}|{_MARKED}|[^\s\"'\-][^\s\"']*"),
}
_LINE = re.compile(r"[^\n]*")
_BRACKET = re.compile(rf"[(\[{{)\]}}]|{_QUOTED.pattern}")
_LONGEST_KEY = 600
_ALONE = re.compile(rf"(?:(?P<number>{_SMALL.pattern})|<[a-z ]+>)(?=[\s,;)\]}}]|\Z)")
_LONGEST_BRACKET, _DEEPEST_BRACKET = 2000, 8
_SHORTEST_KEY = 8
"""Characters from which a value with a digit is taken for a key, behind a name that may mean something else."""
_FLAG = re.compile(r"-|.*--")
_FLAG_ALONE = re.compile(r"[\"']--?[\w.\-]+[\"']")
_QUOTES = "\"'"
_NO_SECRETS = ("true", "false", "null", "none", "")


def behind_names(text: str) -> Iterator[Secret]:
    """The secrets behind secret names; a value that is none may itself hold some: `args: --token abc`."""
    at, ends = 0, [len(text)]  # `ends`: of the quoted values that `at` is within.
    while ends:
        named = _NAMED.search(text, at, ends[-1])
        if named is None:
            at = ends.pop()
            continue
        at = named.end("name")
        if _joins_nothing(text, named):
            continue
        name = _secret_name(text, named)
        if not name:
            at = named.end()
            quoted = _QUOTED.match(text, at, ends[-1])
            if quoted and not _FLAG_ALONE.fullmatch(quoted[0]):
                ends.append(quoted.end())
            continue
        value = _value(text, name, named, ends[-1])
        if not value:
            continue
        first, at = named.end(), named.end() + len(value)
        if is_value(name, value, named["equals"] or ""):
            yield first, at, text[named.end("name")]
        elif value[0] not in _QUOTES:
            at = first + 1


def _secret_name(text: str, named: re.Match) -> str:
    """The name, if it is one of a secret; behind a `%` it may begin with a character's number: `%26pwd`."""
    encoded = [f"%{named['name']}"] if text[named.start() - 1 : named.start()] == "%" else []
    return next(filter(names.is_secret, [named["name"], *encoded]), "")


def _joins_nothing(text: str, named: re.Match) -> bool:
    """Whether what stands behind the name is none of its value: the next word, `-v /run/token:/token`."""
    if named["space"] or named["list"]:
        return not _FLAG.match(named["name"]) or named["name"].endswith(".")
    return named["colon"] == ":" and text[named.start() - 1 : named.start()] == "/"


def is_value(name: str, value: str, joined: str = "") -> bool:
    """Whether what stands behind a secret name is a secret, and not `true`, a version or a piece of a program."""
    bare = value.strip("\"',}];`.) ")
    if bare.strip("\\") == REMOVED or bare.lower() in _NO_SECRETS or _STAND_IN.match(bare):
        return False
    words = names.words(name)
    if not names.SPOKEN.search(words) and _SMALL.fullmatch(bare):
        return False
    if joined.strip() == "==" and _VERSION.match(value):
        return False
    if not names.WEAK.search(words):
        return True
    is_code = value[0] not in "\"'\\" and _CODE.match(bare)
    return not is_code and bare[:1] != "/" and len(bare) >= _SHORTEST_KEY and any(map(str.isdecimal, bare))


def _value(text: str, name: str, named: re.Match, end: int) -> str:
    """What stands behind a name: a word, a quoted text, a line, or what is within brackets."""
    first, kind = named.end(), str(named.lastgroup)
    words = names.words(name)
    alone = _ALONE.match(text, first, end)
    if alone and not (alone["number"] and names.SPOKEN.search(words)):
        return alone[0]
    if names.WEAK.search(words):  # Pieces of programs stay, and what is in them is looked at: each only once or so.
        end = min(end, first + _LONGEST_KEY)
    bracket = _in_brackets(text, first, end)
    if bracket:
        return bracket
    if kind == "colon" and text[named.end("name") : named.end("name") + 1] in ("'", '"'):
        number = re.compile(r"[-\w.+]++(?=\s*+[,}\]])").match(text, first, end)
        if number:
            return number[0]
    quoted = text[first : first + 1] in _QUOTES
    if named["equals"] == " = " and names.SPOKEN.search(name.lower()) and not quoted:
        return text[first : _LINE.match(text, first, end).end()]  # of a settings file, which quotes no blanks
    form = _encoded_value(named) if kind == "encoded" else _VALUES[kind]
    found = form.match(text, first, end)
    return found[0] if found else ""


def _encoded_value(named: re.Match) -> re.Pattern:
    """What goes on to the next `&` or quote, as deep as the `=` is."""
    ends = rf"(?<!%{named['depth']}5C)%{named['depth']}2[27]" if named["opened"] else f"%{named['depth']}26"
    return re.compile(rf"(?:(?!{ends})[^\s&\"'<>])++")


def _in_brackets(text: str, first: int, end: int) -> str:
    depth = 0
    if text[first : first + 1] in ("(", "[", "{"):
        for mark in _BRACKET.finditer(text, first, min(end, first + _LONGEST_BRACKET)):
            depth += (mark[0] in "([{") - (mark[0] in ")]}")
            if not depth:
                return text[first : mark.end()]
            if depth > _DEEPEST_BRACKET:
                break
    return ""


def kept_around(value: str, before: str) -> str:
    """What stands for a secret: in the same quotes, so that JSON stays JSON.

    Args:
        before: the character after the name, which in JSON is a quote.
    """
    if value[0] == "\\" and (mark := re.match(_MARK, value)):
        return f"{mark[0]}{REMOVED}{mark[0] if value.removeprefix(mark[0]).endswith(mark[0]) else ''}"
    if value[0] in _QUOTES:
        return f"{value[0]}{REMOVED}{value[0] if value[1:].endswith(value[0]) else ''}"
    if before in _QUOTES:  # a number, which becomes a text
        return f"{before}{REMOVED}{before}{value[len(value.rstrip(' ,}]')) :]}"
    return REMOVED
