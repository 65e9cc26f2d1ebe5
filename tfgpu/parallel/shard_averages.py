"""Moving averages (`use_ema`) of weights of which each replica holds a piece: Keras swaps full variables."""

import functools
from collections.abc import Iterator

import numpy as np

from tfgpu.compat import optimizers
from tfgpu.compat.patch import wrap
from tfgpu.core import step_context
from tfgpu.core.state.sharded_variable import ShardedVariable, full_variable, shard_info


@functools.cache
def install() -> None:
    """Makes Keras overwrite and swap full variables with their moving averages, not pieces."""

    @wrap("TFOptimizer.overwrite_model_variables_with_average_value")
    def overwrite(stock, self, trainable_variables):
        if step_context.gradients_are_summed() or not _has_pieces(self):
            return stock(self, trainable_variables)
        for variable, average in _averages(self):
            variable.assign(average.numpy())

    @wrap("SwapEMAWeights.tf_swap_variables")
    def swap(stock, self, optimizer):
        if not _has_pieces(optimizer):
            return stock(self, optimizer)
        for variable, average in _averages(optimizer):
            value = np.array(variable.numpy())
            variable.assign(average.numpy())
            average.assign(value)

    @wrap("SwapEMAWeights.tf_finalize_ema_values")
    def finalize(stock, self, optimizer):
        if not _has_pieces(optimizer):
            return stock(self, optimizer)
        for variable, average in _averages(optimizer):
            average.assign(variable.numpy())


def _has_pieces(optimizer) -> bool:
    return any(map(_is_piece, optimizers.trained(optimizer)))


def _is_piece(variable) -> bool:
    info = shard_info(variable)
    return info is not None and info.sharding.over_replicas


def _averages(optimizer) -> Iterator[tuple]:
    """Each full variable with its full average."""
    for target, average in zip(optimizers.trained(optimizer), optimizers.averages(optimizer), strict=True):
        full = full_variable(target)
        yield tuple(ShardedVariable([each]) if _is_piece(each) else each for each in (full, average))
