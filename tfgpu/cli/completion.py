"""Shell completion of option values, without slow imports.

Names defined in a module that imports Keras are read from the module's source.
"""

import ast
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

from tfgpu.data.augmentation.stages import STAGES
from tfgpu.recipes import ready
from tfgpu.recipes import recipe as recipes

Names = Callable[[], Iterable[str]]
_TFGPU = Path(__file__).parents[1]


def completing(names: Names) -> Callable[[str], list[str]]:
    """Makes an `autocompletion` for Typer from a function that lists names.

    Example:
        >>> completing(lambda: ("adam", "sgd"))("a")
        ['adam']
    """

    def begins(incomplete: str) -> list[str]:
        try:
            return [name for name in names() if name.startswith(incomplete)]
        except (OSError, LookupError, SyntaxError):  # Never print a traceback into a prompt.
            return []

    return begins


def of_setting(name: str) -> Callable[[str], list[str]] | None:
    """The completion of a setting of the schema; None if its values are not names."""
    if choices := recipes.choices(name):
        return completing(lambda: choices)
    return completing(_NAMED[name]) if name in _NAMED else None


def ready_recipes() -> list[str]:
    """The ready recipes, and the YAML files of the working directory."""
    return [*ready.names(), *sorted(path.name for ending in ("yaml", "yml") for path in Path().glob(f"*.{ending}"))]


def models() -> list[str]:
    """tfgpu's builders and the models of `keras.applications`."""
    (builders,) = (node for node in ast.walk(_value("models/__init__.py", "BUILDERS")) if isinstance(node, ast.Tuple))
    return [name.id for name in builders.elts if isinstance(name, ast.Name)] + _classes_of_keras("applications")


def optimizers() -> list[str]:
    """Keras's optimizers in lower case, tfgpu's, and the names that only recipes define."""
    # The base class and the wrappers, which take no learning rate, have "Optimizer" in their names.
    kinds = [name.lower() for name in _classes_of_keras("optimizers") if "Optimizer" not in name]
    ours = _keys("training/optimizers.py", "OPTIMIZERS") + _keys("recipes/compiling.py", "NAMED")
    return sorted({*kinds, *ours})


def formats() -> list[str]:
    """The formats of `tfgpu export`."""
    calls = (node for node in ast.walk(_value("serving/formats.py", "FORMATS")) if isinstance(node, ast.Call))
    return [call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)]


def trackers() -> list[str]:
    """The trackers of `--track`."""
    return _keys("callbacks/tracking.py", "_TRACKERS")


_NAMED: dict[str, Names] = {
    "augment": lambda: ("auto", "none", *STAGES),
    "model": models,
    "initializer": lambda: ast.literal_eval(_value("models/parts.py", "INITIALIZERS")),
    "normalization": lambda: ast.literal_eval(_value("models/parts.py", "NORMALIZATIONS")),
    "optimizer": optimizers,
}


def _value(file: str, name: str) -> ast.expr:
    """The expression that a module of tfgpu assigns to a name."""
    for node in ast.parse((_TFGPU / file).read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.value
    raise LookupError(f"{file} does not assign {name}.")


def _keys(file: str, name: str) -> list[str]:
    """The keys of the dict that a module of tfgpu assigns to a name."""
    found = next(node for node in ast.walk(_value(file, name)) if isinstance(node, ast.Dict))
    return [key.value for key in found.keys if isinstance(key, ast.Constant)]


def _classes_of_keras(package: str) -> list[str]:
    """The classes that a public package of Keras exports, read from its source: importing Keras takes seconds."""
    found = importlib.util.find_spec("keras")
    if found is None or found.origin is None:
        return []
    text = Path(found.origin).with_name(package).joinpath("__init__.py").read_text(encoding="utf-8")
    lines = (node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom))
    names = (alias.asname or alias.name for line in lines for alias in line.names)
    return sorted(name for name in names if name[0].isupper())
