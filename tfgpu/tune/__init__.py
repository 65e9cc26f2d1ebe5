"""Searches settings of a recipe by complete trainings, with Optuna.

Example:
    from tfgpu import tune
    result = tune.study("digits", "studies/digits", trials=30, search={"learning_rate": "1e-5..1e-1:log"})
    print(result.best.settings, result.best.value)
"""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
