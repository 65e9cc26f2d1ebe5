"""Private names of Keras and TensorFlow appear only in `compat/`: read from the syntax tree.

What it cannot see: a name that code puts together, or one that the file also gives to something of its own; a text
that no source here has (of KerasHub where it is not installed, unless `compat/keras_hub` has it).
"""

import ast
import bisect
import gc
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "tfgpu"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "compat")
MODULES = ("keras.src", "tensorflow.python", "tensorflow.compiler", "tensorflow.core")
PATHS = re.compile(r"keras/src\b|tensorflow/python\b")
# Underscored, and not of Keras or TensorFlow: Python's own, and Spark's gateway to the Java virtual machine.
OTHERS = {
    "_asdict",
    "_current_frames",
    "_exit",
    "_fields",
    "_getframe",
    "_jsc",
    "_make",
    "_replace",
    "_run_exitfuncs",
    "_shutdown",
}
# Protocol buffers that TensorFlow writes to disk or hands out; their modules are TensorFlow's published format.
FORMATS = {"tensorflow.core.framework", "tensorflow.core.protobuf", "tensorflow.core.util", "tensorflow.core.profiler"}


# Texts that are private names in the libraries by chance: of events in a trace, of operations, Python's, and a key of
# Hugging Face's config.json.
CHANCE = {"_c", "_p", "_r", "_EagerConst", "_HostRecv", "_HostSend", "_Recv", "_Send", "_abc_impl", "_name_or_path"}

# Functions that take an attribute's, or a module's, name as a text.
BY_TEXT = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "import_module", "__import__"}

WORD = re.compile(r"(?<![\w.])_[A-Za-z]\w*")

NAMING = (
    ast.FunctionDef
    | ast.AsyncFunctionDef
    | ast.ClassDef
    | ast.Name
    | ast.Attribute
    | ast.Call
    | ast.Import
    | ast.ImportFrom
)
NAMELESS = ast.Constant | ast.expr_context | ast.operator | ast.cmpop | ast.boolop | ast.unaryop


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(nodes: list[tuple[ast.AST, bool]]) -> set[str]:
    """The underscored names that a file defines: functions, classes, variables, attributes of `self` and fields."""
    found = set()
    for node, in_class in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif in_class and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def walked(tree: ast.Module) -> list[tuple[ast.AST, bool]]:
    """The nodes that can hold a name, each with whether it stands in a class."""
    found, left = [], [(tree, False)]
    while left:
        node, in_class = left.pop()
        if isinstance(node, NAMING):
            found.append((node, in_class))
        in_class = in_class or isinstance(node, ast.ClassDef)
        left += [(child, in_class) for child in ast.iter_child_nodes(node) if not isinstance(child, NAMELESS)]
    return found


@cache
def parsed(path: Path) -> tuple[list[tuple[ast.AST, bool]], frozenset[str]]:
    nodes = walked(ast.parse(path.read_text(encoding="utf-8")))
    return nodes, frozenset(defined(nodes))


@cache
def defined_anywhere() -> frozenset[str]:
    return frozenset().union(*(parsed(path)[1] for path in sorted(PACKAGE.rglob("*.py"))))


@cache
def foreign() -> list[str]:
    """The underscored names that the libraries define or use, and KerasHub's that `compat/keras_hub` has as texts."""
    roots = [(Path(importlib.util.find_spec(name).origin).parent) for name in ("keras", "tensorflow")]
    folders = [roots[0] / "src", roots[1] / "python", PACKAGE / "compat" / "keras_hub"]
    hub = importlib.util.find_spec("keras_hub")
    folders += [Path(hub.origin).parent / "src"] if hub is not None else []
    name, found = re.compile(rb"""[."' ](_[A-Za-z]\w*)"""), set()
    for path in (each for folder in folders for each in folder.rglob("*.py")):
        if not path.name.startswith("gen_"):  # of TensorFlow's operations
            found.update(name.findall(path.read_bytes()))
    return sorted(each.decode() for each in found)


def is_foreign(name: str, *, is_start: bool = True) -> bool:
    """Whether a library has the name, or one that begins with it."""
    names = foreign()
    at = bisect.bisect_left(names, name)
    return at < len(names) and (names[at].startswith(name) if is_start else names[at] == name)


def texts(tree: ast.Module) -> list[tuple[int, str, bool]]:
    """Names as texts, keywords or patterns: the line, the name, and whether only what begins with it is meant.

    Parts of a formatted text and ends (of `name.endswith`) are no names.
    """
    found, left = [], [(tree, False)]
    while left:
        node, is_start = left.pop()
        called = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.JoinedStr) or called in ("endswith", "removesuffix"):
            continue
        if called == "split" and isinstance(node.func.value, ast.Constant):
            found += [(node.lineno, name, False) for name in str(node.func.value.value).split()]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value, is_start or node.value.endswith("_")))
        elif isinstance(node, ast.keyword) and node.arg:
            found.append((node.value.lineno, node.arg, False))
        elif isinstance(node, ast.MatchClass):
            found += [(node.lineno, name, False) for name in node.kwd_attrs]
        left += [(child, is_start or called == "startswith") for child in ast.iter_child_nodes(node)]
    return [(line, name, is_start) for line, name, is_start in found if is_private(name) and name.isidentifier()]


