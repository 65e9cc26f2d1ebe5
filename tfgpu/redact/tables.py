"""Tables, whose secrets stand below their names: CSV, Markdown, what databases and programs print; rows of SQL."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tfgpu.redact import names, randoms
from tfgpu.redact.values import is_value

Span = tuple[int, int]
# The lines of boxes, as Markdown and databases draw them.
_BOXES = {code: "+" for code in range(0x2500, 0x2580)} | {ord(mark): "|" for mark in "│┃║┆┇┊┋"}
_BOXES |= {ord(mark): "-" for mark in "─━═"}
_RULE = re.compile(r"[ \t|+:]*+[-=][ \t|+:=\-]*+$")
_QUOTED = r"[ \t]*+\"(?:[^\"]|\"\")*+\"[ \t\r]*+"
_MARK = {"|": re.compile(r"(?<!\\)\|")} | {
    mark: re.compile(rf"(?:^|(?<={mark})){_QUOTED}(?:(?={mark})|$)|{mark}") for mark in ",;\t"
}
_HEADING = re.compile(r"[A-Za-z_][\w.\-/]*+(?: [\w.\-/()%]++){0,3}+")
_BLANKS = " \t\r\"'`*\ufeff"
_NAMES = re.compile(r"(?i)(?:\w+ )?(?:name|key|variable|setting|option|field|parameter|property|column|header)")
_VALUES = re.compile(r"(?i)(?:\w+ )?(?:values?|contents?)")
# Names that head columns of metrics, data sets and vocabularies too: what is below is a secret if it looks like one.
_TOKEN = re.compile(r"^token(_|$)|_per_token")
_KEYS = re.compile(r"(^|_)keys?$")
_ALWAYS = re.compile(r"(^|_)(api|access|account|auth|encryption|licen[cs]e|master|private|service|shared|ssh)_key$")
_CHOSEN = re.compile(r"passcode|(^|_)(pwd|pw|psw|otp|psk)(_|$)")
_COUNTED = re.compile(r"(^|_)(pass|pin)(_|$)")
_KEY = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[\w+=~\-]{12,}")
_LONGEST_WORD = 20
_UNIT = r"(?:[x×%]|[kKMGT]?i?B?(?:/s)?|[mµun]?s|min|h|W|J|[kMG]?Hz)?"
_NUMBER = re.compile(rf"(?:[-+±~≈<>=]*+ *+\d[\d.,:/_]*+(?:e[-+]?\d+)? *+{_UNIT}(?: ++|$))++")
_VERDICT = re.compile(
    r"(?i)[-–—✓✗✔✘✅❌?.…xynt]{1,3}|yes|no|ok|on|off|n/?a|nan|pass(?:ed)?|fail(?:ed)?|skip(?:ped)?|(?:un)?set|hidden"
    r"|required|optional"
)
_INSERT = re.compile(
    r"(?i)\binsert\s++(?:ignore\s++)?+into\s++[\w.\"`\[\]]++\s*+\((?P<names>[^()]{1,2000}+)\)\s*+values\s*+"
)
# The end may be cut off.
_PIECE = r"'(?:[^'\n]|'')*+'?|\([^()]*+\)"
_ROW = re.compile(rf"\((?P<cells>(?:{_PIECE}|[^()'])*+)(?:\)\s*+,?\s*+|\Z)")
_COMMA = re.compile(rf"{_PIECE}|,")


@dataclass(frozen=True)
class _Table:
    """What is above the rows.

    Args:
        headings: of the columns.
        mark: what stands between cells.
        framed: whether the mark stands around rows too.
    """

    headings: Sequence[str]
    mark: str
    framed: bool = False

    def cells(self, line: str) -> list[Span]:
        marks = [found.start() for found in _MARK[self.mark].finditer(line) if found[0] == self.mark]
        cells = [(first + 1, last) for first, last in pairwise([-1, *marks, len(line)])]
        bare = line.strip()
        return cells[self.framed and bare.startswith("|") : len(cells) - (self.framed and bare.endswith("|"))]

    def secrets(self, line: str, cells: Sequence[Span]) -> Iterator[Span]:
        """The cells of a row that are secrets; one with a mark in it goes on to where the next column begins."""
        more = max(0, len(cells) - len(self.headings))
        texts = [line[first:last].strip(_BLANKS) for first, last in cells]
        for index, name in enumerate(self.headings[: len(cells)]):
            if index and _VALUES.fullmatch(name):
                name = next((texts[at] for at in range(index) if _NAMES.fullmatch(self.headings[at])), name)
            first, last = cells[index][0], cells[index + more][1]
            bare = line[first:last].strip()
            if bare and names.is_secret(name) and _is_secret(names.words(name), bare):
                first += line[first:last].index(bare)
                yield first, first + len(bare)


def secrets(text: str) -> Iterator[Span]:
    """Where the cells that are secrets begin and end, those of tables in order."""
    table, at = None, 0
    for line, below in pairwise([*text.translate(_BOXES).split("\n"), ""]):
        cells = table.cells(line) if table else []
        if table is None or not _goes_on(table, line, below, cells):
            table = _grid(line, below) or _csv(line, below)
        elif not _RULE.match(line):
            for first, last in table.secrets(line, cells):
                yield at + first, at + last
        at += len(line) + 1
    yield from _inserted(text)


def _goes_on(table: _Table, line: str, below: str, cells: Sequence[Span]) -> bool:
    """Whether the line is one of the table's; more cells than columns are another's head, or have marks in them."""
    if table.mark == "|":
        return "|" in line or bool(_RULE.match(line))
    return len(cells) == len(table.headings) or (len(cells) > len(table.headings) and not _csv(line, below))


def _grid(line: str, below: str) -> _Table | None:
    """The table whose head this line is, if a rule is below it; also one without secrets, lest a row be a head."""
    if "|" not in line or not _RULE.match(below) or _RULE.match(line):
        return None
    table = _Table((), "|", line.strip().startswith("|"))
    return _Table([line[first:last].strip(_BLANKS) for first, last in table.cells(line)], "|", table.framed)


def _csv(line: str, below: str) -> _Table | None:
    """The table whose head this line is: names alone, one of them a secret's, above as many cells."""
    for mark in ",;\t":
        headings = [part.strip(_BLANKS) for part in line.split(mark)]
        if len(headings) < 2 or not all(map(_HEADING.fullmatch, headings)):
            continue
        if f"{mark} " in line and any(" " in heading for heading in headings):
            continue  # a sentence
        table = _Table(headings, mark)
        if any(map(_begins, headings)) and len(table.cells(below)) == len(headings):
            return table
    return None


