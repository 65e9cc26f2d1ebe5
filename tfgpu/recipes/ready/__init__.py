"""Ready recipes by name: config files that come with the package. Imports no TensorFlow.

    tfgpu train --list
    tfgpu train cifar10 --epochs 100
    tfgpu train imagenet --data shards/ --dry-run

Example:
    >>> from tfgpu.recipes import recipe
    >>> recipe.make(read("cifar10")).model
    'resnet'
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfgpu.errors import InputError, unknown
from tfgpu.recipes import reading

_FOLDER = Path(__file__).parent
_ENDS = (".yaml", ".yml")


def names() -> tuple[str, ...]:
    """Lists the ready recipes.

    Example:
        >>> "digits" in names()
        True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def describe(name: str) -> str:
    """Returns a one-line description of a ready recipe: the first line of its file.

    Example:
        >>> describe("digits")
        'A small CNN on handwritten digits, which come with scikit-learn.'
    """
    return path(name).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def path(name: str) -> Path:
    """Finds the file of a recipe.

    Args:
        name: a ready recipe's name, or the path of a YAML file.

    Raises:
        InputError: there is no ready recipe of this name.

    Example:
        >>> path("digits").name
        'digits.yaml'
    """
    if name in names():
        return _FOLDER / f"{name}.yaml"
    if name.endswith(_ENDS) or Path(name).is_file():
        return Path(name)
    if "/" in name:
        raise InputError(f"No such recipe: {name!r}. Use a YAML file, or one of {', '.join(names())}.")
    raise unknown("recipe", name, [*names(), "FILE.yaml"])


def read(name: str) -> Mapping[str, Any]:
    """Reads a recipe's settings without validating them; `recipe.make` does that.

    Args:
        name: a ready recipe's name, or the path of a YAML file.

    Raises:
        InputError: there is no such recipe, or it is not a YAML file of settings.
    """
    return reading.read(path(name))
