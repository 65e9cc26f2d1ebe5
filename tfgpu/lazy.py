"""Names of a package that are imported on first use, so that the package itself is quick to import."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def on_first_use(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Makes a package's `__getattr__`, `__dir__` and `__all__` from the stub beside it.

    Type checkers see no names that are made at run time, so the stub has to list them; reading the same list here keeps
    one place for them. What `lazy_loader.attach_stub` does for other packages, with names that are changed
    (`import a as b`) and without their rule that imports are relative.

    Args:
        package: its name.
        file: its `__file__`; the stub is `__init__.pyi` beside it, of lines such as
            `from tfgpu.data.batches import load as load`.

    Example:
        >>> import tfgpu.data
        >>> __getattr__, __dir__, __all__ = on_first_use("tfgpu.data", tfgpu.data.__file__)
        >>> __getattr__("load").__module__
        'tfgpu.data.batches'
    """
    places = _places(Path(file).with_name("__init__.pyi").read_text(encoding="utf-8"))

    def find(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version(package)
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = places[name]
        if module == package:  # one of its own modules
            return importlib.import_module(f"{package}.{attribute}")
        value = getattr(importlib.import_module(module), attribute, None)
        if value is None:  # a module of another package
            value = importlib.import_module(f"{module}.{attribute}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    class Package(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            # Importing the module `a.b` sets `b` in `a`. A public function `b` that lives in `a.b`, or below it, stays.
            home = f"{places.get(name, ('',))[0]}."
            if not (isinstance(value, ModuleType) and home.startswith(f"{value.__name__}.")):
                super().__setattr__(name, value)

        def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
            # cloudpickle, which carries functions to the workers of Ray and Spark, knows plain modules only.
            return importlib.import_module, (package,)

    sys.modules[package].__class__ = Package
    return find, names, sorted(places)


def _places(stub: str) -> dict[str, tuple[str, str]]:
    """Public name -> its module and its name there.

    Example:
        >>> _places("from a.b import c as d")
        {'d': ('a.b', 'c')}
    """
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
