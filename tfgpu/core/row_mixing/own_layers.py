"""Layers of the user's own: each gives every row its own number, or is computed on all rows.

The first time that a step meets such a layer it is tried (`layer_trial`). A replica computes one that gives each row
its own number from its rows. One that looks at several rows gets those of all replicas and computes what one device
does, state and added losses included; the replica goes on with its rows of the outputs. What was found is kept by the
layer's class, settings and inputs, so equal blocks are tried once. All workers find the same: nothing in a trial
depends on time or on the data.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat import layers as private_layers
from tfgpu.compat import slots
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, replica_attributes, step_context
from tfgpu.core.randomness import draw_sizes
from tfgpu.core.row_mixing import choices, fingerprints, gathering, verdicts
from tfgpu.core.row_mixing.trials import isolation, layer_calls, step_recorder
from tfgpu.core.row_mixing.trials.layer_calls import Needs
from tfgpu.core.row_mixing.trials.layer_trial import LayerTrial, Verdict
from tfgpu.core.state import layer_state, python_state
from tfgpu.core.trial_cache import code_digest, store
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)
_is_proven = step_context.Slot("own_layers.is_proven")  # the layer that calls is right on this replica's rows
_plain_outputs = step_context.Slot("own_layers.plain_outputs")  # of layers on all rows: those without rows
_BY_ELEMENT = frozenset({"Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Cast", "Negative", "Sqrt", "Exp"})
_CALLABLES = ("function", "activation", "recurrent_activation", "activity_regularizer")
_WITHIN = ("cell", "cells", "layer", "layers", "forward_layer", "backward_layer")
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)  # of a number for each output


def give_own_layers_all_rows() -> None:
    """Tries layers of the user's own, and computes on all rows those that need them.

    Stock Keras, like `tf.distribute`, computes each from one replica's rows.
    """

    @wrap("keras.layers.Layer.__call__")
    def call(stock, self, *args, **kwargs):
        if draw_sizes.are_watched() and (step_context.current().recorder is not None or not is_own(self)):
            with draw_sizes.of_other_code():
                return call_known(stock, self, *args, **kwargs)
        return call_known(stock, self, *args, **kwargs)

    def call_known(stock, self, *args, **kwargs):
        recorder = step_recorder.splitting()
        if recorder is not None and is_own(self):
            return recorder.by_parts(functools.partial(stock, self), args, kwargs)
        if _is_proven.get() or not gathering.is_in_step():
            return stock(self, *args, **kwargs)
        if step_context.current().is_trying:
            return layer_calls.within_trial(stock, self, args, kwargs) if is_own(self) else stock(self, *args, **kwargs)
        if not gathering.may_meet() or not is_own(self) or not _is_of_replica(args, kwargs):
            return stock(self, *args, **kwargs)
        verdict = _needed(self, args, kwargs)
        if verdict.needs is Needs.ALL:
            return _on_all_rows(stock, self, args, kwargs, verdict)
        is_proven = contextlib.nullcontext() if verdict.needs is Needs.ITS_PARTS else _is_proven.set_to(True)
        with is_proven, draw_sizes.known(verdict.sizes):
            return stock(self, *args, **kwargs)


def needs_all_rows(layer: keras.layers.Layer, args: tuple, kwargs: dict) -> bool:
    """Whether a replica's step would compute this call of a layer on the rows of all replicas."""
    is_tried = not _is_proven.get() and gathering.is_in_step() and not step_context.current().is_trying
    if not is_tried or not gathering.may_meet() or not is_own(layer) or not _is_of_replica(args, kwargs):
        return False
    return _needed(layer, args, kwargs).needs is Needs.ALL


