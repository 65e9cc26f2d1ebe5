"""`Model.compile`: what core and features check, change or add there, each an item of `extensions.compilations`."""

import contextlib
import inspect

from tfgpu.compat.patch import wrap
from tfgpu.core import extensions
from tfgpu.errors import InputError, is_whole


def let_extensions_act() -> None:
    """Surrounds `Model.compile` with the extensions, the first outermost."""

    @wrap("Trainer.compile")
    def compile_model(stock, self, *args, **kwargs):
        arguments = dict(inspect.signature(stock).bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        with contextlib.ExitStack() as surrounding:
            for around in extensions.compilations:
                surrounding.enter_context(around(self, arguments))
            _accept_auto(arguments)
            stock(self, **arguments)


def _accept_auto(arguments: dict[str, object]) -> None:
    """Lets `compile` accept `steps_per_execution="auto"`."""
    steps = arguments.get("steps_per_execution", 1)
    if steps == "auto":
        arguments["steps_per_execution"] = 1  # what stock Keras can read in a saved model too
    elif not is_whole(steps):
        raise InputError(f'`steps_per_execution` must be a whole number of at least 1, or "auto". Received: {steps!r}.')
