"""How docstrings are read for the API reference."""

import re
import textwrap

import griffe

_EXAMPLE = re.compile(r"^Example:\n((?:[ \t].*(?:\n|\Z)|\n)*)", re.MULTILINE)


def with_code(docstring: str) -> str:
    """Makes `Example:` the section that Griffe knows as `Examples:`, all of it code.

    Griffe takes what begins with `>>>` for code, and everything else for text: that gets a fence.

    Example:
        >>> print(with_code("Adds.\\n\\nExample:\\n    total = add(1, 2)\\n"), end="")
        Adds.
        <BLANKLINE>
        Examples:
            ```python
            total = add(1, 2)
            ```
    """
    return _EXAMPLE.sub(_section, docstring)


def _section(found: re.Match) -> str:
    code = textwrap.dedent(found[1]).strip("\n")
    if not code.startswith(">>>"):
        code = f"```python\n{code}\n```"
    gap = "\n" if found[1].endswith("\n\n") else ""
    return f"Examples:\n{textwrap.indent(code, '    ')}\n{gap}"


class Examples(griffe.Extension):
    """Makes the examples of all docstrings code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = with_code(obj.docstring.value)