def private_texts(path: Path) -> list[tuple[int, str]]:
    source, own = path.read_text(encoding="utf-8"), parsed(path)[1]
    words = {name for name in set(WORD.findall(source)) - own if is_private(name) and is_foreign(name)} - CHANCE
    found = texts(ast.parse(source)) if words else []
    return [(line, name) for line, name, is_start in found if name in words and is_foreign(name, is_start=is_start)]


def root_of(node: ast.expr) -> str | None:
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def texts_of(node: ast.Call) -> list[str]:
    """The names that a call of `getattr` or `import_module` gets as a text, or what such a text begins with."""
    function = node.func
    called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    found = [part.values[0] if isinstance(part, ast.JoinedStr) and part.values else part for part in node.args]
    texts = [part.value for part in found if isinstance(part, ast.Constant)]
    return [text for text in texts if isinstance(text, str)] if called in BY_TEXT else []


def private_modules(path: Path) -> list[tuple[int, str]]:
    found = []
    for node, _ in parsed(path)[0]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            names = [text for text in texts_of(node) if text.startswith(MODULES)]
        elif isinstance(node, ast.Attribute) and root_of(node) in ("keras", "tensorflow", "tf"):
            names = [ast.unparse(node).replace("tf.python", "tensorflow.python")]
        else:
            continue
        for name in names:
            if name.startswith(MODULES) and not any(name.startswith(each) for each in FORMATS):
                found.append((node.lineno, name))
    lines = path.read_text(encoding="utf-8").splitlines()
    return found + [(at, part) for at, line in enumerate(lines, start=1) for part in PATHS.findall(line)]


def private_attributes(path: Path) -> list[tuple[int, str]]:
    nodes, own = parsed(path)
    found = []
    for node, in_class in nodes:
        if isinstance(node, ast.Call):
            named = [text for text in texts_of(node) if is_private(text)]
            foreign = [text for text in named if text == "_" or not any(each.startswith(text) for each in own)]
            found += [(node.lineno, f"{text!r} in {ast.unparse(node)}") for text in foreign]
        if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr in OTHERS:
            continue
        if of_self(node) and in_class:
            known = own | defined_anywhere()  # by the class, or by one of ours that it derives from
        else:
            known = own
        if node.attr not in known:
            found.append((node.lineno, ast.unparse(node)))
    return found


@pytest.fixture
def without_collection():
    """Looking for garbage takes as long as parsing: trees have none."""
    gc.disable()
    yield
    gc.enable()


def test_no_private_name_stands_outside_compat(without_collection):
    lines = []
    for path in FILES:
        place = path.relative_to(PACKAGE).as_posix()
        as_texts = [(line, repr(name)) for line, name in private_texts(path)]
        found = sorted({*private_modules(path), *private_attributes(path), *as_texts})
        lines += [f"tfgpu/{place}:{line}: {name}" for line, name in found]
    parsed.cache_clear()  # some 60 MB
    assert not lines, "add an accessor or a table to tfgpu/compat for:\n" + "\n".join(lines)


def test_a_private_name_is_found_as_a_text(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "NAME = '_trainable_variables'\nNAMES = '_losses plain _not_there_at_all'.split()\n_mine = 1\n\n\n"
        "def f(v, name):\n"
        "    vars(v)['_tracker'], g(v, '_mine'), f'{name}_layers', name.endswith('_metrics'), h(_kernel=1)\n"
        "    return name.startswith(('_self_', '_compile_c', '_not_th')), {'_query_dense': 1}, 'a text with _value'\n"
        "\n\ndef g(v):\n"
        "    match v:\n        case keras.Variable(_value=x):\n            return x\n"
    )
    assert [name for _, name in sorted(private_texts(path))] == [
        "_trainable_variables", "_losses", "_kernel", "_tracker", "_compile_c", "_query_dense", "_self_", "_value",
    ]  # fmt: skip


def test_a_private_name_is_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "from keras.src import backend\nimport keras\n\n\ndef f(self, v):\n    self._x = 1\n    return v._value\n\n\n"
        "class Own:\n    def __init__(self):\n        self._mine = 1\n\n    def g(self, other):\n"
        "        return self._mine, other._mine, keras.src.tree, self._not_there_at_all\n\n"
        "    def h(self, other, name):\n"
        "        getattr(other, 'public'), getattr(self, '_mine'), getattr(other, f'_{name}')\n"
        "        return getattr(other, '_by_text', None), importlib.import_module('keras.src.backend')\n"
        "\n\ndef is_keras(file):\n    return '/keras/src/' in file\n"
    )
    modules = {name for _, name in private_modules(path)}
    assert modules == {"keras.src.backend", "keras.src.tree", "keras.src", "keras/src"}
    assert {name for _, name in private_attributes(path)} == {
        "self._x",
        "v._value",
        "self._not_there_at_all",
        "'_' in getattr(other, f'_{name}')",
        "'_by_text' in getattr(other, '_by_text', None)",
    }
