"""Draws by `tf.random` where all replicas compute the same: in an optimizer's update, and in code that sees all rows.

TensorFlow seeds an operation by its place in the graph, so each replica would draw other numbers, and update its
weights by them. Here replicas number these draws. One device draws still others.
"""

import functools
import logging
import random

from tfgpu.compat import distribute, slots
from tfgpu.compat.patch import wrap
from tfgpu.core import step_context
from tfgpu.core.replication import replica_context, spans_processes
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)
_GENERATED = "normal", "uniform", "truncated_normal", "uniform_full_int", "binomial"
_OF_WORKERS = 87_654_321  # in place of `_own_seed`, of which each process has another


def draw_alike() -> None:
    """Seeds the draws of all replicas alike where they compute the same, and refuses generators there."""

    @wrap("random_seed.get_seed")
    def get_seed(stock, op_seed):
        if op_seed is not None or not _is_alike():
            return stock(op_seed)
        context, seed = step_context.current(), distribute.global_seed()
        context.draws_by_tensorflow += 1
        if step_context.gradients_are_summed():
            _tell_of_optimizer()
        if seed is None:
            seed = _OF_WORKERS if spans_processes(replica_context().strategy) else _own_seed()
        return seed, context.draws_by_tensorflow

    for name in _GENERATED:

        @wrap(f"tf.random.Generator.{name}")
        def drawn(stock, self, *args, **kwargs):
            if _is_alike():
                raise InputError(
                    "A `tf.random.Generator` draws different numbers on each replica, but this code must compute the "
                    "same on all of them: it sees the whole batch, or updates weights. Use `keras.random` with a "
                    "`keras.random.SeedGenerator`."
                )
            return stock(self, *args, **kwargs)


@functools.cache
def _own_seed() -> int:
    """The seed of a script that sets none; drawn when the first replica needs it."""
    return random.SystemRandom().randrange(1, 2**31 - 1)


def _is_alike() -> bool:
    """Whether this is a replica of several that computes what the others do."""
    context = replica_context()
    if context is None or context.num_replicas_in_sync == 1 or step_context.current().is_trying:
        return False
    if step_context.has_local_updates():
        return False
    return step_context.gradients_are_summed() or step_context.has_local_forward()


def _tell_of_optimizer() -> None:
    """Says once that an optimizer's numbers are its own."""
    told = slots.of(replica_context().strategy)
    if not getattr(told, "has_told_of_draws", False):
        told.has_told_of_draws = True
        _log.warning(
            "The optimizer draws random numbers with tf.random: all replicas draw the same numbers, but not those of "
            "one device. Use `keras.random` with a `keras.random.SeedGenerator`."
        )
