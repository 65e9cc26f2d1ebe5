"""Where a name and its secret stand apart: manifests, pairs, elements of XML, and what YAML writes in lines below."""

import re
from collections.abc import Iterator

from tfgpu.redact.names import is_secret
from tfgpu.redact.values import is_value

Span = tuple[str, int, int]
"""A name, and where its value begins and ends."""
_NAME = r"(?P<name>[\w.\-]++)"
_TEXT = r"\"(?:\\.|[^\"\\\n])*+\"?|'(?:\\.|[^'\\\n])*+'?"
_INLINE = rf"(?P<value>{_TEXT}|[^\s\"'{{\[,}}\])][^\n,}}\])]*+)"
_LINE = rf"(?P<value>{_TEXT}|[^\s\"'{{\[][^\n]*+)"
_NAMED = rf"\b[nN]ame[\"']?[ \t]*+[:=]\s*+[\"']?{_NAME}[\"']?"
_VALUED = r"\b[vV]alue[\"']?[ \t]*+[:=]"
_APART = [
    # Kubernetes, Docker, ECS: `name: X`, `value: Y`, in either order.
    rf"{_NAMED}[ \t]*+,?[ \t]*+[\"']?{_VALUED}[ \t]*+{_INLINE}",
    rf"{_NAMED}[ \t]*+,?[ \t]*+\n\s*+[\"']?{_VALUED}[ \t]*+{_LINE}",
    rf"{_VALUED}[ \t]*+(?P<value>{_TEXT}|[^\s\"'{{\[,][^\s,]*+)\s*+,?\s*+[\"']?{_NAMED}",
    # Of two: a header's name and value, the arguments of a function.
    rf"[(\[]\s*+b?[\"']{_NAME}[\"']\s*+,\s*+b?(?P<value>{_TEXT})\s*+[)\]]",
    rf"\bHTTP(?P<name>\w*Auth)\(\s*+(?:{_TEXT}),\s*+(?P<value>{_TEXT})",
    r"<(?P<name>[\w.\-]++)(?:[ \t][^<>\n]*+)?>(?P<value>[^<>]++)</",
    rf"<name>\s*+{_NAME}\s*+</name>\s*+<value>(?P<value>[^<>]++)<",
    rf"\b(?:key|name)=[\"']{_NAME}[\"']\s++value=(?P<value>{_TEXT})",
    # A Dockerfile, csh, fish; a table of variables.
    rf"(?<![\w\-])(?:ENV|setenv|setx|set[ \t]++-[A-Za-z]++)[ \t]++{_NAME}[ \t]++{_LINE}",
    rf"(?m:^)(?=[A-Z0-9]++_){_NAME}(?:\t|  )[ \t]*+{_LINE}",
    rf"(?<![\w.\-]){_NAME}[\"']?[ \t]*+[:=][ \t]*+(?P<mark>\"\"\"|''')(?P<value>(?:(?!(?P=mark)).)++)",
]
_APART_FORMS = [re.compile(form, re.DOTALL) for form in _APART]
_KEY = re.compile(
    r"(?P<indent>[ ]*+)(?P<item>(?:-[ ]++)?)[\"']?(?P<name>[\w.\-]++)[\"']?:[ \t]*+"
    r"(?P<block>[|>][\d+\-]*+)?(?P<more>[ \t]*+(?:#.*)?)$"
)
_ITEM = re.compile(r"[ ]*+-[ ]++(?P<value>[^\s#].*)$")
_FIELD = re.compile(r"[ ]*+[\"']?[\w.\-/]++[\"']?:(?:[ \t]++(?P<value>[^\s#].*))?$")
_HOLDERS = re.compile(r"(?i)(?:\w*_)?(?:secrets|credentials|passwords)|stringData")
_KIND = re.compile(r"(?m)^[\"' \t]*+kind[\"']?:[ \t]*+[\"']?Secret\b")
_KIND_IN_JSON = re.compile(r"[\"']kind[\"']\s*+:\s*+[\"']Secret[\"']")
_DATA_IN_JSON = re.compile(r"[\"'](?:data|stringData)[\"']\s*+:\s*+\{(?P<fields>[^{}]*+)\}")
_FIELD_IN_JSON = re.compile(rf"[\"']\s*+:\s*+(?P<value>{_TEXT})")
_DOCUMENT = re.compile(r"(?m)^---.*$\n?|\Z")


def secrets(text: str) -> Iterator[tuple[int, int]]:
    """Where these secrets begin and end, in no order; some may lie within others."""
    for name, first, last in [*_apart(text), *_below(text)]:
        if (is_secret(name) or _holds(name)) and is_value(name, text[first:last]):
            yield first, last
    yield from _before_the_end(text)


def _apart(text: str) -> Iterator[Span]:
    """The values that stand apart from their names, in the order of the forms."""
    for form in _APART_FORMS:
        for found in form.finditer(text):
            yield found["name"], *found.span("value")


def _below(text: str) -> Iterator[Span]:
    """What YAML has in the lines below a secret name: blocks of text, lists, and the fields of a Secret."""
    begin = 0
    for end in _DOCUMENT.finditer(text):
        document, at = text[begin : end.start()], begin
        begin = end.end()
        of_secret = bool(_KIND.search(document))
        if _KIND_IN_JSON.search(document):
            for data in _DATA_IN_JSON.finditer(document):
                for field in _FIELD_IN_JSON.finditer(data["fields"]):
                    first = at + data.start("fields")
                    yield "secret", first + field.start("value"), first + field.end("value")
        yield from _lines_below(document, at, of_secret)


def _lines_below(document: str, at: int, of_secret: bool) -> Iterator[Span]:
    name, indent, block, holds = "", -1, False, False
    for line in document.splitlines(keepends=True):
        here, at = at, at + len(line)
        bare = line.rstrip()
        if not bare:
            continue
        depth = len(line) - len(line.lstrip(" "))
        item = _ITEM.match(bare)
        if name and (depth > indent or (depth == indent and item and not block)):
            field = _FIELD.match(bare)
            if block:
                yield name, here + depth, here + len(bare)
            elif item and not _FIELD.match(item["value"]):
                yield name, here + item.start("value"), here + item.end("value")
            elif field and field["value"] and holds:
                if field["value"][0] in "|>":
                    name, indent, block = name, depth, True
                else:
                    yield name, here + field.start("value"), here + field.end("value")
            elif not field and not item:
                yield name, here + depth, here + len(bare)
            continue
        name, block = "", False
        key = _KEY.match(bare)
        if not key:
            continue
        holds = bool(_HOLDERS.fullmatch(key["name"])) or (of_secret and key["name"] in ("data", "stringData"))
        if holds or is_secret(key["name"]):
            name, block = key["name"], bool(key["block"])
            indent = depth + len(key["item"])


def _holds(name: str) -> bool:
    """Whether what has this name holds nothing but secrets, by any names."""
    return bool(_HOLDERS.fullmatch(name)) or name == "data"


def _before_the_end(text: str) -> Iterator[tuple[int, int]]:
    """The lines of a private key whose beginning is cut off, as the end of a log has them."""
    done = 0
    for end in re.finditer(r"(?m)^[ \t]*-----END [A-Z ]*PRIVATE KEY", text):
        first = end.start()
        while first > done:
            line = text.rfind("\n", done, first - 1) + 1 or done
            if not re.fullmatch(r"[ \t]*[A-Za-z0-9+/]+={0,2}[ \t]*\r?\n", text[line:first]):
                break
            first = line
        if first < end.start():
            yield first, end.start() - 1
        done = end.end()
