"""A digest of what a piece of code would do: of functions and objects by their code, and by the values that they use.

Two runs of one script give one digest; a change of the code, of a setting or of a library's version gives another.
Names of files, line numbers, comments and the values of weights have no part in it. What cannot be known so (a file
that is read, a setting in the environment, an object of a library that holds more than it shows) has no digest.
"""

import builtins
import dataclasses
import dis
import enum
import functools
import hashlib
import json
import logging
import sys
import types
from collections.abc import Iterable, Mapping, Sequence, Set

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import attributes, slots, training, variables
from tfgpu.compat import keras as private
from tfgpu.compat import layers as private_layers
from tfgpu.core.row_mixing.trials.drawn_inputs import spec_of
from tfgpu.core.trial_cache import libraries
from tfgpu.core.trial_cache.libraries import Unknown

_MOST, _MOST_BYTES = 20_000, 1 << 26  # things, and bytes of an array
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice)
_log = logging.getLogger(__name__)
_IMPURE = frozenset("open input eval exec compile __import__ globals locals vars".split())
_NOT_CODE = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __annotations__ __abstractmethods__ _abc_impl _tfgpu __firstlineno__ "
    "__static_attributes__ __orig_bases__ __parameters__ __dataclass_params__ __annotate__ __annotate_func__ "
    "__annotations_cache__".split()
)


def of(*things: object, weights: bool = False, skips_unknown: bool = False) -> str:
    """The digest, as 32 letters.

    Args:
        things: functions, classes, layers, models, losses, metrics, arrays, plain values and structures of them.
        weights: it counts which variables are 0 all over, which may hide from a trial what depends on them.
        skips_unknown: of what has no digest, only the class counts.

    Raises:
        Unknown: one of them, or something that it uses, has none.

    Example:
        >>> of(lambda x: x + 1) == of(lambda x: x + 1), of(lambda x: x + 1) == of(lambda x: x + 2)
        (True, False)
    """
    writer = _Writer(skips_unknown)
    try:
        writer.add(things)
        if weights:
            writer.add_zeros()
    except RecursionError as error:
        raise Unknown("it is nested too deeply") from error
    return writer.digest()


def of_or_none(*things: object, **options: bool) -> str | None:
    """The digest; None for code without one. It may be called where a step is traced."""
    try:
        with tf.init_scope():
            return of(*things, **options)
    except Exception as error:  # also of an object of the user's, in a property or `__eq__`
        _log.debug("No digest: %s: %s", type(error).__name__, error)
        return None


def rows_of(structure: object) -> object:
    """A structure of arguments for a digest: tensors are described by dtype and shape without rows, masks included."""
    return keras.tree.map_structure(
        lambda leaf: dataclasses.astuple(spec_of(leaf)) if isinstance(leaf, tf.Tensor) else leaf, structure
    )


