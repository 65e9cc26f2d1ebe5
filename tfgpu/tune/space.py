"""The search space of a study: settings of a recipe and their values. Importing it does not start TensorFlow.

learning_rate=1e-5..1e-1:log    log-uniform
global_batch=16..512:powers     16, 32, 64, ... 512
warmup_epochs=0..4              uniform; whole numbers for settings that take whole numbers, or with `:whole`
optimizer=adam,sgd              one of these
model_options.depth=20,32       an option of the model's builder (or of the optimizer, the schedule ...)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from tfgpu.errors import InputError, unknown
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.reading import parse_value
from tfgpu.recipes.recipe import Recipe

SCALES = ("linear", "log", "powers")
FIXED = ("data", "classes", "validation", "test", "split_seed", "seed", "checkpoint_steps", "watch_machine")
"""Settings that define the task or the random draws; changing them does not make a better recipe."""
_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "adamax", "nadam", "lion")
_SCHEDULES = ("constant", "cosine", "exponential", "polynomial")  # Those that need no options.
_INITIALIZERS = ("he_normal", "glorot_uniform", "lecun_normal", "orthogonal")
_FORM = "Write 1e-5..1e-1:log, 16..512:powers, 0..0.5, or a list such as adam,sgd"


@dataclass(frozen=True)
class Choice:
    """One of several values.

    Attributes:
        values: distinct numbers, texts or booleans; at least one.

    Example:
        >>> 32 in Choice((16, 32)), str(Choice((16, 32)))
        (True, '16, 32')
    """

    values: tuple[Any, ...]

    def __post_init__(self):
        if not self.values:
            raise InputError(f"A list to choose from must not be empty. {_FORM}.")
        if len({(type(value), str(value)) for value in self.values}) < len(self.values):
            raise InputError(f"A list to choose from must not have duplicates. Received: {self}.")

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included.

    Attributes:
        low, high: the ends.
        scale: "linear", "log" (log-uniform), or "powers" (powers of two).
        whole: only whole numbers.

    Example:
        >>> 0.01 in Range(1e-5, 0.1, "log"), Range(16, 64, "powers").exponents, str(Range(0, 0.5))
        (True, (4, 6), '0 to 0.5')
    """

    low: float
    high: float
    scale: str = "linear"
    whole: bool = False

    def __post_init__(self):
        if self.scale not in SCALES:
            raise unknown("scale of a search", self.scale, SCALES)
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise InputError(f"A range must end at a larger number than it starts. Received: {self.low}..{self.high}.")
        if self.scale != "linear" and self.low <= 0:
            raise InputError(f"A range with :{self.scale} must start above 0. Received: {self.low}..{self.high}.")
        wholes = all(float(end).is_integer() for end in (self.low, self.high))
        if self.whole and not wholes:
            raise InputError(f"The setting takes whole numbers. Received: {self.low}..{self.high}.")
        if self.scale == "powers":
            if not wholes or any(int(end) & (int(end) - 1) for end in (self.low, self.high)):
                raise InputError(
                    f"A range with :powers must start and end at powers of two. Received: {self.low}..{self.high}."
                )

    @property
    def exponents(self) -> tuple[int, int]:
        """The exponents of the ends, as powers of two."""
        return int(self.low).bit_length() - 1, int(self.high).bit_length() - 1

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        if self.scale == "powers":
            return float(value).is_integer() and not int(value) & (int(value) - 1)
        return not self.whole or float(value).is_integer()

    def __str__(self) -> str:
        scale = {"linear": "", "log": ", logarithmic", "powers": ", powers of two"}[self.scale]
        return f"{self.low:g} to {self.high:g}{scale}"


Domain = Choice | Range
Space = Mapping[str, Domain]


def parse_search(search: Mapping[str, Any] | Sequence[str]) -> dict[str, Domain]:
    """Parses a search space: arguments of `--search`, or a mapping from a YAML file or Python.

    Args:
        search: `NAME=VALUES` texts, or a mapping of names to values: a text as after the `=`, a list, or a `Choice` or
            `Range`.

    Returns:
        The domains by name, in the order given.

    Raises:
        InputError: a setting is unknown or must not be searched, or its values are invalid.

    Example:
        >>> parse_search(["learning_rate=1e-5..1e-1:log"])
        {'learning_rate': Range(low=1e-05, high=0.1, scale='log', whole=False)}
        >>> parse_search({"optimizer": ["adam", "sgd"]})
        {'optimizer': Choice(values=('adam', 'sgd'))}
    """
    if isinstance(search, str):
        raise InputError(f"A search must be a list of NAME=VALUES, or a mapping. Received: {search!r}.")
    named: dict[str, Any] = {}
    if not isinstance(search, Mapping):
        for word in search:
            name, equals, values = str(word).partition("=")
            if not equals or not name.strip() or not values.strip():
                raise InputError(f"--search must be NAME=VALUES. Received: {word!r}. {_FORM}.")
            if name.strip() in named:
                raise InputError(f"--search gives {name.strip()!r} twice. Keep one of them.")
            named[name.strip()] = values.strip()
    return {str(name): _domain(str(name), values) for name, values in (named or dict(search or {})).items()}


def check(space: Space, base: Recipe) -> None:
    """Validates the ends and choices of each setting with the recipe's schema.

    Args:
        space: the search space.
        base: the recipe that the trials modify.

    Raises:
        InputError: the schema rejects a value.
    """
    for name, domain in space.items():
        for value in domain.values if isinstance(domain, Choice) else (domain.low, domain.high):
            number = int(value) if isinstance(domain, Range) and (domain.whole or domain.scale == "powers") else value
            try:
                with_settings(base, {name: number})
            except InputError as error:
                raise InputError(f"The search of {name} contains {number!r}, which is invalid: {error}") from None


