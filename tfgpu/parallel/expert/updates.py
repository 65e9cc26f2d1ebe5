"""The update of experts: each device updates its own, with the gradient of the whole batch.

What comes back to a device from all replicas of its group is the gradient of the group's rows; it is summed over
groups alone.
"""

import contextlib
import functools
from collections.abc import Iterator

import tensorflow as tf

from tfgpu.compat import optimizers
from tfgpu.compat.keras import LossScaleOptimizer, name_scope
from tfgpu.core import collectives, extensions, gradient_weights, gradients
from tfgpu.optim import gradient_accumulation
from tfgpu.parallel import shard_clipping
from tfgpu.parallel.expert.shards import groups_of, is_of_experts
from tfgpu.parallel.zero import update as zero_update


class _ExpertUpdates(gradients.GradientExtension):
    """Sums the gradients of experts over groups, and all others over replicas."""

    def sum(self, update: gradients.Update, parts: list) -> list | None:
        own = [at for at, variable in enumerate(update.variables) if is_of_experts(variable)]
        if not own:
            return None
        if not update.inner.built:
            with name_scope(update.optimizer.name, caller=update.optimizer):
                update.optimizer.build(list(update.variables))
        rest = [None if at in own else part for at, part in enumerate(parts)]
        if update.inner.gradient_accumulation_steps:
            found = gradient_accumulation.reduce_at_update(update, rest)
        else:
            found = collectives.sum_gradients(rest)
        there = [at for at in own if update.gradients[at] is not None]
        # Not the parts, which are weighed by this replica's rows: these are of the rows of all.
        given = [tf.convert_to_tensor(update.gradients[at]) for at in there]
        sums = groups_of(update.variables[own[0]]).sum_over_groups(given)
        for at, total in zip(there, sums, strict=True):
            found[at] = total
        return found

    @contextlib.contextmanager
    def around_update(self, update: gradients.Update, sums: list, named: list | None) -> Iterator[tuple]:
        if not any(map(is_of_experts, update.variables)):
            yield sums, named
            return
        if isinstance(update.optimizer, LossScaleOptimizer):  # so that all replicas skip a step
            sums, _ = zero_update.share_infinities(list(sums))
        scale = gradient_weights.loss_scale_of(update.optimizer)
        with contextlib.ExitStack() as stack:
            for each in optimizers.within(update.inner):
                stack.enter_context(_clipping(each, update.variables, sums, scale))
            yield sums, named


def _clipping(optimizer, variables: list, sums: list, scale) -> contextlib.AbstractContextManager:
    """Clips by the norms of all experts, which the devices of one group have."""
    trained = {id(variable) for variable in optimizers.trained(optimizer)}
    pairs = [
        (gradient, variable)
        for gradient, variable in zip(sums, variables, strict=True)
        if gradient is not None and id(variable) in trained
    ]
    targets = [variable for _, variable in pairs]
    counted = [not is_of_experts(each) or groups_of(each).own == 0 for each in targets]
    return shard_clipping.full_norm_clipping(optimizer, [each for each, _ in pairs], targets, scale, counted)


@functools.cache
def install() -> None:
    """Makes optimizers update experts where they are, in this process from now on."""
    extensions.gradient_extensions.register(_ExpertUpdates(), order=35)
    extensions.xla_obstacles.register(lambda model: any(map(is_of_experts, model.variables)))
