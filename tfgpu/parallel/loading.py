"""`parallel.load_weights`: weights from a file, straight to the devices that hold them."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import keras

from tfgpu.compat import keras_hub, saving, variables
from tfgpu.core.state import sharded_variable
from tfgpu.core.state.array_slices import ArraySlices
from tfgpu.errors import InputError
from tfgpu.parallel import weight_files

_log = logging.getLogger(__name__)
_LISTED = 8
"""How many names of a kind an error lists."""

Names = Mapping[str, object] | Callable[[str], object]
Arrays = Mapping[str, ArraySlices]


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Makes models without memory for their variables; `shard` or `apply` then creates the variables on the devices.

    They are created one at a time: each gets its initial value in the host's memory and is cut into shards. So a
    process needs memory for its share of the model and for the largest variable. `load_weights` then reads a file into
    the shards.

    Example:
        >>> from tfgpu.parallel import Mesh, apply
        >>> with deferred():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        >>> model = apply(model, Mesh(data=2), zero=3)
        >>> model.count_params()
        40
    """
    with variables.deferred():
        yield


def load_weights(
    model: keras.Model, path: str | Path, *, names: Names | None = None, partial: bool = False
) -> keras.Model:
    """Gives a model the weights of a file, one array at a time, each read by the slices that a device holds.

    Besides its own share, a process holds one array at most, and the copies of it that TensorFlow makes to assign it;
    of a variable that is sharded over replicas (ZeRO stage 3) or split over devices, only the part that is assigned. On
    several workers each reads the file for itself, from its own disk or a shared one.

    Args:
        model: built; spread by `place`, `pipeline`, `tensor`, `apply` or `shard` before, replicated, or on one device.
        path: a `.safetensors` file, an index of several (`*.safetensors.index.json`), a folder with either, such as a
            snapshot of Hugging Face's hub; or a `.keras`, `.weights.h5` or `.weights.json` (several of the former,
            saved with `max_shard_size`) file of the same model, of which only the weights are taken. For a model of
            KerasHub and a folder with the `config.json` of one that KerasHub converts, its converter says what goes
            where.
        names: for safetensors: what the file calls each variable, by the variable's path (`{"dense/kernel":
            "fc.weight"}`, or a function). A name with axes, `("fc.weight", (1, 0))`, transposes the array: PyTorch's
            linear layers are saved as (outputs, inputs), Keras's as (inputs, outputs). Variables without an entry go by
            their path, in which "." and "/" are the same. The model's own name may be left out of a path.
        partial: for safetensors: load what fits, and name the rest in the log.

    Returns:
        The same model.

    Raises:
        InputError: the file cannot be read, or something does not match: variables that the file does not have, arrays
            that the model does not have, other shapes. Then nothing has been assigned, except from Keras's own
            files.

    Example:
        >>> import tempfile, numpy as np, safetensors.numpy
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> safetensors.numpy.save_file({"head.kernel": np.ones([4, 2]), "head.bias": np.ones(2)}, path)
        >>> load_weights(model, path).get_weights()[1]
        array([1., 1.], dtype=float32)
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"There is no {path}. Give a .safetensors, .keras or .weights.h5 file, an index, or a folder.")
    if not model.built:
        raise InputError(f"{model.name!r} is not built, so it has no variables yet. Call it on an example first.")
    if path.name.endswith((".keras", ".weights.h5", weight_files.SHARDED)):
        if names is not None or partial:
            raise InputError("`names` and `partial` are for safetensors: a file of Keras goes by layers. Remove them.")
        _load_keras(model, path)
        return model
    arrays = weight_files.open_safetensors(weight_files.safetensors_in(path))
    config = (path if path.is_dir() else path.parent) / "config.json"
    found = keras_hub.converter_of(model, config) if names is None and config.is_file() else None
    if found is None:
        _load_named(model, arrays, path, names, partial)
    else:
        _convert(*found, config, arrays)
    return model


def _load_keras(model: keras.Model, path: Path) -> None:
    with weight_files.hdf5_in(path) as files:
        try:
            saving.load_state(model, files, weight_files.slices_of)
        except ValueError as error:
            raise InputError(
                f"{path} does not match {model.name!r}: {error}. Build the model that was saved there."
            ) from error


def _convert(backbone: keras.Model, converter, config: Path, arrays: Arrays) -> None:
    try:
        keras_hub.convert(backbone, converter, config, arrays, lambda variable, value: variable.assign(value))
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{config.parent} does not match {backbone.name!r}, as KerasHub converts it: {error}. Build the model with "
            "the sizes of its config.json, or give `names`."
        ) from error


def _load_named(model: keras.Model, arrays: Arrays, path: Path, names: Names | None, partial: bool) -> None:
    variables = {variable.path: variable for variable in sharded_variable.merged(model.weights)}
    if len(variables) < len(sharded_variable.merged(model.weights)):
        raise InputError(f"{model.name!r} has several variables of one path. Give its layers names of their own.")
    found = {each: _array_for(each, model.name, arrays, names) for each in variables}
    text = _differences(variables, found, arrays)
    if text and not partial:
        raise InputError(
            f"{path} does not match {model.name!r}: {text}. Say in `names` what the file calls each variable, or load "
            "what matches with partial=True."
        )
    if text:
        _log.warning("%s: loaded in part: %s.", path, text)
    for each, (_, array) in found.items():
        if array is not None and array.shape == tuple(variables[each].shape):
            variables[each].assign(array)


def _differences(variables: Mapping[str, keras.Variable], found: Mapping[str, tuple], arrays: Arrays) -> str:
    """What variables and arrays do not have in common; "" for nothing."""
    absent = [
        each if name == each else f"{each} (as {name!r})" for each, (name, array) in found.items() if array is None
    ]
    present = {each: (name, array) for each, (name, array) in found.items() if array is not None}
    left = sorted(arrays.keys() - {name for name, _ in present.values()})
    shapes = {each: (array.shape, tuple(variables[each].shape)) for each, (_, array) in present.items()}
    others = [f"{each}: {there} in the file, {here}" for each, (there, here) in shapes.items() if there != here]
    kinds = {"variables that the file does not have": absent, "arrays that the model does not have": left}
    return "; ".join(_listed(what, names) for what, names in {**kinds, "other shapes": others}.items() if names)


def _array_for(path: str, model_name: str, arrays: Arrays, names: Names | None) -> tuple[str, ArraySlices | None]:
    """What a file calls a variable, and the array, if it is there."""
    paths = list(dict.fromkeys((path, path.removeprefix(f"{model_name}/"))))
    asked = () if names is None else (names(each) if callable(names) else names.get(each) for each in paths)
    wanted = next((each for each in asked if each is not None), None)
    name, axes = wanted if isinstance(wanted, tuple) else (wanted, None)
    if name is None:
        spelled = [form for each in paths for form in (each, each.replace("/", "."))]
        name = next((each for each in spelled if each in arrays), path)
    array = arrays.get(name)
    if array is not None and axes is not None:
        if sorted(axes) != list(range(array.ndim)):
            raise InputError(f"`names` has axes {axes} for {name!r}, which has {array.ndim}. Name each axis once.")
        array = array.transposed(axes)
    return name, array


def _listed(what: str, found: list[str]) -> str:
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return f"{what}: {', '.join(found[:_LISTED])}{more}"
