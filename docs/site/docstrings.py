"""How docstrings are read for the API reference."""

import re

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Examples(griffe.Extension):
    """Makes `Example:` the section that Griffe knows as `Examples:`, so that what begins with `>>>` is code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub("Examples:", obj.docstring.value)
