"""`compile(jit_compile="auto")`: times a few blocks of training with and without XLA, and keeps the faster way.

XLA can make a step faster or slower: convolutions take several times as long on CPUs. Every block of a trial trains, so
no work is lost. The two ways differ only by rounding, unless the step draws random numbers, of which XLA draws others.
A step that draws follows Keras's own rule (XLA on one GPU, otherwise not).
"""

import contextlib
import logging
import statistics

import tensorflow as tf

from tfgpu.compat import slots, training
from tfgpu.core import extensions, step_blocks
from tfgpu.errors import InputError

ROUNDS = 3
"""Number of blocks of each way to compare."""
GAIN = 0.95
"""XLA must take less than this fraction of the other way's time, because it compiles again for each new shape."""
_PATIENCE = 12  # blocks to wait until they are long

_log = logging.getLogger(__name__)


def enable_auto_jit() -> None:
    """Makes `compile(jit_compile="auto")` start a trial; the default stays Keras's own rule."""

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
                "jit_compile=True: %r is over several devices. XLA compiles the calls of its layers, forward and "
                "backward, each on its device; not the loss, the metrics, the update, and what devices exchange.",
                model.name,
            )
        may_try = asked == "auto" and not is_prevented and not model.run_eagerly
        slots.of(model).tries_xla = may_try and training.supports_jit(model)


def trial_of(model) -> "Trial | None":
    """A new trial if the model's `compile` asked for one, else None."""
    return Trial() if slots.get(model, "tries_xla", False) else None


class Trial:
    """Times blocks of steps with XLA and without.

    The first blocks run without XLA; once they are long enough to be timed, the two ways alternate.

    Attributes:
        jit: whether XLA compiles the next block.
        is_over: whether the choice is made.
        is_possible: whether the step has been checked.

    Example:
        >>> trial = Trial()
        >>> while not trial.is_over:
        ...     trial.note(trial.jit, steps=10, seconds=0.3 if trial.jit else 0.5)
        >>> trial.jit
        True
    """

    def __init__(self):
        self.jit = self.is_over = self.is_possible = False
        self._blocks, self._began = 0, False
        self._seconds = {False: [], True: []}

    def note(self, jit: bool, steps: int, seconds: float) -> None:
        """Records how long a block took, and chooses the way of the next one.

        Args:
            jit: whether XLA compiled it.
            steps: its number of steps; 0 is ignored.
            seconds: how long it took; on several workers, the mean.
        """
        if self.is_over or not steps:
            return
        self._blocks += 1
        if not self._began:
            self._began = self.jit = (
                seconds >= step_blocks.BLOCK_S / 8 and self._blocks > 1 or self._blocks >= _PATIENCE
            )
            return
        self._seconds[jit].append(seconds / steps)
        with_xla, without = self._seconds[True], self._seconds[False]
        if len(with_xla) > ROUNDS and len(without) >= ROUNDS:
            took = {True: statistics.median(with_xla[1:]), False: statistics.median(without)}  # the first one compiled
            self.decide(
                took[True] < GAIN * took[False], f"{took[True]:.2g} s per step with XLA, {took[False]:.2g} s without"
            )
        else:
            self.jit = len(with_xla) <= len(without) or len(with_xla) == 1

    def check(self, traced, step, spec) -> None:
        """Ends the trial if XLA cannot compile the step, or would change its result.

        Args:
            traced: the concrete function of the loop around the step, without XLA.
            step: the step as a tf.function that XLA compiles; None if XLA compiles parts of it.
            spec: the spec of the step's data.
        """
        self.is_possible, graph = True, traced.graph.as_graph_def()
        nodes = [node.op for node in graph.node] + [node.op for f in graph.library.function for node in f.node_def]
        if any("Random" in op or "Multinomial" in op for op in nodes):
            self.decide(False, "the step draws random numbers, and XLA would draw different ones")
        elif step is not None:
            try:
                step.experimental_get_compiler_ir(tf.nest.map_structure(_example, spec))(stage="hlo")
            except (tf.errors.OpError, TypeError, ValueError) as error:
                self.decide(False, f"it cannot compile the step ({str(error).strip().splitlines()[0][:200]})")

    def decide(self, jit: bool, why: str) -> None:
        """Ends the trial."""
        self.jit, self.is_over = jit, True
        _log.info('jit_compile="auto": %s XLA: %s.', "with" if jit else "without", why)


def _example(spec):
    """Zeros of the spec's shape, with 2 for unknown sizes: XLA compiles for sizes."""
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        return None
    return tf.zeros([2 if size is None else size for size in spec.shape], spec.dtype)
