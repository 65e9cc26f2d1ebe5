"""`Model.compile`: what core and features check, change or add there, each an item of `extensions.compilations`."""

import contextlib
import inspect

from tfgpu.compat.patch import wrap
from tfgpu.core import extensions


def let_extensions_act() -> None:
    """Surrounds `Model.compile` with the extensions, the first outermost."""

    @wrap("Trainer.compile")
    def compile_model(stock, self, *args, **kwargs):
        arguments = dict(inspect.signature(stock).bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        with contextlib.ExitStack() as surrounding:
            for around in extensions.compilations:
                surrounding.enter_context(around(self, arguments))
            stock(self, **arguments)
