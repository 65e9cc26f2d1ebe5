"""The learning rate range test of a recipe."""

from tfgpu.recipes import building, runner
from tfgpu.recipes.recipe import Recipe
from tfgpu.tune.range_test import RangeTest, learning_rate


def of_recipe(what: Recipe, *, lowest: float = 1e-6, highest: float = 1.0, steps: int = 200) -> RangeTest:
    """Builds a recipe's model and data, and runs the range test.

    Args:
        what: the recipe.
        lowest, highest, steps: see `learning_rate`.

    Raises:
        InputError: the recipe or an argument is invalid, or the process belongs to a cluster.
    """
    cluster = runner.check_alone(what, "The range test runs")
    with building.prepare(what):
        job = building.build(what, cluster)
        return learning_rate(job.model, job.data, lowest=lowest, highest=highest, steps=steps)