class _Writer:
    def __init__(self, skips_unknown: bool = False):
        self._skips_unknown = skips_unknown
        self._hash = hashlib.blake2b(digest_size=16)
        self._seen: dict[int, tuple[int, object]] = {}
        self._variables: list[keras.Variable | tf.Variable] = []

    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, thing: object) -> None:
        if type(thing) in _PLAIN:
            return self._write(type(thing).__name__, repr(thing))
        if id(thing) in self._seen:
            return self._write("again", self._seen[id(thing)][0])
        if len(self._seen) > _MOST:
            raise Unknown("it uses too many things")
        self._seen[id(thing)] = len(self._seen), thing  # kept, so that no other gets its `id`
        write = next((way for kinds, way in _WAYS if isinstance(thing, kinds)), _Writer._add_instance)
        try:
            return write(self, thing)
        except Unknown:
            if not self._skips_unknown:
                raise
            return self._write("unknown", type(thing).__qualname__)

    def add_zeros(self) -> None:
        """Which of the variables that were added are 0 all over."""
        held = [variables.held(each) if isinstance(each, keras.Variable) else each for each in self._variables]
        for each in held:
            is_number = each is not None and (each.dtype.is_floating or each.dtype.is_integer)
            self._write(is_number and not int(tf.math.count_nonzero(variables.own_copy(each))))

    def _write(self, *words: object) -> None:
        for word in words:
            content = str(word).encode("utf-8", "surrogatepass")
            self._hash.update(f"{len(content)}:".encode() + content)

    def _add_all(self, kind: str, things: Iterable) -> None:
        things = list(things)
        self._write(kind, len(things))
        for each in things:
            self.add(each)

    def _add_sequence(self, thing: Sequence) -> None:
        self._add_kind(thing)
        self._add_all("sequence", thing)

    def _add_mapping(self, thing: Mapping) -> None:
        self._add_kind(thing)
        self._add_all("mapping", [each for pair in dict.items(thing) for each in pair])

    def _add_kind(self, thing: object) -> None:
        """Of a container whose class is the user's: what it may do besides."""
        if not libraries.has_module(type(thing).__module__):
            self.add(type(thing))
            self.add(dict(getattr(thing, "__dict__", {})))

    def _add_set(self, thing: Set) -> None:
        self._write("set", *sorted(of(each) for each in thing))

    def _add_array(self, thing: np.ndarray | np.generic) -> None:
        array = np.asarray(thing)
        if array.dtype.hasobject or array.nbytes > _MOST_BYTES:
            raise Unknown("it uses a large array")
        self._write("array", array.dtype.str, array.dtype.name, array.shape)
        self._hash.update(np.ascontiguousarray(array).tobytes())

    def _add_tensor(self, thing: tf.Tensor) -> None:
        if not hasattr(thing, "numpy") or thing.dtype in (tf.variant, tf.resource):
            raise Unknown("it uses a tensor without a value")
        self._write("tensor", thing.dtype.name)
        self.add(thing.numpy())

    def _add_variable(self, thing: keras.Variable | tf.Variable) -> None:
        words = [getattr(thing, name, None) for name in ("trainable", "aggregation", "synchronization")]
        self._variables.append(thing)
        self._write("variable", thing.dtype, tuple(thing.shape), *words)

    def _add_code(self, code: types.CodeType) -> None:
        self._write("code", code.co_name, code.co_flags, code.co_argcount, code.co_kwonlyargcount)
        self._write(code.co_code.hex(), code.co_exceptiontable.hex() if hasattr(code, "co_exceptiontable") else "")
        self._write(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._add_all("constants", code.co_consts)

    def _add_function(self, function: types.FunctionType) -> None:
        inner = getattr(function, "__wrapped__", None)
        if libraries.has_file(function.__code__.co_filename):  # a decorator's has the module of what it wraps
            return self._add_of_library(function) if inner is None else self.add(inner)
        self._add_code(function.__code__)
        self._add_all("defaults", [function.__defaults__, function.__kwdefaults__, _choice(function)])
        codes = list(_codes(function.__code__))
        for value in map(_content, function.__closure__ or ()):
            if not isinstance(value, types.ModuleType):
                self.add(value)
            for code in codes if isinstance(value, types.ModuleType) else ():  # imported within an outer function
                self._add_module(value, code)
        for code in codes:
            self._add_globals(code, function.__globals__)
        return None

    def _add_globals(self, code: types.CodeType, known: dict) -> None:
        """What a function finds by global names, and what it imports."""
        stored = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"}  # in a class
        for each in dis.get_instructions(code):
            if each.opname.startswith("IMPORT_NAME"):
                if not each.argval or str(each.argval).split(".")[0] not in sys.modules:
                    raise Unknown(f"it imports {each.argval!r}")
                self._add_module(sys.modules[str(each.argval).split(".")[0]], code)
            if each.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or each.argval in stored:
                continue
            self._write("global", each.argval)
            if each.argval in known:
                value = known[each.argval]
                self._add_module(value, code) if isinstance(value, types.ModuleType) else self.add(value)
            elif each.argval in _IMPURE or not hasattr(builtins, str(each.argval)):
                raise Unknown(f"it uses {each.argval!r}")

    def _add_module(self, module: types.ModuleType, code: types.CodeType) -> None:
        """A module that a function uses: of one of the user's, what the function may use of it."""
        if libraries.has_module(module.__name__):
            return self._write("module", module.__name__, libraries.version_of(module.__name__))
        for name in code.co_names:
            if name in vars(module):
                self._write("of module", name)
                self.add(vars(module)[name])
        return None

    def _add_of_library(self, thing: object) -> None:
        module = getattr(thing, "__module__", None) or ""
        name = getattr(thing, "__qualname__", type(thing).__name__)
        self._write("library", module, name, libraries.version_of(module))

    def _add_plain(self, thing: object) -> None:
        self._write(type(thing).__name__, repr(thing))

    def _add_class(self, cls: type) -> None:
        if libraries.has_module(cls.__module__):
            return self._add_of_library(cls)
        self._write("class", cls.__qualname__, _choice(cls))
        for base in cls.__bases__:
            self.add(base)
        for name, value in vars(cls).items():
            if name not in _NOT_CODE:
                self._write(name)
                self.add(value)
        return None

    def _add_builtin(self, thing: object) -> None:
        owner = getattr(thing, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self.add(owner)
        elif not libraries.has_module(thing.__module__ or "builtins"):
            raise Unknown(f"it uses {thing!r}")
        self._write("builtin", thing.__qualname__)

    def _add_wrapper(self, thing: object) -> None:
        """Of a function: a partial, a method, a property, or a decorator's object."""
        names = ("__func__", "__self__", "func", "args", "keywords", "fget", "fset", "fdel", "python_function")
        self._add_all(type(thing).__name__, [getattr(thing, name) for name in names if hasattr(thing, name)])

    def _add_layer(self, layer: keras.layers.Layer) -> None:
        self.add(type(layer))
        self._write("layer", layer.dtype_policy.name, layer.trainable, _choice(layer))
        self._add_all("variables", private_layers.own_variables(layer))
        graph = private_layers.graph_of(layer) if isinstance(layer, keras.Model) else None
        if graph is not None:
            self._add_graph(graph)
        if isinstance(layer, keras.Model):
            self._add_compiled(layer)
        if libraries.has_module(type(layer).__module__) and not isinstance(layer, keras.Model):
            self._add_config(layer)
        elif not libraries.has_module(type(layer).__module__):
            self._add_attributes(layer, attributes.of_layer(isinstance(layer, keras.Model)))
        self._add_all("within", private_layers.layers_within(layer, include_self=False, recursive=False))

    def _add_graph(self, graph: keras.Model) -> None:
        """The calls of a functional model, each with the places of the tensors that it takes."""
        places = {id(tensor): at for at, tensor in enumerate(graph.inputs)}
        for node in private_layers.nodes_in_order(graph):
            self.add(node.operation)
            arguments = node.arguments
            leaves = [places.get(id(leaf), leaf) for leaf in keras.tree.flatten((arguments.args, arguments.kwargs))]
            self._add_all("arguments", [*leaves, *sorted(arguments.kwargs)])
            for tensor in node.outputs:
                places.setdefault(id(tensor), len(places))
        self._add_all("outputs", [places[id(tensor)] for tensor in graph.outputs])

    def _add_compiled(self, model: keras.Model) -> None:
        names = "optimizer", "loss", "loss_weights"
        self._add_all("compiled", [getattr(model, name, None) for name in names])
        self._add_all("metrics", training.given_metrics(model))

    def _add_operation(self, operation: keras.Operation) -> None:
        self.add(type(operation))
        self._add_attributes(operation, attributes.of_operation())

    def _add_config(self, thing: object) -> None:
        """Of an object of Keras's, which says all of itself."""
        try:
            self._write(json.dumps(_without_names(thing.get_config()), sort_keys=True))
        except Exception as error:
            raise Unknown(f"{type(thing).__name__} has no config") from error
        values = [value for name, value in sorted(vars(thing).items()) if not name.startswith("_tfgpu")]
        self._add_all("own code", [each for each in values if _is_code_of_user(each)])

    def _add_of_keras(self, thing: object) -> None:
        """A loss, a metric, an optimizer, a regularizer and so on."""
        self.add(type(thing))
        self.add(_choice(thing))
        if not libraries.has_module(type(thing).__module__):
            is_metric = isinstance(thing, keras.metrics.Metric)
            return self._add_attributes(thing, attributes.of_metric() if is_metric else frozenset({"name"}))
        if isinstance(thing, keras.losses.Loss):
            return self._add_attributes(thing, frozenset({"name"}))
        if isinstance(thing, private.MeanMetricWrapper):
            return self._add_all("metric", list(training.metric_function(thing)))
        return self._add_config(thing)

    def _add_attributes(self, thing: object, common: frozenset[str]) -> None:
        for name, value in sorted(vars(thing).items()):
            if name not in common | attributes.OF_TRACKING and not name.startswith("_tfgpu"):
                self._write("attribute", name)
                self.add(value)

    def _add_instance(self, thing: object) -> None:
        cls = type(thing)
        if isinstance(thing, enum.Enum):
            return self._add_all("enum", [cls.__qualname__, thing.name])
        if not hasattr(thing, "__dict__") or any(hasattr(each, "__slots__") for each in cls.__mro__[:-1]):
            raise Unknown(f"it uses an object of {cls.__name__}")
        if cls.__module__.split(".")[0] in ("tensorflow", "keras", "tfgpu") or libraries.is_of_python(cls.__module__):
            raise Unknown(f"it uses an object of {cls.__name__}")
        self.add(cls)
        self.add(_choice(thing))
        return self._add_attributes(thing, frozenset())


_OF_KERAS = (
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.regularizers.Regularizer,
    keras.initializers.Initializer,
    keras.constraints.Constraint,
)
_BUILTINS = types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType
_WRAPPERS = (
    types.MethodType,
    functools.partial,
    functools.cached_property,
    property,
    classmethod,
    staticmethod,
    tf.types.experimental.PolymorphicFunction,
)
_WAYS = (
    ((list, tuple), _Writer._add_sequence),
    (dict, _Writer._add_mapping),
    ((set, frozenset), _Writer._add_set),
    ((np.ndarray, np.generic), _Writer._add_array),
    ((keras.Variable, tf.Variable), _Writer._add_variable),
    (tf.Tensor, _Writer._add_tensor),
    (keras.random.SeedGenerator, lambda writer, thing: writer._write("seeds")),
    (keras.layers.Layer, _Writer._add_layer),
    (keras.Operation, _Writer._add_operation),
    (_OF_KERAS, _Writer._add_of_keras),
    (keras.DTypePolicy, lambda writer, thing: writer._write("policy", thing.name)),
    (types.CodeType, _Writer._add_code),
    (types.FunctionType, _Writer._add_function),
    (type, _Writer._add_class),
    ((types.GenericAlias, types.UnionType), _Writer._add_plain),
    (_WRAPPERS, _Writer._add_wrapper),
    ((*_BUILTINS, np.ufunc), _Writer._add_builtin),
    ((tf.DType, np.dtype, tf.TensorShape, tf.TypeSpec), _Writer._add_plain),
    (tf.distribute.Strategy, lambda writer, thing: writer._write(type(thing).__name__, thing.num_replicas_in_sync)),
    (types.SimpleNamespace, lambda writer, thing: writer._add_attributes(thing, frozenset())),
    (logging.Logger, lambda writer, thing: writer._write("logger")),
)
"""How a thing is written, by its class."""


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return "empty"


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """A function's code and that of the functions within."""
    found = [code]
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found += _codes(each)
    return found


def _is_code_of_user(value: object) -> bool:
    """Whether a config says the name of a value alone: of a function, or of an object of a class of the user's."""
    return isinstance(value, (types.FunctionType, *_WRAPPERS)) or not libraries.has_module(type(value).__module__)


def _choice(thing: object) -> object:
    """The user's `by_rows` or `on_all_rows`, on the thing itself."""
    return slots.get(thing, "rows_choice")


def _without_names(config: object) -> object:
    if isinstance(config, dict):
        return {key: _without_names(value) for key, value in config.items() if key not in ("name", "shared_object_id")}
    return [_without_names(each) for each in config] if isinstance(config, (list, tuple)) else config