def is_own(layer: keras.layers.Layer) -> bool:
    """Whether a layer must be tried: its class, or a function that it was given, is the user's code.

    So must a functional model with operations on tensors between its layers, and a Keras layer that works along the
    batch axis, such as `Softmax(axis=0)`.
    """
    cls = type(layer)
    if isinstance(layer, keras.Model):
        if _root(cls.call) not in ("keras", "tfgpu"):
            return True
        graph = private_layers.graph_of(layer)
        return graph is not None and any(_is_own_operation(each) for each in graph.operations)
    if _root(cls) not in ("keras", "tfgpu") or _works_along_rows(layer):
        return True
    given = [value for name in _WITHIN for value in _listed(vars(layer).get(name))]
    if any(is_own(each) for each in given if isinstance(each, keras.layers.Layer)):
        return True
    return any(_is_own_callable(vars(layer).get(name)) for name in _CALLABLES)


def _listed(value: object) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_own_callable(value: object) -> bool:
    """Whether a layer's function is the user's code, a partial, or a penalty that may compare rows."""
    if isinstance(value, keras.layers.Layer):
        return is_own(value)
    if isinstance(value, keras.regularizers.Regularizer) and not isinstance(value, _SUMS):
        return True
    return callable(value) and _root(value) not in ("keras", "tfgpu")


def has_own(model: keras.Model) -> bool:
    """Whether a model, or a layer within it, is code of the user's."""
    return any(map(is_own, private_layers.layers_within(model)))


def _works_along_rows(layer: keras.layers.Layer) -> bool:
    """Whether the axes of a Keras layer include the batch axis, counted from either end."""
    given = [vars(layer).get(name) for name in ("axis", "axes")]
    if isinstance(layer, keras.layers.MultiHeadAttention):
        given.append(layer.get_config()["attention_axes"])
    axes = [axis for axis in keras.tree.flatten(given) if isinstance(axis, int)]
    if 0 in axes:
        return True
    if all(axis >= -1 for axis in axes):  # no batch has rows alone
        return False
    try:
        inputs = keras.tree.flatten(layer.input)
    except (AttributeError, ValueError):  # it was never called on symbolic tensors
        return False
    return any(len(each.shape) == -axis for each in inputs for axis in axes)


def _is_own_operation(operation: keras.Operation) -> bool:
    if isinstance(operation, keras.layers.Layer):  # the user's own is tried by itself
        return _root(type(operation)) in ("keras", "tfgpu") and _works_along_rows(operation)
    return type(operation).__name__ not in _BY_ELEMENT


def _root(thing: object) -> str:
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return module.split(".")[0]


def _is_of_replica(args: tuple, kwargs: dict) -> bool:
    """Whether these are tensors of a step, and not what Keras builds a model with."""
    leaves = keras.tree.flatten((args, kwargs))
    return not any(isinstance(leaf, keras.KerasTensor) for leaf in leaves)


def _needed(layer: keras.layers.Layer, args: tuple, kwargs: dict) -> Verdict:
    """What a layer of a step needs, never `UNKNOWN`."""
    _build(layer, args, kwargs)
    verdict = _verdict(layer, args, kwargs)
    replica_attributes.note([layer], verdict.changes, private_layers.layers_within(layer))
    piece = _piece(layer, verdict, args, kwargs)
    told = vars(slots.of(layer)).setdefault("rows_told", [])
    if verdict.changes and verdict.changes not in told:
        told.append(verdict.changes)
        replica_attributes.tell(_named(layer), verdict, tf.distribute.get_strategy(), is_eager=tf.executing_eagerly())
    if verdict.why and verdict.why not in told:
        told.append(verdict.why)
        _tell(layer, verdict, piece)
    return _of_unproven(layer, verdict, piece) if verdict.needs is Needs.UNKNOWN else verdict


