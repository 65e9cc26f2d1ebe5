"""What a shell completes after a flag: names that a value may have. Nothing slow is imported for it.

Where a list of names stands in a module that starts Keras, it is read from the module's text.
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
    """Makes Typer's `autocompletion` of a function that lists names.

    Example:
        >>> completing(lambda: ("adam", "sgd"))("a")
        ['adam']
    """

    def begins(incomplete: str) -> list[str]:
        try:
            return [name for name in names() if name.startswith(incomplete)]
        except (OSError, LookupError, SyntaxError):  # A traceback in the middle of a prompt helps nobody.
            return []

    return begins


def of_setting(name: str) -> Callable[[str], list[str]] | None:
    """What completes a setting of the schema; None where it is no name among others."""
    if choices := recipes.choices(name):
        return completing(lambda: choices)
    return completing(_NAMED[name]) if name in _NAMED else None


def ready_recipes() -> list[str]:
    """The ready recipes, and the YAML files of this folder."""
    return [*ready.names(), *sorted(path.name for ending in ("yaml", "yml") for path in Path().glob(f"*.{ending}"))]


def models() -> list[str]:
    """Our builders and the models of `keras.applications`."""
    (builders,) = (node for node in ast.walk(_value("models/__init__.py", "BUILDERS")) if isinstance(node, ast.Tuple))
    return [name.id for name in builders.elts if isinstance(name, ast.Name)] + _classes_of_keras("applications")


def optimizers() -> list[str]:
    """Keras's optimizers in lower case, tfgpu's, and what recipes call by a name of its own."""
    # The base class and the wrappers, which take no learning rate, are called "optimizer" themselves.
    kinds = [name.lower() for name in _classes_of_keras("optimizers") if "Optimizer" not in name]
    ours = _keys("training/optimizers.py", "OPTIMIZERS") + _keys("recipes/compiling.py", "NAMED")
    return sorted({*kinds, *ours})


def formats() -> list[str]:
    """What `tfgpu export` writes."""
    calls = (node for node in ast.walk(_value("serving/formats.py", "FORMATS")) if isinstance(node, ast.Call))
    return [call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)]


def trackers() -> list[str]:
    """Where `--track` sends a run to."""
    return _keys("callbacks/tracking.py", "_TRACKERS")


_NAMED: dict[str, Names] = {
    "augment": lambda: ("auto", "none", *STAGES),
    "model": models,
    "initializer": lambda: ast.literal_eval(_value("models/parts.py", "INITIALIZERS")),
    "normalization": lambda: ast.literal_eval(_value("models/parts.py", "NORMALIZATIONS")),
    "optimizer": optimizers,
}


def _value(file: str, name: str) -> ast.expr:
    """What a module of tfgpu sets one of its names to."""
    for node in ast.parse((_TFGPU / file).read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.value
    raise LookupError(f"{file} sets no {name}.")


def _keys(file: str, name: str) -> list[str]:
    """The keys of the mapping that a module of tfgpu sets one of its names to."""
    found = next(node for node in ast.walk(_value(file, name)) if isinstance(node, ast.Dict))
    return [key.value for key in found.keys if isinstance(key, ast.Constant)]


def _classes_of_keras(package: str) -> list[str]:
    """What a public package of Keras imports under a name with a capital: to import Keras itself takes seconds."""
    found = importlib.util.find_spec("keras")
    if found is None or found.origin is None:
        return []
    text = Path(found.origin).with_name(package).joinpath("__init__.py").read_text(encoding="utf-8")
    lines = (node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom))
    names = (alias.asname or alias.name for line in lines for alias in line.names)
    return sorted(name for name in names if name[0].isupper())
