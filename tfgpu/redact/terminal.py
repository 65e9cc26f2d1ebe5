"""Characters that change how a terminal shows a text."""


def printable(text: str) -> str:
    """Replaces every character that would control a terminal or reverse the direction of writing.

    Example:
        >>> printable("red \x1b[31mname")
        'red \ufffd[31mname'
    """
    return "".join(each if each.isprintable() else "\ufffd" for each in text)
