"""What MkDocs adds: the README as the start, the root's other pages, the notebooks, a reference of all public names and
of a recipe's settings."""

import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

import tfgpu

sys.path.insert(0, str(Path(__file__).parent))
import commands  # noqa: E402
import recipe_settings  # noqa: E402

import notebooks  # noqa: E402  the one beside this file

TOP = {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")} | {"README.md": "index.md"}
"""Pages that lie outside of docs/, and where they are in the site."""
# Modules within modules that users import by name.
INNER = ("training.incremental", "training.schedules")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made from something else."""
    for name, place in TOP.items():
        text = (notebooks.ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text.replace("](docs/", "](")))
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    if (not_run := notebooks.missing()) and not os.environ.get("TFGPU_DOCS_WITHOUT_OUTPUT"):
        names = ", ".join(path.name for path in not_run)
        raise SystemExit(f"These notebooks have not run: {names}. Run `python docs/site/notebooks.py` first.")
    for path in notebooks.NOTEBOOKS:
        text, pictures = notebooks.page(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to a notebook lead to its page."""
    # In the repository notebooks/ lies beside docs/, in the site within it: one step up less.
    return re.sub(r"\]\((?:\.\./)?((?:\.\./)*)notebooks/(\w+)\.ipynb\)", r"](\1notebooks/\2.md)", markdown)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Fails where a page is in no menu: nobody would find it."""
    missing = [file.src_uri for file in files.documentation_pages() if file.page not in nav.pages]
    if missing:
        raise SystemExit(f"mkdocs.yml's `nav` does not name these pages: {', '.join(missing)}. Add them.")
    return nav


def pages() -> dict[str, str]:
    """The reference's pages, as Markdown by name; `tfgpu` first.

    Example:
        >>> sorted(pages())[:2]
        ['asynchronous', 'callbacks']
    """
    found, own = {}, []
    for name in tfgpu.__all__:
        value = getattr(tfgpu, name)
        if inspect.ismodule(value):
            found[name] = _module(value)
        else:
            own.append(f"`tfgpu.{name}`: [`{_place(value)}`][{_place(value)}]\n")
    for name in INNER:
        found[name] = _module(importlib.import_module(f"tfgpu.{name}"))
    found["recipe-settings"] = recipe_settings.page()
    found["command-line"] = commands.page()
    return {"tfgpu": "\n".join(["# tfgpu", "", *own]), **found}


def _module(module: ModuleType) -> str:
    top = {"members": False, "show_root_heading": False, "show_root_toc_entry": False}
    lines = [f"# {module.__name__}", "", f"::: {module.__name__}", "    options:"]
    lines += [f"      {option}: {str(value).lower()}" for option, value in top.items()]
    lines.append("")
    for name in _public(module):
        lines.append(_entry(f"{module.__name__}.{name}", getattr(module, name)))
    return "\n".join(lines)


def _public(module: ModuleType) -> list[str]:
    """The names in `__all__`; without one, those that the module defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    )


def _entry(name: str, value: object) -> str:
    """What mkdocstrings turns into a docstring: the place where the name is defined, under its public name."""
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return f"## `{name}`\n\nA constant, `{type(value).__name__}`.\n"
    return f"::: {_place(value)}\n    options:\n      heading: {name}\n      toc_label: {name.rpartition('.')[2]}\n"


def _place(value: object) -> str:
    return f"{value.__module__}.{value.__qualname__}"
