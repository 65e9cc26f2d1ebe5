"""Finding settings of a recipe by trying them: studies of whole trainings, with Optuna.

from tfgpu import tune
result = tune.study("digits", "studies/digits", trials=30, search={"learning_rate": "1e-5..1e-1:log"})
print(result.best.settings, result.best.value)
"""

from tfgpu.lazy import on_first_use

_PLACES = {
    "StudyResult": "tfgpu.tune.results",
    "TrialResult": "tfgpu.tune.results",
    "default_space": "tfgpu.tune.space",
    "parse_search": "tfgpu.tune.space",
    "study": "tfgpu.tune.study",
}
__all__ = sorted(_PLACES)
__getattr__ = on_first_use("tfgpu.tune", _PLACES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
