"""The learning-rate range test of a recipe: its model on its data, built as a run builds them."""

from tfgpu.errors import InputError
from tfgpu.recipes import building, runner
from tfgpu.recipes.recipe import Recipe
from tfgpu.tune.range_test import RangeTest, learning_rate


def of_recipe(what: Recipe, *, lowest: float = 1e-6, highest: float = 1.0, steps: int = 200) -> RangeTest:
    """Builds a recipe's model and data, and sweeps the learning rate.

    Args:
        what: the recipe.
        lowest, highest, steps: as `learning_rate` takes them.

    Raises:
        InputError: something in the recipe or the numbers cannot work, or the process is one of a cluster.
    """
    cluster = runner.check(what, None, resume=False, overwrite=False)
    if cluster.is_multi_worker:
        raise InputError("A range test of a recipe takes one process. Received: a cluster. Unset TF_CONFIG.")
    with building.prepare(what):
        job = building.build(what, cluster)
        return learning_rate(job.model, job.data, lowest=lowest, highest=highest, steps=steps)
