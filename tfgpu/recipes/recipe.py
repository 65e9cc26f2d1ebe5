"""The schema of a training run, used by config files, command-line flags and the report.

Importing this module does not import TensorFlow. Names that only Keras or another package can resolve (an optimizer,
`module:function`) are checked by the runner, before anything is written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

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

from tfgpu.data.augmentation.stages import parse_stages
from tfgpu.data.names import parse_source
from tfgpu.errors import InputError, unknown
from tfgpu.recipes import agreement, values
from tfgpu.recipes.reading import FACTS, parse_value, read, read_facts
from tfgpu.recipes.trust import refuse_code

__all__ = ["FACTS", "INPUT", "SETTINGS_OF_THEIR_OWN", "Recipe", "check", "choices", "load", "make"]
__all__ += ["parse_value", "read", "read_facts"]

INPUT = ("cache", "cache_directory", "memory_bytes", "parallel_calls", "prefetch")  # How fast, and never what, is read.
STYLE = ("initializer", "normalization", "dropout")  # Arguments of a builder that a recipe has a word for.
SETTINGS_OF_THEIR_OWN = {  # Optimizer arguments that a recipe has a word of its own for.
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "global_clipnorm": "clip_norm",
    "gradient_accumulation_steps": "accumulate",
}


def _field(default: Any, panel: str, description: str, *, flag: str | None = None, **bounds: Any) -> Any:
    extra = {"panel": panel} | ({"flag": flag} if flag else {})
    return Field(default, description=description, json_schema_extra=extra, **bounds)


Stages = Annotated[tuple[str | dict[str, dict[str, Any]], ...], BeforeValidator(values.stages)]
Devices = Annotated[int | tuple[str, ...] | None, BeforeValidator(values.devices)]
Size = Annotated[tuple[int, int] | None, BeforeValidator(values.size)]
Options = dict[str, Any]


class Recipe(BaseModel):
    """Everything that determines a run's result; repeated on the same hardware, it gives the same weights.

    Example:
        >>> Recipe(model="mlp", epochs=3).global_batch
        32
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    data: str = _field(
        "digits",
        "Data",
        "What to learn from: `digits`, `tfds:NAME`, a folder with one folder of images a class, "
        "`.tfrecord`, `.csv` or `.parquet` files (`FILE#COLUMN` names a table's label), `text:PATH` (texts by class), "
        "`corpus:PATH` (plain text, for a language model), or `module:function`.",
        min_length=1,
    )
    augment: Stages = _field(
        ("auto",),
        "Data",
        "Random changes to training images, in this order, such as `flip` or `rotate: {degrees: 5}`; "
        "`auto` suits the data, `none` changes nothing.",
    )
    image_size: Size = _field(None, "Data", "Resize images to HEIGHTxWIDTH; needed for folders of mixed sizes.")
    length: int | None = _field(
        None,
        "Data",
        "Bytes of a text, which is cut or padded to it, or of a piece of a corpus; 256 when not given.",
        ge=2,
    )
    classes: int | None = _field(
        None, "Data", "How many classes the data has; only checked, and for `--dry-run`. Found when not given.", ge=2
    )
    label_smoothing: float = _field(
        0.0, "Data", "Share of a training label that is spread evenly over all classes.", ge=0, lt=1
    )
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
        "What to train: a builder's name (mlp, cnn, resnet, vit, textcnn, transformer), a `keras.applications` name, "
        "or `module:function`.",
        min_length=1,
    )
    model_options: Options = _field(
        {}, "Model", "An argument of the model's builder, such as `widths=[64]`.", flag="--model-option"
    )
    initializer: str | None = _field(
        None,
        "Model",
        "The model's initialiser, such as `he_normal`; the model's own when not given.",
        min_length=1,
    )
    normalization: str | None = _field(
        None,
        "Model",
        "The model's normalisation: batch, sync_batch, layer, group or none; its own when not given.",
        min_length=1,
    )
    dropout: float | None = _field(None, "Model", "The model's dropout rate; its own when not given.", ge=0, lt=1)

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
    early_stopping: int | None = _field(
        None, "Training", "Stop after so many epochs without progress; never when not given.", ge=1
    )
    early_stopping_options: Options = _field(
        {},
        "Training",
        "What progress is: `monitor=val_loss`, `mode=auto`, `min_delta=0`, `start_epoch=1`; and `restore_best=true`.",
        flag="--early-stopping-option",
    )
    weight_average: Literal["none", "ema", "swa"] = _field(
        "none",
        "Training",
        "What the run ends with: the last weights; their moving average, which is validated too (`ema`); or the mean "
        "of the last epochs' weights (`swa`).",
    )
    weight_average_options: Options = _field(
        {},
        "Training",
        "`ema`: `momentum=0.99` by update. `swa`: `start_epoch` (after three quarters when not given), `every=1`.",
        flag="--weight-average-option",
    )
    checkpoint_steps: int = _field(
        0, "Training", "Save a checkpoint after so many steps too; 0: at the ends of epochs alone.", ge=0
    )
    watch_machine: bool = _field(
        True,
        "Training",
        "Watch GPUs, CPU, memory and the wait for data beside the training, and say what limits it (`tfgpu top`).",
    )
    seed: int = _field(
        0,
        "Training",
        "Decides the first weights, the order of examples and every random draw.",
        ge=0,
        lt=2**32,
    )

    optimizer: str = _field(
        "adam", "Optimizer", "A Keras optimizer (adam, adamw, sgd, lamb, lion, ...), `momentum` (sgd with "
        "`momentum=0.9`) or lars.", min_length=1
    )
    optimizer_options: Options = _field(
        {}, "Optimizer", "An argument of the optimizer, such as `beta_1=0.95`.", flag="--optimizer-option"
    )
    learning_rate: float = _field(3e-3, "Optimizer", "The highest learning rate of the schedule.", gt=0)
    schedule: Literal["constant", "cosine", "exponential", "one_cycle", "plateau", "polynomial", "step"] = _field(
        "cosine",
        "Optimizer",
        "How the learning rate falls; `one_cycle` rises first, `plateau` waits for the validation loss to stall.",
    )
    schedule_options: Options = _field(
        {},
        "Optimizer",
        "An argument of the schedule, such as `final=0.1`, `patience=3`, or `milestones=[30,60]`, in epochs.",
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
        "Decoupled weight decay, per unit of learning rate (lars: in the gradient); the optimizer's when not given.",
        ge=0,
    )
    decay: Literal["auto", "all", "kernels"] = _field(
        "auto",
        "Optimizer",
        "What weight decay shrinks: all, or not biases and scales of normalisation; `auto`: the optimizer's way.",
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
        agreement.check(self)
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
    try:
        return Recipe(**settings)
    except ValidationError as error:
        # A union reports every branch that failed; one complaint for each setting is enough.
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
    if needs_data:
        parse_source(recipe.data)
    if recipe.augment != ("auto",):
        parse_stages(recipe.augment)


def choices(name: str) -> tuple[str, ...]:
    """Returns the values that a setting may have; empty if it is not a choice among names."""
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