def _piece(layer: keras.layers.Layer, verdict: Verdict, args: tuple, kwargs: dict) -> verdicts.Piece:
    """What is noted of a layer."""
    needs, source = verdict.needs, verdicts.MARKED if choices.of(layer) else verdicts.TRIED
    becomes = {Needs.ITS_ROWS: verdicts.BY_ROWS, Needs.ITS_PARTS: verdicts.BY_PARTS}.get(needs, verdicts.ON_ALL_ROWS)
    if needs is Needs.UNKNOWN:
        way, source = choices.unproven(), verdicts.UNPROVEN
        if way == "warn" or (way == "gather" and not gathering.can_travel((args, kwargs))):  # then it is by rows
            becomes = verdicts.BY_ROWS
        elif way == "refuse":
            becomes = verdicts.REFUSED
    size = verdicts.bytes_a_row(gathering.with_rows((args, kwargs))) if becomes == verdicts.ON_ALL_ROWS else 0
    name = f"layer {layer.name!r} ({type(layer).__name__})"
    return verdicts.note(verdicts.Piece(name, becomes, verdict.why, source, size, verdicts.rows_of_batch()))


def _build(layer: keras.layers.Layer, args: tuple, kwargs: dict) -> None:
    """Makes the variables that the layer's first call makes: a trial makes none. The call's graph is dropped.

    What it counts in Python, it has not counted then.
    """
    if slots.get(layer, "rows_built") or all(each.built for each in private_layers.layers_within(layer)):
        return
    slots.of(layer).rows_built = True
    kept = python_state.Kept([layer], private_layers.that_build_nothing(layer))

    def call():
        with step_context.as_one_device(batch_rows.local_rows()), layer_state.assigning_alike():
            layer(*args, **kwargs)

    tf.function(call, autograph=False).get_concrete_function()
    private_layers.clear_losses(layer)
    kept.put_back_counts()


def _verdict(layer: keras.layers.Layer, args: tuple, kwargs: dict) -> Verdict:
    """What a layer needs, tried where it is not known."""
    choice = choices.of(layer)
    if choice is not None:
        return Verdict(Needs.ITS_ROWS if choice == choices.BY_ROWS else Needs.ALL)
    known = vars(slots.of(type(layer))).setdefault("verdicts", {})
    call = fingerprints.of_call(layer, args, kwargs)
    changes = slots.get(type(layer), "changes_in_python", False)
    key = call, None if changes else fingerprints.of_code(layer)
    if key not in known:
        verdict = _tried(layer, args, kwargs)
        if verdict.changes:
            slots.of(type(layer)).changes_in_python, key = True, (call, None)
        known[key] = verdict
    return known[key]


def _tried(layer: keras.layers.Layer, args: tuple, kwargs: dict) -> Verdict:
    """What the trial of a layer finds, in this run or in an earlier one."""

    def pack(verdict: Verdict) -> dict | None:
        if verdict.needs is Needs.UNKNOWN or verdict.sizes.fixed:
            return None
        found = dataclasses.asdict(verdict) | {"needs": verdict.needs.name}
        return {name: value for name, value in found.items() if name != "sizes"}

    def unpack(needs: str, **found) -> Verdict:
        listed = {name: tuple(each) if isinstance(each, list) else each for name, each in found.items()}
        return Verdict(Needs[needs], **listed)

    things = layer, code_digest.rows_of((args, kwargs)), private.is_training()
    return store.found("layer", things, LayerTrial(layer, args, kwargs, _verdict).run, pack, unpack)


def _of_unproven(layer: keras.layers.Layer, verdict: Verdict, piece: verdicts.Piece) -> Verdict:
    """What becomes of a layer that could not be tried."""
    if piece.verdict == verdicts.REFUSED:
        raise InputError(
            f"{_named(layer)} could not be tried ({verdict.why}), so it is unknown whether it mixes rows of the batch, "
            "and the strategy's `unproven` is 'refuse'. Mark its class with `tfgpu.by_rows` or `tfgpu.on_all_rows`, or "
            "use `unproven='gather'`."
        )
    return Verdict(Needs.ITS_ROWS if piece.verdict == verdicts.BY_ROWS else Needs.ALL)