def with_settings(base: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Returns the recipe with a trial's settings.

    Options belong to one optimizer or schedule: if a trial uses another than the recipe, the recipe's
    `optimizer_options` or `schedule_options` are dropped.

    Args:
        base: the recipe.
        settings: values by name; options contain a dot, such as `model_options.depth`.

    Raises:
        InputError: the settings are incompatible.

    Example:
        >>> with_settings(Recipe(optimizer="sgd", optimizer_options={"momentum": 0.9}), {"optimizer": "adam"}).optimizer
        'adam'
    """
    plain = base.model_dump(mode="json")
    for owner in ("optimizer", "schedule"):
        if owner in settings and settings[owner] != plain[owner]:
            plain[f"{owner}_options"] = {}
    for name, value in settings.items():
        owner, _, option = name.partition(".")
        if option:
            plain[owner] = {**plain[owner], option: value}
        else:
            plain[owner] = value
            plain["model_options"] = {key: v for key, v in plain["model_options"].items() if key != name}
    return recipes.make(plain)


def value_of(base: Recipe, name: str) -> Any:
    """A recipe's value of a searched setting; None if the model or the optimizer chooses it."""
    owner, _, option = name.partition(".")
    if option:
        return getattr(base, owner).get(option)
    found = getattr(base, owner)
    return base.model_options.get(name) if found is None else found


def default_space(base: Recipe) -> dict[str, Domain]:
    """The default search space, with the settings that usually matter.

    Args:
        base: the recipe.

    Returns:
        Learning rate 1e-5 to 1e-1, batch 16 to 512, optimizer and schedule; initializer, normalization and dropout if
        the model's builder has them.

    Raises:
        InputError: the recipe's model is unknown.

    Example:
        >>> list(default_space(Recipe(model="mlp")))[-3:]
        ['initializer', 'normalization', 'dropout']
        >>> list(default_space(Recipe(model="ResNet50")))
        ['learning_rate', 'global_batch', 'optimizer', 'schedule']
    """
    from tfgpu import models  # imports Keras

    space: dict[str, Domain] = {
        "learning_rate": Range(1e-5, 1e-1, "log"),
        "global_batch": Range(16, 512, "powers", whole=True),
        "optimizer": Choice(_OPTIMIZERS),
        "schedule": Choice(_SCHEDULES),
    }
    taken = models.defaults_of(base.model)
    norms = ("none", "layer") if base.model.lower() in ("vit", "transformer") else ("none", "batch", "layer", "group")
    style: dict[str, Domain] = {
        "initializer": Choice(_INITIALIZERS),
        "normalization": Choice(norms),
        "dropout": Range(0.0, 0.5),
    }
    return space | {name: domain for name, domain in style.items() if name in taken}


def _domain(name: str, values: Any) -> Domain:
    _check_name(name)
    if isinstance(values, Choice | Range):
        return values
    if isinstance(values, Mapping):
        raise InputError(f"The search of {name} must be a text or a list. Received: {dict(values)!r}. {_FORM}.")
    try:
        if isinstance(values, str):
            return _range(name, values) if ".." in values else Choice(_values(values))
        return Choice(tuple(values) if isinstance(values, Sequence) else (values,))
    except InputError as error:
        raise InputError(f"The search of {name}: {error}") from None


def _range(name: str, text: str) -> Range:
    ends, _, scale = text.partition(":")
    low, _, high = ends.partition("..")
    try:
        numbers = float(low), float(high)
    except ValueError:
        raise InputError(f"a range must be two numbers. Received: {text!r}. {_FORM}.") from None
    scale = scale.strip() or "linear"
    if scale == "whole":
        return Range(*numbers, whole=True)
    return Range(*numbers, scale, whole=_takes_wholes(name) or scale == "powers")


def _values(text: str) -> tuple[Any, ...]:
    found = parse_value(f"[{text}]")
    if not isinstance(found, list) or not all(part.strip() for part in text.split(",")):
        raise InputError(f"cannot parse the list. Received: {text!r}. {_FORM}.")
    return tuple(found)


def as_plain(domain: Domain) -> Any:
    """Formats a domain for a YAML file, as read by `parse_search`.

    Example:
        >>> as_plain(Range(1e-5, 0.1, "log")), as_plain(Choice((16, 32)))
        ('1e-05..0.1:log', [16, 32])
    """
    if isinstance(domain, Choice):
        return list(domain.values)
    scale = "whole" if domain.whole and domain.scale == "linear" else domain.scale
    return f"{domain.low!r}..{domain.high!r}" + ("" if scale == "linear" else f":{scale}")


def _check_name(name: str) -> None:
    owner, point, option = name.partition(".")
    fields = Recipe.model_fields
    if owner not in fields:
        raise unknown("setting to search", owner, [field for field in fields if field not in FIXED])
    panel = fields[owner].json_schema_extra["panel"]
    if owner in FIXED or panel in ("Input", "Hardware"):
        raise InputError(
            f"A study cannot search {owner!r}, which defines the task, the random draws or the machine. Set it in the "
            "recipe."
        )
    if point and (get_origin(fields[owner].annotation) is not dict or not option.isidentifier()):
        raise InputError(f"{name!r} is not an option. Write, for example, model_options.depth=20,32.")
    if not point and get_origin(fields[owner].annotation) is dict:
        raise InputError(f"{name!r} contains options. Name one of them, such as {name}.depth.")


def _takes_wholes(name: str) -> bool:
    field = Recipe.model_fields.get(name)
    return field is not None and int in (field.annotation, *get_args(field.annotation))
