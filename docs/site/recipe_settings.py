"""The reference of a recipe's settings, from the schema."""

from tfgpu.recipes.recipe import Recipe, choices

HEAD = """# Recipe settings

Write a setting as a line of a [recipe](../guides/recipes.md) (`global_batch: 64`) or as a flag (`--batch 64`).
"""


def page() -> str:
    """One section per panel of `tfgpu train --help-all`, one row per setting.

    Example:
        >>> page().startswith("# Recipe settings")
        True
    """
    panels: dict[str, list[str]] = {}
    for name, field in Recipe.model_fields.items():
        names = ", ".join(f"`{choice}`" for choice in choices(name))
        text = " ".join(field.description.split()) + (f" One of {names}." if names else "")
        row = f"| `{name}` | {_default(field.default)} | {text.replace('|', chr(92) + '|')} |"
        panels.setdefault(field.json_schema_extra["panel"], []).append(row)
    head = "| setting | default | what it does |\n|---|---|---|\n"
    return "\n".join([HEAD, *(f"## {panel}\n\n{head}" + "\n".join(rows) + "\n" for panel, rows in panels.items())])


def _default(value: object) -> str:
    if value is None or value in ({}, ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{', '.join(value)}`" if isinstance(value, tuple) else f"`{value}`"
