"""What a run is made of: one schema, which the config file, the command line's flags and the report all read.

Importing this module starts no TensorFlow. Names that only Keras or a package can resolve (an optimizer,
`module:function`) are checked by the runner, still before anything is written.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tfgpu.data.names import parse_source
from tfgpu.data.stages import parse_stages
from tfgpu.errors import InputError, unknown

FACTS = "run"  # The key of config.yaml under which a run leaves facts about itself; a recipe skips it.
INPUT = ("cache", "cache_directory", "memory_bytes", "parallel_calls", "prefetch")  # How fast, and never what, is read.
SETTINGS_OF_THEIR_OWN = {  # Optimizer arguments that a recipe has a word of its own for.
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "global_clipnorm": "clip_norm",
    "gradient_accumulation_steps": "accumulate",
}


def _stages(value: Any) -> Any:
    """Turns `"flip,rotate"` or `["flip", "rotate: {degrees: 5}"]` into a tuple; `"none"` is the empty one."""
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
    """Turns `"2"` into 2 and `"GPU:0,GPU:1"` into two names."""
    if value is None or isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, str) and value.strip().isdigit() and int(value) >= 1:
        return int(value)
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
    names = tuple(str(part).strip() for part in parts)
    if names and all(re.fullmatch(r"\S*[A-Za-z]+:\d+", name) for name in names):
        return names
    raise ValueError("should be a number of devices, at least 1, or names such as GPU:0,GPU:1")


def _size(value: Any) -> Any:
    """Turns `64`, `"64x48"` or `[64, 48]` into (height, width)."""
    if value is None:
        return None
    text = "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    match = re.fullmatch(r"([1-9]\d*)(?:[xX]([1-9]\d*))?", text)
    if not match:
        raise ValueError("should be a number of pixels, or HEIGHTxWIDTH such as 64x48")
    return int(match[1]), int(match[2] or match[1])


def _field(default: Any, panel: str, description: str, *, flag: str | None = None, **bounds: Any) -> Any:
    extra = {"panel": panel} | ({"flag": flag} if flag else {})
    return Field(default, description=description, json_schema_extra=extra, **bounds)


Stages = Annotated[tuple[str | dict[str, dict[str, Any]], ...], BeforeValidator(_stages)]
Devices = Annotated[int | tuple[str, ...] | None, BeforeValidator(_devices)]
Size = Annotated[tuple[int, int] | None, BeforeValidator(_size)]
Options = dict[str, Any]


class Recipe(BaseModel):
    """Everything that decides what a run computes; repeated on the same hardware, it gives the same weights.

    Example:
        >>> Recipe(model="mlp", epochs=3).global_batch
        32
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    data: str = _field(
        "digits",
        "Data",
        "What to learn from: `digits`, `tfds:NAME`, a folder with one folder of images a class, "
        "`.tfrecord`, `.csv` or `.parquet` files (`FILE#COLUMN` names a table's label), or `module:function`.",
        min_length=1,
    )
    augment: Stages = _field(
        ("auto",),
        "Data",
        "Random changes to training images, in this order, such as `flip` or `rotate: {degrees: 5}`; "
        "`auto` suits the data, `none` changes nothing.",
    )
    image_size: Size = _field(None, "Data", "Resize images to HEIGHTxWIDTH; needed for folders of mixed sizes.")
    validation: float = _field(0.1, "Data", "Share of the examples kept for validation.", gt=0, lt=1)
    test: float = _field(0.2, "Data", "Share of the examples kept for the final test.", gt=0, lt=1)
    skip_corrupt: bool = _field(False, "Data", "Leave out examples that cannot be read, and report their number.")
    balance: Literal["none", "oversample", "undersample", "weights"] = _field(
        "none",
        "Data",
        "What to do about classes that are not equally frequent in training; `oversample` makes an epoch longer, "
        "`undersample` shorter, `weights` weighs the loss.",
    )
    split_seed: int = _field(0, "Data", "Decides which examples are for training, validation and test.", ge=0)

    cache: Literal["auto", "memory", "disk", "none"] = _field(
        "auto",
        "Input",
        "Where to keep decoded examples; `auto`: in memory if they fit, else in `--cache-directory` if there is one.",
    )
    cache_directory: str | None = _field(None, "Input", "A folder for decoded examples, for later runs too.")
    memory_bytes: int = _field(1 << 30, "Input", "The most bytes of decoded examples to keep in memory.", ge=0)
    parallel_calls: int | None = _field(
        None, "Input", "How many examples are decoded at once; found while it runs when not given.", ge=1
    )
    prefetch: int | None = _field(
        None, "Input", "How many batches are made ahead; found while it runs when not given.", ge=0
    )

    model: str = _field(
        "cnn",
        "Model",
        "What to train: a builder's name (mlp, cnn, resnet, vit), a `keras.applications` name, or `module:function`.",
        min_length=1,
    )
    model_options: Options = _field(
        {}, "Model", "An argument of the model's builder, such as `dropout=0.3`.", flag="--model-option"
    )

    strategy: Literal["auto", "one_device", "mirrored", "multi_worker", "parameter_server"] = _field(
        "auto", "Hardware", "How to spread the work; `auto` reads the devices and TF_CONFIG."
    )
    devices: Devices = _field(
        None,
        "Hardware",
        "A number of devices, or their names, such as GPU:0,GPU:1; all that fit when not given.",
    )
    virtual_devices: int = _field(
        0,
        "Hardware",
        "Split the CPU (of each worker) into this many logical devices, to try a strategy without GPUs.",
        ge=0,
        le=64,
    )
    precision: Literal["auto", "float32", "tf32", "mixed_float16", "mixed_bfloat16"] = _field(
        "float32", "Hardware", "Number format; `auto` takes the fastest that the device does well."
    )
    jit: bool = _field(False, "Hardware", "Compile the training step with XLA.")
    recompute: bool = _field(
        False,
        "Hardware",
        "Compute the activations of each of the model's blocks again in the backward pass: less memory, more time, the "
        "same result.",
    )

    path: Literal["fit", "loop"] = _field(
        "fit",
        "Training",
        "Train through Keras's `fit` or through tfgpu's compiled loop; the weights are the same.",
    )
    epochs: int = _field(20, "Training", "How often to go through the training examples.", ge=1)
    global_batch: int = _field(32, "Training", "Examples per step, over all replicas together.", ge=1)
    accumulate: int = _field(1, "Training", "Steps whose gradients are averaged into one update.", ge=1)
    checkpoint_steps: int = _field(
        0, "Training", "Save a checkpoint after so many steps too; 0: at the ends of epochs alone.", ge=0
    )
    seed: int = _field(
        0,
        "Training",
        "Decides the first weights, the order of examples and every random draw.",
        ge=0,
        lt=2**32,
    )

    optimizer: str = _field("adam", "Optimizer", "A Keras optimizer: adam, adamw, sgd, lion, ...", min_length=1)
    optimizer_options: Options = _field(
        {}, "Optimizer", "An argument of the optimizer, such as `beta_1=0.95`.", flag="--optimizer-option"
    )
    learning_rate: float = _field(3e-3, "Optimizer", "The highest learning rate of the schedule.", gt=0)
    schedule: Literal["constant", "cosine", "exponential", "plateau"] = _field(
        "cosine",
        "Optimizer",
        "How the learning rate falls; `plateau` waits for the validation loss to stall.",
    )
    schedule_options: Options = _field(
        {},
        "Optimizer",
        "An argument of the schedule, such as `final=0.1` or `patience=3`.",
        flag="--schedule-option",
    )
    warmup_epochs: float | None = _field(
        None,
        "Optimizer",
        "Epochs over which the learning rate rises; when not given, cosine takes 1, but at most a quarter of "
        "them all, and the others none.",
        ge=0,
    )
    weight_decay: float | None = _field(
        None,
        "Optimizer",
        "Decoupled weight decay, per unit of learning rate; the optimizer's own when not given.",
        ge=0,
    )
    clip_norm: float | None = _field(
        None, "Optimizer", "Scale gradients down to this global norm; not clipped when not given.", gt=0
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses `epochs: true`, which Python counts as 1."""
        annotation = cls.model_fields[info.field_name].annotation
        kinds = {annotation, *get_args(annotation)} & {int, float}
        if isinstance(value, bool) and kinds:
            raise ValueError("should be a number")
        return value

    @model_validator(mode="after")
    def _agree(self) -> "Recipe":
        if self.validation + self.test >= 1:
            raise ValueError(
                f"`validation` + `test` must leave examples to train on. Received: {self.validation} + {self.test}"
            )
        if self.warmup_epochs is not None and self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"`warmup_epochs` must be below `epochs`. Received: {self.warmup_epochs:g} of {self.epochs}"
            )
        for name in sorted(SETTINGS_OF_THEIR_OWN.keys() & self.optimizer_options.keys()):
            raise ValueError(f"`optimizer_options` must not hold {name!r}. Use `{SETTINGS_OF_THEIR_OWN[name]}` instead")
        return self


def load(path: str | Path | None = None, *, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Reads a recipe from a YAML file, with single settings replaced.

    Args:
        path: the file; None starts from the defaults. Facts that a run left in it are skipped.
        overrides: settings that win over the file's, such as the command line's flags.

    Returns:
        The validated recipe.

    Raises:
        InputError: for a file that cannot be read, an unknown setting or a wrong value; one line.

    Example:
        >>> load(overrides={"epochs": "3"}).epochs
        3
    """
    return make({**(read(path) if path else {}), **(overrides or {})}, source=str(path) if path else None)


def make(settings: Mapping[str, Any], *, source: str | None = None) -> Recipe:
    """Validates settings; every complaint of the schema becomes one `InputError` of one line.

    Args:
        settings: names and values, as a config file or flags give them.
        source: the file they came from, to be named in the error.
    """
    try:
        return Recipe(**settings)
    except ValidationError as error:
        # A union reports every branch that failed; one complaint for each setting is enough.
        first = {problem["loc"][:1]: _sentence(problem) for problem in reversed(error.errors())}
        text = " ".join(reversed(first.values()))
        raise InputError(f"{source}: {text}" if source else text) from None


def check(recipe: Recipe) -> None:
    """Checks what can be known without TensorFlow: that the source exists and the stages have a meaning.

    Raises:
        InputError: an unknown source or stage, or a path that is not there.
    """
    parse_source(recipe.data)
    if recipe.augment != ("auto",):
        parse_stages(recipe.augment)


def read(path: str | Path) -> dict[str, Any]:
    """Reads a config file's settings, unvalidated and without a run's facts.

    Raises:
        InputError: when the file is missing, is not YAML or is not a mapping.
    """
    content = _parse(path)
    content.pop(FACTS, None)
    return content


def read_facts(path: str | Path) -> dict[str, Any]:
    """Reads the facts that a run left in its config file; empty when no run wrote it.

    Raises:
        InputError: when the file is missing, is not YAML or is not a mapping.
    """
    facts = _parse(path).get(FACTS)
    return facts if isinstance(facts, dict) else {}


def parse_value(text: str) -> Any:
    """Reads a flag's value as YAML does: `0.3` is a number, `true` a boolean, `[1, 2]` a list."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def choices(name: str) -> tuple[str, ...]:
    """Gives the values that a setting may have; empty when it is not a choice among names."""
    annotation = Recipe.model_fields[name].annotation
    return tuple(get_args(annotation)) if getattr(annotation, "__origin__", None) is Literal else ()


def _sentence(problem: Any) -> str:
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "extra_forbidden":
        return str(unknown("setting", name, Recipe.model_fields))
    if problem["type"] == "literal_error":
        return str(unknown(name, problem["input"], choices(name)))
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").removeprefix("String ")
    return f"`{name}` {message}. Received: {problem['input']!r}." if name else f"{message}."


def _parse(path: str | Path) -> dict[str, Any]:
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(
            f"Cannot read the config file {str(path)!r}: {reason}. Give a YAML file of settings."
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "it does not parse"
        raise InputError(f"{path}{where} is not YAML: {reason}. Write one `name: value` a line.") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InputError(f"{path} must hold settings. Received: {str(content)[:60]!r}. Write `name: value` lines.")
    return content


class _Loader(yaml.SafeLoader):
    """The safe loader, which also reads `1e-3` as a number and refuses a setting that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 takes `1e-3`, which has no point, for a string.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
