"""The size of the house: files in a room, lines in a file, lines in a function."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tfgpu"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_FILES, MOST_LINES, MOST_FUNCTION_LINES = 25, 400, 50


def long_functions(source: str) -> Iterator[str]:
    """The functions with more lines than a screen holds, without their decorators and docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            has_docstring = ast.get_docstring(node) is not None
            lines = node.end_lineno - node.lineno + 1
            lines -= first.end_lineno - first.lineno + 1 if has_docstring else 0
            if lines > MOST_FUNCTION_LINES:
                yield f"{node.name} ({lines} lines)"


@pytest.mark.parametrize(("lines", "found"), [(50, []), (51, ["f (51 lines)"])])
def test_a_long_function_is_found_without_its_docstring(lines, found):
    body = ['    """One.', "", '    Two."""', *["    x = 1"] * (lines - 1)]
    assert list(long_functions("\n".join(["def f():", *body]))) == found


def test_a_file_has_one_idea():
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in FILES}
    long = [f"{name} ({lines} lines)" for name, text in sources.items() if (lines := text.count("\n")) > MOST_LINES]
    long += [f"{name}: {function}" for name, text in sources.items() for function in long_functions(text)]
    assert not long, f"split {', '.join(long)}"


def test_a_room_has_few_files():
    counts = Counter(path.parent.relative_to(PACKAGE) for path in FILES)
    assert not {str(room): count for room, count in counts.items() if count > MOST_FILES}


def test_files_are_renamed_and_flushed_in_one_module():
    """Every write is then whole after a crash, or not there: see `tfgpu.atomic`."""
    forbidden = {f"os.{name}" for name in ("fsync", "fdatasync", "link", "rename", "renames", "replace")}
    for path in FILES:
        if path.name != "atomic.py":
            nodes = ast.walk(ast.parse(path.read_text()))
            used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
            assert not used & forbidden, path
