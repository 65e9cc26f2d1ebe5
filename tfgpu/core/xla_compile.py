"""`compile(jit_compile=...)` for models whose step XLA cannot compile as a whole."""

import contextlib
import logging

from tfgpu.compat import slots
from tfgpu.core import extensions
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)


def compile_only_what_xla_can() -> None:
    """Makes `compile(jit_compile=True)` of a model over several devices compile the calls of its layers."""

    @extensions.compilations.register
    @contextlib.contextmanager
    def around_compile(model, arguments):
        asked = arguments.get("jit_compile")
        if asked not in (None, False, True, "auto"):
            raise InputError(f'`jit_compile` must be True, False or "auto". Received: {asked!r}.')
        is_prevented = any(prevents(model) for prevents in extensions.xla_obstacles)
        by_calls = is_prevented and asked is True
        if by_calls and not any(compiles(model) for compiles in extensions.xla_by_calls):
            raise InputError(
                "XLA can compile neither this model's step nor the calls of its layers, which several devices compute "
                "together (`sequence`). Compile with jit_compile=False."
            )
        yield
        slots.of(model).xla_by_calls = by_calls
        if is_prevented:
            model.jit_compile = False
        if by_calls:
            _log.info(
                "jit_compile=True: %r runs on several devices. XLA compiles the calls of its layers, forward and "
                "backward, each on its device, but not the loss, the metrics, the update or the communication.",
                model.name,
            )
