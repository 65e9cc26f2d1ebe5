"""Functions that are named as `module:function`: a model's builder, a data source."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator

from tfgpu.errors import InputError, unknown


@contextlib.contextmanager
def importing_from_here() -> Iterator[None]:
    """Makes the current directory importable, which `python script.py` does and an installed command does not."""
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)


def function(name: str, whose: str) -> Callable:
    """Imports a function, also from the current directory.

    Args:
        name: `module:function`.
        whose: what it is for, to begin messages with: "Model" or "The data source".

    Raises:
        InputError: there is no such module or function.

    Example:
        >>> function("math:sqrt", "Model")(4)
        2.0
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise InputError(f"{whose} must be named module:function. Received: {name!r}.")
    try:
        with importing_from_here():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise InputError(
                f"{whose} {name!r}: no module {module_name!r} in {os.getcwd()} or among the installed packages. "
                "Correct the name, or run from its directory."
            ) from error
        raise InputError(f"{whose} {name!r}: {module_name} needs {error.name!r}, which is not installed.") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"{whose} {name!r}: {module_name!r} is not a module name ({error}).") from error
    except SystemExit as error:  # otherwise the run would end here, with the module's exit code
        raise InputError(
            f"{whose} {name!r}: {module_name} called sys.exit({error}) on import. Move its script code under "
            '`if __name__ == "__main__":`.'
        ) from error
    found = getattr(module, function_name, None)
    if found is None:
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise unknown(f"function of module {module_name}", function_name, names)
    if not callable(found):
        raise InputError(f"{whose} {name!r} must name a function. Received: a {type(found).__name__}.")
    return found
