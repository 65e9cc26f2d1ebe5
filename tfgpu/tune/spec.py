"""The definition of a study in `study.yaml`, which a resumed study must match; and the lock of its folder."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tfgpu import atomic
from tfgpu.errors import InputError
from tfgpu.recipes import ready
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.directory import lock
from tfgpu.recipes.reading import read, refuse_code, refuse_code_searched
from tfgpu.recipes.recipe import Recipe
from tfgpu.tune import space
from tfgpu.tune.space import Space

FILE = "study.yaml"
_DEFAULTS = {"sampler": "tpe", "pruner": "median", "monitor": "val_error", "seed": 0}


@dataclass(frozen=True)
class StudySpec:
    """The definition of a study.

    Attributes:
        folder: its folder.
        recipe: the recipe that its trials modify.
        space: the search space.
        sampler, pruner, monitor, seed: see `study`.
    """

    folder: Path
    recipe: Recipe
    space: Space
    sampler: str = "tpe"
    pruner: str = "median"
    monitor: str = "val_error"
    seed: int = 0

    @property
    def has_own(self) -> bool:
        """Whether the search space contains the recipe's own settings, which are then the first trial."""
        return all(space.value_of(self.recipe, name) in domain for name, domain in self.space.items())

    def as_plain(self) -> dict[str, Any]:
        """Returns the content of `study.yaml`."""
        return {
            "search": {name: space.as_plain(domain) for name, domain in self.space.items()},
            **{name: getattr(self, name) for name in _DEFAULTS},
            "recipe": self.recipe.model_dump(mode="json"),
        }


def recipe_of(given: Recipe | str | Path | None, allow_code: bool) -> Recipe | None:
    """Returns a recipe given as a `Recipe`, a file, or the name of a ready recipe; None stays None.

    Raises:
        InputError: it does not exist, is invalid, or names code to call.
    """
    if given is None or isinstance(given, Recipe):
        return given
    settings = ready.read(str(given))
    refuse_code(settings, str(given), allow=allow_code)
    return recipes.make(settings, source=str(given))


def spec_for(
    folder: Path,
    recipe: Recipe | None,
    search: Mapping[str, Any] | Sequence[str] | None,
    given: Mapping[str, Any],
    *,
    resume: bool,
    allow_code: bool = False,
) -> StudySpec:
    """Creates the definition of a new study, or reads that of the study to resume.

    Args:
        folder: the folder of the study.
        recipe: None takes the default recipe, or the recorded one.
        search: None takes the default space, or the recorded one.
        given: sampler, pruner, monitor and seed; None takes the default, or the recorded value.
        resume: whether to resume an existing study.
        allow_code: whether the recorded study may name functions to call.

    Raises:
        InputError: a study exists without `resume`, or does not exist with it, or differs from the arguments.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    if search:
        asked["space"] = space.parse_search(search)
    if not resume:
        return _new(folder, recipe or Recipe(), asked)
    spec = _read(folder, allow_code=allow_code, given=recipe.model_dump() if recipe else {})
    if recipe is not None:
        asked["recipe"] = _explicit(recipe, spec.space)
    for name, value in asked.items():
        if value != getattr(spec, name):
            raise InputError(
                f"Cannot resume {str(folder)!r} with another {'search' if name == 'space' else name}, since trials "
                "would not be comparable. Omit it, or start a new study."
            )
    return spec


def _new(folder: Path, recipe: Recipe, asked: Mapping[str, Any]) -> StudySpec:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        kind = "holds a study" if (folder / FILE).is_file() else "is not an empty folder"
        raise InputError(f"{str(folder)!r} {kind}. Add --resume to resume a study, or give another folder.")
    found = asked.get("space") or space.default_space(recipe)
    return StudySpec(folder, _explicit(recipe, found), **{**_DEFAULTS, **asked, "space": found})


def _read(folder: Path, *, allow_code: bool, given: Mapping[str, Any]) -> StudySpec:
    """The recorded study; `given` are settings that replace what is recorded."""
    file = folder / FILE
    if not file.is_file():
        raise InputError(f"{str(folder)!r} has no study to resume: {FILE} is missing. Omit --resume.")
    kept = read(file)
    kinds = {"recipe": dict, "search": dict, "sampler": str, "pruner": str, "monitor": str, "seed": int}
    for name, kind in kinds.items():  # it may have been edited
        if not isinstance(kept.get(name), kind):
            raise InputError(f"{file} is damaged: `{name}` is missing. Start a new study in another folder.")
    refuse_code(kept["recipe"], str(file), allow=allow_code, given=given)
    refuse_code_searched(kept["search"], str(file), allow=allow_code)
    base = recipes.make(kept["recipe"], source=str(file))
    return StudySpec(folder, base, space.parse_search(kept["search"]), **{name: kept[name] for name in _DEFAULTS})


@contextlib.contextmanager
def claimed(spec: StudySpec, *, resume: bool) -> Iterator[Path]:
    """Creates and locks the folder of a study while the block lasts.

    Raises:
        InputError: another process has locked it, or it cannot be created.
    """
    folder = spec.folder
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock(folder, held, f"A study is running in {str(folder)!r}. Give another folder.")
            if not resume:
                head = "# Resume this study: tfgpu tune --resume --output FOLDER\n"
                atomic.write_text(folder / FILE, head + yaml.safe_dump(spec.as_plain(), sort_keys=False))
        except OSError as error:
            raise InputError(f"Cannot write in {str(folder)!r}: {error.strerror}. Give another folder.") from error
        yield folder


def _explicit(base: Recipe, searched: Space) -> Recipe:
    """Sets the model's default initializer, normalization and dropout in the recipe, if they are searched."""
    missing = [name for name in recipes.STYLE if name in searched and space.value_of(base, name) is None]
    if not missing:
        return base
    from tfgpu import models

    own = models.defaults_of(base.model)
    known = {name: own[name] for name in missing if isinstance(own.get(name), str | int | float)}
    return recipes.make({**base.model_dump(mode="json"), **known})
