"""Names of a package that are imported on first use, so that the package itself is quick to import."""

import importlib
import sys
from collections.abc import Callable


def on_first_use(package: str, places: dict[str, str]) -> Callable[[str], object]:
    """Makes a package's `__getattr__`.

    Args:
        package: its name.
        places: public names, each with the module that holds it.

    Example:
        >>> __getattr__ = on_first_use("tfgpu.data", {"pipeline": "tfgpu.data.batches"})
        >>> __getattr__("pipeline").__module__
        'tfgpu.data.batches'
    """

    def find(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(places[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
