"""Model builders, and `build`, which finds one by name: tfgpu's, those of `keras.applications`, or your own function.

Every builder returns a plain functional Keras model whose outputs are float32 logits, whatever the dtype policy:
compile it with a loss that has `from_logits=True`. It is saved, loaded and exported like any Keras model; to load one
with tfgpu's layers (`vit`, `transformer`, `recompute=True`), import `tfgpu.models` first. `Recompute` wraps a block of
your own model.

    import tfgpu
    model = tfgpu.models.resnet((32, 32, 3), 10, depth=18)
    model = tfgpu.models.build("MobileNetV2", input_shape=(96, 96, 3), classes=5)
    model = tfgpu.models.build("my_models:unet", input_shape=(64, 64, 1), classes=2, options={"width": 16})
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import keras

from tfgpu import errors, named
from tfgpu.errors import InputError
from tfgpu.models import parts
from tfgpu.models.cnn import cnn
from tfgpu.models.mlp import mlp
from tfgpu.models.recompute import Recompute
from tfgpu.models.resnet import resnet
from tfgpu.models.transformer import transformer
from tfgpu.models.vit import vit

__all__ = [
    "BUILDERS", "Recompute", "applications", "build", "cnn", "defaults_of", "mlp", "resnet", "transformer", "vit",
]  # fmt: skip

BUILDERS = MappingProxyType({f.__name__: f for f in (cnn, mlp, resnet, transformer, vit)})

# `build` sets these: a head with logits for the data's classes, and no downloaded weights.
_GIVEN = frozenset({"input_shape", "classes"})
_FIXED = _GIVEN | {"weights", "include_top", "input_tensor", "classifier_activation", "pooling"}


def applications() -> Mapping[str, Callable[..., keras.Model]]:
    """Returns the models of `keras.applications` by their Keras names.

    Example:
        >>> "MobileNetV2" in applications()
        True
    """
    return dict(inspect.getmembers(keras.applications, inspect.isfunction))


def build(
    name: str,
    *,
    input_shape: Sequence[int | None] | Mapping[str, Sequence[int | None]],
    classes: int | Mapping[str, int],
    options: Mapping[str, object] | None = None,
) -> keras.Model:
    """Builds a model by name for a given input shape and number of classes.

    Args:
        name: a builder's name (`cnn`, `mlp`, `resnet`, `transformer`, `vit`), a name in `keras.applications`
            (random weights; not case-sensitive), or `module:function`, also from the current directory. The function
            gets `input_shape` and `classes` if it takes them, and returns a Keras model with logits.
        input_shape: shape of one example, without the batch dimension; for a function also a dict of shapes.
        classes: number of outputs; for a function also a dict of these by the outputs' names.
        options: further arguments of the builder, by name. Default: none.

    Returns:
        A Keras model whose outputs are logits.

    Raises:
        InputError: an unknown name or option, an input that the model cannot take, or a function that cannot be found
            or does not return a model.

    Example:
        >>> build("mlp", input_shape=(8, 8, 1), classes=10, options={"widths": [32]}).count_params()
        2410
    """
    function, options = _builder(name), dict(options or {})
    if ":" in name:
        return _build_from_module(name, function, input_shape, classes, options)
    _check_options(name, options, _options(name, function))
    if name.lower() in BUILDERS:
        return function(input_shape, classes, **options)
    return _build_application(function, input_shape, classes, options)


def defaults_of(name: str) -> dict[str, object]:
    """Returns the options of a model's builder with their defaults, without building the model.

    Args:
        name: as for `build`.

    Returns:
        Default by option; `inspect.Parameter.empty` for a required one. Empty for a function that takes any
        (`**options`).

    Raises:
        InputError: there is no such model.

    Example:
        >>> defaults_of("mlp")["initializer"]
        'he_normal'
    """
    function = _builder(name)
    parameters = inspect.signature(function).parameters
    return {option: parameters[option].default for option in _options(name, function)}


def styles_of(name: str) -> dict[str, tuple[str, ...]]:
    """Returns the names that a builder accepts for activation, initializer and normalization; empty for other models.

    Example:
        >>> styles_of("vit")["normalization"]
        ('layer', 'none')
    """
    if name.lower() not in BUILDERS:
        return {}
    has_attention = name.lower() in ("vit", "transformer")
    return {
        "activation": parts.ACTIVATIONS,
        "initializer": parts.INITIALIZERS,
        "normalization": parts.ATTENTION_NORMALIZATIONS if has_attention else parts.NORMALIZATIONS,
    }


def _builder(name: str) -> Callable[..., keras.Model]:
    if not isinstance(name, str) or not name:
        raise InputError(f"A model's name must be a string such as 'cnn'. Received: {name!r}.")
    if ":" in name:
        return named.function(name, "Model")
    known = {**BUILDERS, **{spelled.lower(): function for spelled, function in applications().items()}}
    if name.lower() not in known:
        raise errors.unknown("model", name, [*known, "module:function"])
    return known[name.lower()]


def _options(name: str, function: Callable[..., object]) -> list[str]:
    """The arguments of a builder that the data does not determine."""
    if name.lower() in BUILDERS:
        return _keywords(function)
    taken = _keywords(function, positional=True)
    return [p for p in taken if p not in (_GIVEN if ":" in name else _FIXED)]


def _build_application(function, input_shape, classes, options) -> keras.Model:
    if "include_preprocessing" in inspect.signature(function).parameters:
        # These models would divide by 255 images that the data pipeline has already scaled.
        options.setdefault("include_preprocessing", False)
    try:
        model = function(
            weights=None, input_shape=tuple(input_shape), classes=classes, classifier_activation=None, **options
        )
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"Model {function.__name__!r} cannot be built for input_shape={tuple(input_shape)}, classes={classes}, "
            f"options={options}: {reason} If the images are too small, resize them, or use cnn or resnet."
        ) from error
    if keras.backend.standardize_dtype(model.output.dtype) == "float32":
        return model
    logits = keras.layers.Activation("linear", dtype="float32", name="float32_logits")(model.output)
    return keras.Model(model.input, logits, name=model.name)


def _build_from_module(name, function, input_shape, classes, options) -> keras.Model:
    shape = dict(input_shape) if isinstance(input_shape, Mapping) else tuple(input_shape)
    arguments = {"input_shape": shape, "classes": classes}
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        _check_options(name, options, _options(name, function))
        arguments = {key: value for key, value in arguments.items() if key in _keywords(function, positional=True)}
    arguments |= options
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    missing = [name for name in required if name not in arguments]
    if missing:
        raise InputError(f"Model {name!r} needs the option {missing[0]!r}. Received: {sorted(options)}. Add it.")
    try:
        with named.importing_from_here():
            model = function(**arguments)
    except SystemExit as error:  # otherwise the run would end here, with the function's exit code
        raise InputError(f"{name} called sys.exit({error.code!r}). Return a Keras model.") from None
    if not isinstance(model, keras.Model):
        raise InputError(
            f"Model {name!r} must return a keras.Model. Received: {type(model).__name__}. Return the model."
        )
    last = model.layers[-1] if model.layers else None
    if isinstance(last, keras.layers.Softmax) or getattr(last, "activation", None) is keras.activations.softmax:
        raise InputError(
            f"Model {name!r} must return logits, but its layer {last.name!r} applies softmax, "
            "and the loss would apply it again. Remove that activation."
        )
    return model


def _check_options(name: str, options: Mapping[str, object], allowed: Sequence[str]) -> None:
    for option in options:
        if option == "recompute" and option not in allowed:
            raise InputError(
                f"Model {name!r} has no blocks to recompute. Received: recompute={options[option]!r}. Use one of "
                f"{', '.join(BUILDERS)}, or wrap blocks of your own model in `tfgpu.models.Recompute`."
            )
        if option not in allowed:
            raise errors.unknown(f"option of model {name}", option, allowed)


def _keywords(function: Callable[..., object], *, positional: bool = False) -> list[str]:
    kinds = {inspect.Parameter.KEYWORD_ONLY} | ({inspect.Parameter.POSITIONAL_OR_KEYWORD} if positional else set())
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds]
