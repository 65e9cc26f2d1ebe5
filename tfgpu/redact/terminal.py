"""What a text does to the terminal that shows it."""

import re

_COLOUR = re.compile(r"\x1b\[[\d;]*+m")


def printable(text: str) -> str:
    """The text with a replacement for each character that would steer a terminal or turn the writing round.

    Example:
        >>> printable("red \x1b[31mname")
        'red \ufffd[31mname'
    """
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def without_colours(text: str) -> str:
    return _COLOUR.sub("", text)