def _tell(layer: keras.layers.Layer, verdict: Verdict, piece: verdicts.Piece) -> None:
    """One line for a layer that is not simply right on each replica's rows."""
    named = _named(layer)
    if verdict.needs is Needs.ITS_ROWS and verdict.why == "random":
        _log.warning(
            "%s draws random numbers without `keras.random`, so replicas draw other numbers than one device. Use "
            "`keras.random` with a `keras.random.SeedGenerator`.",
            named,
        )
    if verdict.needs is Needs.UNKNOWN:
        is_by_rows = piece.verdict == verdicts.BY_ROWS
        what = "each replica computes it from its own rows" if is_by_rows else "it is computed on all rows"
        _log.warning(
            "%s could not be tried (%s), so it is unknown whether it mixes rows of the batch, and %s. Mark its class "
            "with `tfgpu.by_rows` or `tfgpu.on_all_rows`.",
            named,
            verdict.why,
            what,
        )
    if verdict.needs is Needs.ALL and not verdict.is_linear and choices.unproven() == "refuse":
        raise InputError(
            f"The gradient of {named[0].lower()}{named[1:]} is not linear: a loss's gradient is not the sum of its "
            "rows' gradients, so training on replicas would differ from one device's. The strategy's `unproven` is "
            "'refuse'. Work on gradients in a `train_step` of your own."
        )
    if verdict.needs is Needs.ALL:
        _log.warning(
            "%s mixes rows of the batch: %s. To match one device, each replica computes it on all rows, and its inputs "
            "are sent in every step (%s). %s",
            named,
            verdict.why,
            piece.traffic,
            _advice(verdict.why),
        )
        if not verdict.is_linear:
            _log.warning(
                "The gradient of %s is not linear: a loss's gradient is not the sum of its rows' gradients. Each "
                "replica takes the gradient of its own rows' loss, so training differs from one device's. To work on "
                "the gradient of all rows, write a `train_step`.",
                named[0].lower() + named[1:],
            )


def as_they_are():
    """For the length of the block layers are called on the rows that they get, and not tried."""
    return _is_proven.set_to(True)


@contextlib.contextmanager
def noting_plain_outputs() -> Iterator[list]:
    """Within the block, the outputs without rows of the batch of layers that are computed on all rows."""
    noted: list = []
    with _plain_outputs.set_to(noted):
        yield noted


def _advice(why: str) -> str:
    if "keeps" in why:
        return 'A count or a sum sends nothing: `add_weight(..., aggregation="sum")` and `assign_add`.'
    if "add_loss" in why:
        return "A penalty that is a mean over rows sends nothing."
    return "If it treats each row separately, mark its class with `tfgpu.by_rows`."


def _named(layer: keras.layers.Layer) -> str:
    return f"The layer {layer.name!r} ({type(layer).__name__})"


def _on_all_rows(stock, layer: keras.layers.Layer, args: tuple, kwargs: dict, verdict: Verdict):
    """Calls a layer on the rows of all replicas, as one device does; gives this replica's rows of the outputs."""
    if not gathering.with_rows((args, kwargs)) and gathering.can_travel((args, kwargs)):
        return stock(layer, *args, **kwargs)  # of weights alone
    args, kwargs = gathering.of_all_replicas((args, kwargs), _named(layer))
    within = private_layers.layers_within(layer)
    before = isolation.tensors_in(within)
    with gathering.as_whole_batch(layer.variables):
        outputs = stock(layer, *args, **kwargs)
    for (at, name), value in isolation.tensors_in(within).items():
        if before.get((at, name)) is not value:
            vars(within[at])[name] = gathering.own_rows(value)
    leaves = keras.tree.flatten(outputs)
    have_rows = verdict.have_rows if len(verdict.have_rows) == len(leaves) else [None] * len(leaves)
    cut = [gathering.own_rows(leaf, has) for leaf, has in zip(leaves, have_rows, strict=True)]
    if (noted := _plain_outputs.get()) is not None:
        noted += [own for leaf, own in zip(leaves, cut, strict=True) if own is leaf]
    return keras.tree.pack_sequence_as(outputs, cut)