def _begins(heading: str) -> bool:
    return names.is_secret(heading) or bool(_NAMES.fullmatch(heading))


def _is_secret(name: str, cell: str) -> bool:
    """Whether a cell below a secret name is a secret, and not a number, a verdict or a word of a vocabulary."""
    bare = cell.strip(_BLANKS)
    if not bare or not is_value(name, cell) or _VERDICT.fullmatch(bare):
        return False
    if names.SPOKEN.search(name) or _CHOSEN.search(name):
        return True
    number = _NUMBER.fullmatch(bare)
    if _COUNTED.search(name):
        return not number or bare.isdecimal()
    if _TOKEN.search(name):
        return bool(_KEY.fullmatch(bare)) or (len(bare) >= _LONGEST_WORD and " " not in bare)
    if names.WEAK.search(name) or (_KEYS.search(name) and not _ALWAYS.search(name)):
        return bool(_KEY.fullmatch(bare)) and randoms.is_mixed(bare)
    return not number


def _inserted(text: str) -> Iterator[Span]:
    for head in _INSERT.finditer(text):
        table = _Table([name.strip(f"{_BLANKS}\n[]") for name in head["names"].split(",")], ",")
        row = _ROW.match(text, head.end())
        while row:
            commas = [found.start() for found in _COMMA.finditer(row["cells"]) if found[0] == ","]
            cells = [(first + 1, last) for first, last in pairwise([-1, *commas, len(row["cells"])])]
            for first, last in table.secrets(row["cells"], cells):
                yield row.start("cells") + first, row.start("cells") + last
            row = _ROW.match(text, row.end())
