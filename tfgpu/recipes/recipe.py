"""The schema of a training run, used by config files, command-line flags and the report.

Importing this module does not import TensorFlow. Names that only Keras or another package can resolve (an optimizer,
`module:function`) are checked by the runner, before anything is written.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from tfgpu.data.augmentation.stages import parse_stages
from tfgpu.data.names import TASKS, parse_source
from tfgpu.errors import InputError, is_whole, unknown
from tfgpu.recipes import agreement, pretrained
from tfgpu.recipes.pretrained import setting as _field
from tfgpu.recipes.reading import parse_value, read, refuse_code

INPUT = ("cache", "cache_directory", "memory_bytes", "parallel_calls", "prefetch")  # affect speed, not results
STYLE = ("initializer", "normalization", "dropout")  # a builder's arguments that are settings of a recipe
OWN_SETTINGS = {  # an optimizer's arguments and the settings of a recipe that replace them
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "global_clipnorm": "clip_norm",
    "gradient_accumulation_steps": "accumulate",
}
_GONE = {
    "balance": ("none", "Use `data.mixture` of one source per class."),
    "path": ("fit", "Leave it out: every run uses Keras's `fit`, with the same weights and speed."),
}
"""Settings that recipes and runs of older versions have: the value that changed nothing, and what to use now."""


def _stages(value: Any) -> Any:
    """Converts `"flip,rotate"` or `["flip", "rotate: {degrees: 5}"]` to a tuple; `"none"` is the empty one."""
    stages: list[Any] = []
    for part in value if isinstance(value, list | tuple) else [value]:
        if isinstance(part, str) and ":" not in part:
            stages += [name.strip() for name in part.split(",") if name.strip()]
        else:
            stages.append(parse_value(part) if isinstance(part, str) else part)
    if not isinstance(value, str | list | tuple) or not all(map(_is_stage, stages)):
        raise ValueError("should be a list of names, with options in braces, such as [flip, rotate: {degrees: 5}]")
    return () if stages == ["none"] else tuple(stages)


def _is_stage(stage: Any) -> bool:
    if isinstance(stage, dict):
        return len(stage) == 1 and all(isinstance(k, str) and isinstance(v, dict) for k, v in stage.items())
    return isinstance(stage, str)


def _devices(value: Any) -> Any:
    """Converts `"2"` to 2 and `"GPU:0,GPU:1"` to two names."""
    if isinstance(value, str):
        value = int(value) if value.strip().isdigit() else value.split(",")
    if value is None or is_whole(value):
        return value
    parts = value if isinstance(value, list | tuple) else ()
    names = tuple(str(part).strip() for part in parts)
    if names and all(re.fullmatch(r"\S*[A-Za-z]+:\d+", name) for name in names):
        return names
    raise ValueError("should be a number of devices, at least 1, or names such as GPU:0,GPU:1")


def _task(value: Any) -> Any:
    """Converts `"price=regression,kind=classification"` to a dict; a single task and None stay."""
    if isinstance(value, str) and "=" in value:
        value = dict(pair.strip().split("=", 1) for pair in value.split(",") if "=" in pair)
    given = value.values() if isinstance(value, dict) else [value]
    for each in given:
        if each not in (None, *TASKS):
            raise ValueError(str(unknown("task", each, TASKS)).removesuffix("."))
    return value


def _size(value: Any) -> Any:
    """Converts `64`, `"64x48"` or `[64, 48]` to (height, width)."""
    if value is None:
        return None
    text = "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    match = re.fullmatch(r"([1-9]\d*)(?:[xX]([1-9]\d*))?", text)
    if not match:
        raise ValueError("should be a number of pixels, or HEIGHTxWIDTH such as 64x48")
    return int(match[1]), int(match[2] or match[1])


Stages = Annotated[tuple[str | dict[str, dict[str, Any]], ...], BeforeValidator(_stages)]
Devices = Annotated[int | tuple[str, ...] | None, BeforeValidator(_devices)]
Size = Annotated[tuple[int, int] | None, BeforeValidator(_size)]
Task = Annotated[str | dict[str, str] | None, BeforeValidator(_task)]
Options = dict[str, Any]


def shares(data: object = None) -> dict[str, float]:
    """The fractions of a recipe's data that are held back by default; None is the default data.

    Example:
        >>> shares("digits"), shares("photos/")
        ({'validation': 0.1, 'test': 0.2}, {'validation': 0.0, 'test': 0.0})
    """
    is_digits = data in (None, "digits")
    return {"validation": 0.1 if is_digits else 0.0, "test": 0.2 if is_digits else 0.0}


class Recipe(pretrained.Pretrained):
    """Everything that determines a run's result; repeated on the same CPUs, it gives the same weights.

    GPUs sum in varying order unless `deterministic` is set.

    Example:
        >>> Recipe(model="mlp", epochs=3).global_batch
        32
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    data: str = _field("digits", "Data", min_length=1)
    """The dataset: `digits`, `tfds:NAME`, a folder with one folder of images per class, `.tfrecord`, `.csv`,
    `.parquet` or `.npz` files (`FILE#COLUMN` names a table's label, `FILE#COLUMN,COLUMN` several targets),
    `images:FILE#COLUMN` (a table that names pictures), `corpus:PATH` (plain text, for a language model), or
    `module:function`."""
    task: Task = _field(None, "Data")
    """What to predict: `classification` or `regression`, or one of them for each named target, such as
    `price=regression,kind=classification`. Default: taken from the data; whole numbers and texts are classes."""
    augment: Stages = _field(("auto",), "Data")
    """Random changes to training images, in this order, such as `flip` or `rotate: {degrees: 5}`; `auto` chooses by
    dataset, `none` changes nothing."""
    image_size: Size = _field(None, "Data")
    """Resize images to HEIGHTxWIDTH; needed for folders of mixed sizes."""
    length: int | None = _field(None, "Data", ge=2)
    """Bytes per text, which is truncated or padded, or per sequence of a corpus; default: 256. Tokens per row with
    `preset`; default: 1024, or the model's number of positions if it is smaller."""
    classes: int | None = _field(None, "Data", ge=2)
    """Number of classes. Required for masks in files; otherwise only checked, and used by `--dry-run`. Default: from
    the data."""
    label_smoothing: float = _field(0.0, "Data", ge=0, lt=1)
    """Fraction of a training label to spread evenly over all classes."""
    validation: float = _field(0.0, "Data", ge=0, lt=1)
    """Fraction of the examples to use for validation; for `digits` 0.1 by default."""
    test: float = _field(0.0, "Data", ge=0, lt=1)
    """Fraction of the examples to use for the final test; for `digits` 0.2 by default."""
    skip_corrupt: bool = _field(False, "Data")
    """Skip examples that cannot be read, and report their number."""
    split_seed: int = _field(0, "Data", ge=0)
    """Determines which examples are for training, validation and test."""

    cache: Literal["auto", "memory", "disk", "none"] = _field("auto", "Input")
    """Where to keep decoded examples; `auto`: in memory if they fit, else in `--cache-directory` if it is set."""
    cache_directory: str | None = _field(None, "Input")
    """A folder for decoded examples, which later runs reuse."""
    memory_bytes: int = _field(1 << 30, "Input", ge=0)
    """Maximum bytes of decoded examples to keep in memory."""
    parallel_calls: int | None = _field(None, "Input", ge=1)
    """Number of examples to decode in parallel. Default: tuned while running."""
    prefetch: int | None = _field(None, "Input", ge=0)
    """Batches to prefetch. Default: tuned while running."""

    model: str = _field("cnn", "Model", min_length=1)
    """The model: a builder's name (mlp, cnn, resnet, vit, transformer), a `keras.applications` name, `causal_lm`
    (the pretrained language model in `preset`), or `module:function`."""
    model_options: Options = _field({}, "Model", flag="--model-option")
    """An argument of the model's builder, such as `widths=[64]`."""
    initializer: str | None = _field(None, "Model", min_length=1)
    """The model's initializer, such as `he_normal`. Default: the model's."""
    normalization: str | None = _field(None, "Model", min_length=1)
    """The model's normalization: batch, sync_batch, layer, group or none. Default: the model's."""
    dropout: float | None = _field(None, "Model", ge=0, lt=1)
    """The model's dropout rate. Default: the model's."""

    strategy: Literal["auto", "one_device", "mirrored", "multi_worker", "parameter_server"] = _field("auto", "Hardware")
    """How to distribute training; `auto` decides by the devices and TF_CONFIG."""
    devices: Devices = _field(None, "Hardware")
    """A number of devices, or their names, such as GPU:0,GPU:1. Default: all that suit the strategy."""
    virtual_devices: int = _field(0, "Hardware", ge=0, le=64)
    """Split each worker's CPU into this many logical devices, to try a strategy without GPUs."""
    precision: Literal["auto", "float32", "tf32", "mixed_float16", "mixed_bfloat16"] = _field("float32", "Hardware")
    """Number format; `auto` uses the fastest that the device supports well."""
    jit: bool = _field(False, "Hardware")
    """Compile the training step with XLA."""
    deterministic: bool = _field(False, "Hardware")
    """Use only deterministic operations on GPUs: slower, and an error if an operation has no such version. On CPUs
    all are deterministic."""
    recompute: bool = _field(False, "Hardware")
    """Recompute each block's activations in the backward pass: less memory, more time, the same result."""
    flash_attention: bool = _field(False, "Hardware")
    """Compute attention by blocks of 256 queries: memory grows with the length of a sequence, not its square."""

    epochs: int = _field(20, "Training", ge=1)
    """Number of passes over the training examples."""
    global_batch: int = _field(32, "Training", flag="--batch", ge=1)
    """Examples per step, over all replicas together."""
    accumulate: int = _field(1, "Training", ge=1)
    """Steps whose gradients to average into one update."""
    early_stopping: int | None = _field(None, "Training", ge=1)
    """Stop after this many epochs without improvement. Default: never."""
    early_stopping_options: Options = _field({}, "Training", flag="--early-stopping-option")
    """What counts as improvement: `monitor=val_loss`, `mode=auto`, `min_delta=0`, `start_epoch=1`; and
    `restore_best=true`."""
    weight_average: Literal["none", "ema"] = _field("none", "Training")
    """The final weights: the last update's (`none`), or a moving average (`ema`), also for validation."""
    weight_average_options: Options = _field({}, "Training", flag="--weight-average-option")
    """`ema`: `momentum=0.99` per update."""
    checkpoint_steps: int = _field(0, "Training", ge=0)
    """Also save a checkpoint after every N steps; 0: only at the end of each epoch."""
    watch_machine: bool = _field(True, "Training")
    """Monitor GPUs, CPU, memory and input wait during training, and report the bottleneck (`tfgpu top`)."""
    seed: int = _field(0, "Training", ge=0, lt=2**32)
    """Determines the initial weights, the order of examples and all random numbers."""

    optimizer: str = _field("adam", "Optimizer", min_length=1)
    """A Keras optimizer (adam, adamw, sgd, lamb, lion, ...), `momentum` (sgd with `momentum=0.9`) or lars."""
    optimizer_options: Options = _field({}, "Optimizer", flag="--optimizer-option")
    """An argument of the optimizer, such as `beta_1=0.95`."""
    learning_rate: float = _field(3e-3, "Optimizer", gt=0)
    """The peak learning rate of the schedule."""
    schedule: Literal["constant", "cosine", "exponential", "plateau", "polynomial", "step"] = _field(
        "cosine", "Optimizer"
    )
    """How the learning rate decays; `plateau` waits for the validation loss to stall."""
    schedule_options: Options = _field({}, "Optimizer", flag="--schedule-option")
    """An argument of the schedule, such as `final=0.1`, `patience=3`, or `milestones=[30,60]`, in epochs."""
    warmup_epochs: float | None = _field(None, "Optimizer", ge=0)
    """Epochs of learning-rate warmup. Default: 1 for cosine, but at most a quarter of all epochs; 0 for others."""
    weight_decay: float | None = _field(None, "Optimizer", ge=0)
    """Decoupled weight decay, per unit of learning rate (lars: in the gradient). Default: the optimizer's."""
    decay: Literal["auto", "all", "kernels"] = _field("auto", "Optimizer")
    """Which weights decay: all, or only kernels, not biases and normalization scales; `auto`: the optimizer's
    default."""
    clip_norm: float | None = _field(None, "Optimizer", gt=0)
    """Clip gradients to this global norm. Default: no clipping."""

    @model_validator(mode="before")
    @classmethod
    def _hold_back(cls, settings: Any) -> Any:
        """The shares of `digits`; of other data nothing is held back unless a recipe says so."""
        return {**shares(settings.get("data")), **settings} if isinstance(settings, dict) else settings

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Rejects `epochs: true`, which Python would accept as 1."""
        annotation = cls.model_fields[info.field_name].annotation
        kinds = {annotation, *get_args(annotation)} & {int, float}
        if isinstance(value, bool) and kinds:
            raise ValueError("should be a number")
        return value

    @model_validator(mode="after")
    def _agree(self) -> "Recipe":
        if self.validation + self.test >= 1:
            raise ValueError(f"`validation` + `test` must be below 1. Received: {self.validation} + {self.test}")
        if self.warmup_epochs is not None and self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"`warmup_epochs` must be below `epochs`. Received: {self.warmup_epochs:g} of {self.epochs}"
            )
        for name in sorted(OWN_SETTINGS.keys() & self.optimizer_options.keys()):
            raise ValueError(f"`optimizer_options` must not contain {name!r}. Use `{OWN_SETTINGS[name]}` instead")
        agreement.check(self)
        pretrained.check(self, {name: field.default for name, field in type(self).model_fields.items()})
        return self

    @property
    def builder_options(self) -> Options:
        """The options of the model's builder.

        Example:
            >>> Recipe(model="mlp", model_options={"widths": [64]}, dropout=0.3).builder_options
            {'widths': [64], 'dropout': 0.3}
        """
        own = {name: value for name in STYLE if (value := getattr(self, name)) is not None}
        return {**self.model_options, **own, **({"recompute": True} if self.recompute else {})}


def load(
    path: str | Path | None = None, *, overrides: Mapping[str, Any] | None = None, allow_code: bool = False
) -> Recipe:
    """Reads a recipe from a YAML file and replaces single settings.

    Args:
        path: the file; None starts from the defaults. Facts that a run added to it are ignored.
        overrides: settings that override the file's, such as command-line flags.
        allow_code: whether the file may name a function to call (`module:function`).

    Returns:
        The validated recipe.

    Raises:
        InputError: the file cannot be read, or has an unknown setting, an invalid value, or code.

    Example:
        >>> load(overrides={"epochs": "3"}).epochs
        3
    """
    settings = read(path) if path else {}
    refuse_code(settings, str(path), allow=allow_code, given=overrides)
    return make({**settings, **(overrides or {})}, source=str(path) if path else None)


def make(settings: Mapping[str, Any], *, source: str | None = None) -> Recipe:
    """Validates settings; turns the schema's errors into one `InputError` of one line.

    Args:
        settings: names and values from a config file or flags.
        source: where they came from, for errors.
    """
    kept = {name: value for name, value in settings.items() if name not in _GONE or value != _GONE[name][0]}
    try:
        return Recipe(**kept)
    except ValidationError as error:
        # A union reports every branch that failed; one message per setting is enough.
        first = {problem["loc"][:1]: _sentence(problem) for problem in reversed(error.errors())}
        text = " ".join(reversed(first.values()))
        raise InputError(f"{source}: {text}" if source else text) from None


def check(recipe: Recipe, *, needs_data: bool = True) -> None:
    """Checks what does not need TensorFlow: that the source exists and the stages are valid.

    Args:
        recipe: the recipe.
        needs_data: False if the source need not exist.

    Raises:
        InputError: an unknown source or stage, or a missing path.
    """
    if recipe.model == pretrained.CAUSAL_LM:
        pretrained.check_paths(recipe)
    elif needs_data:
        parse_source(recipe.data)
    if recipe.augment != ("auto",):
        parse_stages(recipe.augment)


def choices(name: str) -> tuple[str, ...]:
    """Returns the values that a setting may have; empty if it is not a choice among names."""
    annotation = Recipe.model_fields[name].annotation
    return tuple(get_args(annotation)) if getattr(annotation, "__origin__", None) is Literal else ()


def _sentence(problem: Any) -> str:
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if name in _GONE:
        return f"`{name}` is gone. {_GONE[name][1]} Received: {problem['input']!r}."
    if problem["type"] == "extra_forbidden":
        return str(unknown("setting", name, Recipe.model_fields))
    if problem["type"] == "literal_error":
        return str(unknown(name, problem["input"], choices(name)))
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").removeprefix("String ")
    plain = {"int": "a whole number", "float": "a number", "bool": "true or false"}  # pydantic's speaks of parsing
    if (kind := problem["type"].partition("_")[0]) in plain:
        message = f"should be {plain[kind]}"
    if not name:
        return f"{message}."
    flag = Recipe.model_fields[name].json_schema_extra.get("flag")
    return f"`{name}`{f' ({flag})' if flag else ''} {message}. Received: {problem['input']!r}."
