"""Long strings that look random: keys that have no name."""

import itertools
import re
from collections.abc import Callable, Iterator

Span = tuple[int, int]

# The second form is that of AWS's secret keys, whose 40 characters may have a `/` among them.
_RANDOM = re.compile(
    r"(?<![\w+\-])(?!_Z)[A-Za-z0-9+_\-]{36,}={0,2}(?![\w+\-])|(?<![\w+/.\-])[A-Za-z0-9+][A-Za-z0-9+/]{39}(?![\w+/.=\-])"
)
# Keys of 32 to 64 hexadecimal digits, unless what stands before calls them a sum or a commit.
_HEX = re.compile(r"(?<![\w+\-])(?:[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64})(?![\w+\-])")
_SUM = re.compile(
    r"(?i)(?:(?<![A-Za-z])(?:commits?|git|detached at|index|sha-?\d*"
    r"|(?:sha\d*|md5|b2)sums?|md5|digest|hash|checksum|sum|revision|rev|tree|parent|merge|blob|head|build"
    r"|fingerprint|etag|object|tag|ref|image|layer|container)\b[\"']?|[@#]|[0-9a-f]{7}\.\.\.?)[ \t]*[:=]?[ \t]*[\"'(]?$"
)
_SUM_AFTER = re.compile(r"[ \t]+(?:refs/|HEAD\b|\((?:HEAD|tag:|origin))|\.\.")
# Words and numbers of a name such as `MultiHeadAttention_2_1_QueryDense`; of random characters each is one or two long.
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_PART_LENGTH = 3.2
_UUID = re.compile(r"([A-Za-z]+-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# What git prints in the lines below its own command, with nothing in that line that may print something else.
_LOG = r"(?:log|rev-list)\b[^\n;&|<>`$]*+\n(?P<many>(?:[0-9a-f]{40}\b[^\n]*+(?:\n|\Z))++)"
_ONE = r"(?:rev-parse|merge-base|write-tree|hash-object|commit-tree)\b[^\n;&|<>`$]*+\n(?P<one>[0-9a-f]{40}\b)"
_GIT = re.compile(rf"(?m)^(?:[^\n]{{0,100}}?[$#>%+!][ \t]*+)?git[ \t]++(?:-[^\n]{{1,60}}?[ \t]++)?(?:{_LOG}|{_ONE})")


def mixed(text: str) -> Iterator[Span]:
    """Where long strings of mixed letters and digits stand, which no word of a language is."""
    tests: tuple[Callable[[str], bool], ...] = (str.isupper, str.islower, str.isdecimal)
    for found in _RANDOM.finditer(text):
        if re.search(r"[_\-]", found[0]) and not is_mixed(found[0]):
            continue
        if not _UUID.fullmatch(found[0]) and all(any(test(character) for character in found[0]) for test in tests):
            yield found.span()


def is_mixed(text: str) -> bool:
    """Whether letters and digits follow each other as no words and numbers do; those of a UUID have a form."""
    parts = _PART.findall(text)
    return not _UUID.fullmatch(text) and sum(map(len, parts)) < _PART_LENGTH * len(parts)


def hexadecimal(text: str) -> Iterator[Span]:
    """Where keys of hexadecimal digits stand that nothing around them calls a commit or a checksum."""
    commits = {at for found in _GIT.finditer(text) for at in _lines(text, *found.span(found.lastgroup))}
    for found in _HEX.finditer(text):
        plain = found[0].isdecimal() or found[0].isalpha()
        named = _SUM.search(text, max(0, found.start() - 24), found.start()) or _SUM_AFTER.match(text, found.end())
        if not plain and not named and found.start() not in commits:
            yield found.span()


def _lines(text: str, first: int, last: int) -> Iterator[int]:
    """Where the lines between the two places begin."""
    lengths = map(len, text[first:last].splitlines(keepends=True)[:-1])
    return itertools.accumulate(lengths, initial=first)
