"""A stateful RNN's states, one for each row of the batch: each replica continues its rows, and keeps all states."""

import keras
import tensorflow as tf

from tfgpu.compat.keras import in_symbolic_scope
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, step_context
from tfgpu.core.row_mixing import gathering, row_sums
from tfgpu.core.state import layer_state
from tfgpu.errors import InputError


def keep_states_of_all_rows() -> None:
    """Gives each replica the states of its rows, and each replica's variables the states of all rows.

    Stock Keras refuses a replica's rows, because the states have the whole batch's.
    """

    @wrap("keras.layers.RNN.call")
    def call(stock, self, sequences, initial_state=None, mask=None, training=False):
        own = {"initial_state": initial_state, "mask": mask, "training": training}
        if not self.stateful:
            return _keeping_own(stock, self, sequences, **own)
        if in_symbolic_scope() and tf.distribute.get_strategy().num_replicas_in_sync > 1:
            return _keeping_own(stock, _stateless(self, self.return_state), sequences, **own)  # Keras builds the model
        if (tried := step_context.current().trial_rows) is not None:
            return _on_tried_rows(stock, self, sequences, tried, own)
        variables = keras.tree.flatten(self.states)
        if not gathering.may_meet() or sequences.shape[0] == variables[0].shape[0]:
            for state in variables if step_context.step() is not None else ():  # of this replica's rows
                layer_state.mark_as_differing(state)
            return _keeping_own(stock, self, sequences, **own)
        gathering.check_can_meet(f"The stateful layer {self.name!r}")
        sequences = _checked(self.name, variables[0].shape[0], sequences)
        if initial_state is None:
            own["initial_state"] = keras.tree.map_structure(_rows_of(sequences), self.states)
        output, *states = _keeping_own(stock, _stateless(self, True), sequences, **own)
        _assign(variables, keras.tree.flatten(states))
        return (output, *states) if self.return_state else output


def _on_tried_rows(stock, layer, sequences: tf.Tensor, tried: step_context.RowRange, own: dict):
    """Of rows of a trial, which are not as many as the states: each begins with one of the states; none is kept."""

    def begun(state: keras.Variable) -> tf.Tensor:
        rows = tf.shape(sequences)[0]
        each = tf.maximum(rows // tried.local, 1)
        return tf.gather(tf.convert_to_tensor(state), (tried.offset * each + tf.range(rows)) % state.shape[0])

    if own["initial_state"] is None:
        own["initial_state"] = keras.tree.map_structure(begun, layer.states)
    return _keeping_own(stock, _stateless(layer, layer.return_state), sequences, **own)


def _checked(name: str, states: int, sequences: tf.Tensor) -> tf.Tensor:
    """The sequences; an error where the batch has another number of rows than the layer has states."""
    total = batch_rows.known_rows().total
    said = (
        f"The stateful layer {name!r} has states for batches of {states} rows, but this batch has another number. Drop "
        "the incomplete last batch with `batch(..., drop_remainder=True)`, or use a multiple of `batch_size` rows."
    )
    if (known := tf.get_static_value(total)) is not None and known != states:
        raise InputError(said)
    if known is not None:
        return sequences
    with tf.control_dependencies([tf.debugging.assert_equal(total, states, said)]):
        return tf.identity(sequences)


def _keeping_own(stock, layer, *args, **kwargs):
    with step_context.scope(keeps_own_state=True):
        return stock(layer, *args, **kwargs)


def _stateless(layer: keras.layers.RNN, return_state: bool) -> keras.layers.RNN:
    """A stand-in with the same cell and weights, that assigns no states.

    Replicas run in threads, so the layer itself is not changed.
    """
    found = object.__new__(type(layer))
    vars(found).update(vars(layer), stateful=False, return_state=return_state)
    return found


def _rows_of(sequences: tf.Tensor):
    return lambda state: row_sums.own_rows(tf.convert_to_tensor(state), sequences)


def _assign(variables: list, states: list[tf.Tensor]) -> None:
    pairs = zip(variables, states, strict=True)
    whole = [row_sums.all_rows(tf.cast(state, variable.dtype)) for variable, state in pairs]
    with layer_state.assigning_alike():
        for variable, value in zip(variables, whole, strict=True):
            variable.assign(tf.stop_gradient(value))
