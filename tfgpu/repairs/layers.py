"""Layers' state and attributes under replicas, and variables that are first created inside a replica."""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfgpu.compat import layers
from tfgpu.compat.patch import replace, wrap
from tfgpu.core import batch_sharding, replica_attributes, replication, step_context, worker_rows
from tfgpu.core.state import layer_state, rnn_states
from tfgpu.repairs import Repair, probes, probing


def create_variables_outside_replicas() -> None:
    """Creates a variable once, outside the replicas, if a model is built by its first call inside a replica."""

    @wrap("Variable.initialize")
    def initialize(stock, self, value):
        ctx = replication.replica_context()
        eager = tf.executing_eagerly() and not tf.inside_function()
        if ctx is None or isinstance(value, tf.Variable) or (eager and step_context.step() is None):
            return stock(self, value)
        if tf.is_tensor(value) and (known := tf.get_static_value(value)) is not None:
            value = known  # Keras has made a tensor of a Python number, in a graph that does not exist outside
        replication.run_cross_replica(ctx.strategy, lambda: stock(self, value))


def compute_on_stand_in_rows() -> None:
    """In a hand-written loop, pools and convolves a stand-in row if a replica has no rows, and drops the result.

    A batch with fewer rows than replicas leaves some replicas without rows. TensorFlow's mirrored padding (in `stft`
    too), patches and CTC fail there, and so do Keras's HashedCrossing and `map`.
    """
    for name in ("max_pool", "max_pool3d", "max_pool_with_argmax", "fractional_max_pool", "fractional_avg_pool"):
        wrap(f"gen_nn_ops.{name}")(_on_rows)
    for name in ("average_pool", "adaptive_max_pool", "conv", "depthwise_conv", "separable_conv", "conv_transpose"):
        wrap(f"nn.{name}")(_on_rows)
    wrap("gen_array_ops.extract_image_patches")(_on_rows)
    wrap("tf.extract_volume_patches")(_on_rows)
    wrap("image.elastic_transform")(_on_rows)

    @wrap("gen_array_ops.mirror_pad")
    def mirror_pad(stock, input, paddings, *args, **kwargs):
        if not _may_lack_rows():
            return stock(input, paddings, *args, **kwargs)
        tensor, widths = tf.convert_to_tensor(input), tf.get_static_value(tf.convert_to_tensor(paddings))
        if widths is None or widths[:1].any():  # it pads the first axis, which is not one of rows
            return stock(input, paddings, *args, **kwargs)
        return _on_rows(stock, tensor, paddings, *args, **kwargs)

    @wrap("HashedCrossing.call")
    def cross(stock, self, inputs):
        if not _may_lack_rows():
            return stock(self, inputs)
        values = [tf.convert_to_tensor(each) for each in inputs]
        if not values[0].shape.rank or values[0].shape[0]:
            return stock(self, inputs)
        found = stock(self, [batch_sharding.with_stand_in_row(each) for each in values])
        return worker_rows.sliced(found, 0, tf.shape(values[0])[0])  # it may be sparse

    _compute_ctc()
    _compute_ctc_of_tensorflow()
    _decode_ctc_of_tensorflow()
    _reduce_sparse()
    _take_empty_tensors()


def _compute_ctc() -> None:
    @wrap("nn.ctc_decode")
    def ctc_decode(stock, inputs, sequence_lengths, *args, **kwargs):
        values = [tf.convert_to_tensor(each) for each in (inputs, sequence_lengths)]
        if _has_rows(values[0]):
            return stock(*values, *args, **kwargs)
        paths, scores = stock(*map(batch_sharding.with_stand_in_row, values), *args, **kwargs)
        rows = tf.shape(values[0])[0]
        return paths[:, :rows], scores[:rows]

    @wrap("nn.ctc_loss")
    def ctc_loss(stock, target, output, target_length, output_length, *args, **kwargs):
        inputs = [tf.convert_to_tensor(each) for each in (target, output, target_length, output_length)]
        if _has_rows(inputs[0]):
            return stock(*inputs, *args, **kwargs)
        found = stock(*map(batch_sharding.with_stand_in_row, inputs), *args, **kwargs)
        return found[: tf.shape(inputs[0])[0]]


def _compute_ctc_of_tensorflow() -> None:
    def sums_of_no_rows(logits: tf.Tensor, batch: int) -> tf.Tensor:
        return tf.reduce_sum(logits, [axis for axis in range(3) if axis != batch])  # of no rows, but with a gradient

    @wrap("ctc_ops.ctc_loss_dense")
    def loss_of_dense(stock, labels, logits, label_length, logit_length, logits_time_major=True, *args, **kwargs):
        logits, batch = tf.convert_to_tensor(logits), int(bool(logits_time_major))
        values = labels, logits, label_length, logit_length, logits_time_major
        if not _may_lack_rows() or logits.shape.rank != 3:
            return stock(*values, *args, **kwargs)
        return _if_rows(
            tf.shape(logits)[batch], lambda: stock(*values, *args, **kwargs), lambda: sums_of_no_rows(logits, batch)
        )

    for name in ("ctc_loss", "ctc_loss_v2"):

        @wrap(f"gen_ctc_ops.{name}")
        def loss_of_sparse(stock, inputs, *args, **kwargs):
            if not _may_lack_rows():
                return stock(inputs, *args, **kwargs)
            logits = tf.convert_to_tensor(inputs)
            return _if_rows(
                tf.shape(logits)[1],
                lambda: tuple(stock(logits, *args, **kwargs)),
                lambda: (sums_of_no_rows(logits, 1), tf.zeros_like(logits)),
            )


def _decode_ctc_of_tensorflow() -> None:
    def no_paths(count: int) -> list[tf.Tensor]:
        return [tf.zeros(shape, tf.int64) for shape in ((0, 2), (0,), (2,)) for _ in range(count)]

    @wrap("gen_ctc_ops.ctc_greedy_decoder")
    def decode_greedily(stock, inputs, *args, **kwargs):
        if not _may_lack_rows():
            return stock(inputs, *args, **kwargs)
        return _if_rows(
            tf.shape(inputs)[1],
            lambda: tuple(stock(inputs, *args, **kwargs)),
            lambda: (*no_paths(1), tf.zeros((0, 1), inputs.dtype)),
        )

    @wrap("gen_ctc_ops.ctc_beam_search_decoder")
    def decode_by_beams(stock, inputs, sequence_length, beam_width, top_paths, **kwargs):
        values = inputs, sequence_length, beam_width, top_paths
        if not _may_lack_rows():
            return stock(*values, **kwargs)
        *paths, scores = _if_rows(
            tf.shape(inputs)[1],
            lambda: tuple(tf.nest.flatten(tuple(stock(*values, **kwargs)))),
            lambda: (*no_paths(top_paths), tf.zeros((0, top_paths), inputs.dtype)),
        )
        return *(paths[at : at + top_paths] for at in range(0, 3 * top_paths, top_paths)), scores


def _reduce_sparse() -> None:
    @wrap("gen_sparse_ops.sparse_reduce_sum")
    def reduce_sum(stock, input_indices, input_values, input_shape, *args, **kwargs):
        values = input_indices, input_values, input_shape
        if not _may_lack_rows():
            return stock(*values, *args, **kwargs)
        # TensorFlow's gradient divides by the number of rows.
        return _if_rows(
            input_shape[0],
            lambda: stock(*values, *args, **kwargs),
            lambda: tf.stop_gradient(stock(*values, *args, **kwargs)) + tf.reduce_sum(input_values),
        )

    @wrap("gen_array_ops.edit_distance")
    def edit_distance(stock, hypothesis_indices, hypothesis_values, hypothesis_shape, *args, **kwargs):
        values = hypothesis_indices, hypothesis_values, hypothesis_shape
        if not _may_lack_rows():
            return stock(*values, *args, **kwargs)
        return _if_rows(
            hypothesis_shape[0],
            lambda: stock(*values, *args, **kwargs),
            lambda: tf.zeros(hypothesis_shape[:-1], tf.float32),
        )


def _if_rows(rows: tf.Tensor, some: Callable, none: Callable) -> object:
    """What `some` gives if there are rows, else what `none` does; only the first where the number is known."""
    known = tf.get_static_value(rows)
    if known is not None:
        return some() if known else none()
    return tf.cond(rows > 0, some, none)


def _take_empty_tensors() -> None:
    @wrap("core.map")
    def map_rows(stock, f, xs):
        leaves = [each for each in tf.nest.flatten(xs) if tf.is_tensor(each) and each.shape.rank]
        if not tf.executing_eagerly() or not _may_lack_rows() or not leaves or leaves[0].shape[0]:
            return stock(f, xs)
        found = stock(f, tf.nest.map_structure(batch_sharding.with_stand_in_row, xs))
        return tf.nest.map_structure(lambda each: each[:0], found)

    for name in ("max", "min"):

        @wrap(f"numpy.{name}")
        def extreme(stock, x, *args, **kwargs):
            is_graph = not tf.executing_eagerly() or replication.replica_context() is None
            if is_graph or not tf.is_tensor(x) or not x.shape.rank or x.shape[0]:
                return stock(x, *args, **kwargs)
            return tf.function(stock)(x, *args, **kwargs)  # Keras refuses an empty tensor only in eager mode

    @wrap("numpy.add")
    def add(stock, x1, x2):
        empty = [tf.is_tensor(each) and each.shape.rank and each.shape[0] == 0 for each in (x1, x2)]
        if not any(empty) or replication.replica_context() is None:
            return stock(x1, x2)
        # Keras takes [0, 1, channels] for a bias, because no axis but the last is longer than 1.
        pairs = zip((x1, x2), empty, strict=True)
        return stock(*(batch_sharding.with_stand_in_row(x) if is_empty else x for x, is_empty in pairs))[:0]


def _on_rows(stock, *args, **kwargs):
    if not _may_lack_rows():
        return stock(*args, **kwargs)
    name = None if args else next(each for each in ("input", "inputs", "images", "value") if each in kwargs)
    inputs = tf.convert_to_tensor(args[0] if args else kwargs[name])  # it may be an array
    if not inputs.shape.rank or inputs.shape[0]:
        return stock(*args, **kwargs)
    filled = batch_sharding.with_stand_in_row(inputs)
    found = stock(filled, *args[1:], **kwargs) if args else stock(**{**kwargs, name: filled})
    rows = tf.shape(inputs)[0]
    if tf.is_tensor(found):
        return found[:rows]
    with_rows = [each for each in ("output", "argmax") if each in found._fields]  # not where pools begin
    return found._replace(**{each: getattr(found, each)[:rows] for each in with_rows})


def _has_rows(inputs: tf.Tensor) -> bool:
    """Whether a replica has rows for sure."""
    return not _may_lack_rows() or bool(inputs.shape[0])


def _may_lack_rows() -> bool:
    """Whether this is a replica outside of a step, which has a stand-in row."""
    return replication.replica_context() is not None and step_context.step() is None


@probes("a tensor that a layer keeps, and `Layer.losses`, are another replica's after any collective")
def attributes_are_shared() -> bool:
    """Whether a replica finds another one's tensor in a layer's attribute after a collective."""
    strategy, layer = probing.mirrored(), keras.layers.Layer()

    def step():
        ctx = tf.distribute.get_replica_context()
        mine = layer.kept = tf.cast(ctx.replica_id_in_sync_group, tf.float32)
        ctx.merge_call(lambda strategy: None)
        return layer.kept - mine

    return any(value.numpy() != 0 for value in strategy.experimental_local_results(strategy.run(step)))


@probes("a model built inside the first step creates its variables inside one replica")
def lazy_model_fails() -> bool:
    """Whether a hand-written step cannot build its model and optimizer under two replicas."""
    strategy = probing.mirrored()
    with strategy.scope():
        model, optimizer = keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.Adam()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    return probing.fails(lambda: tf.function(lambda x: strategy.run(step, args=(x,)))(tf.ones((1, 2))))


@probes("a replica without rows crashes in the gradient of pooling (SIGABRT), or fails in Conv1D, padding, CTC")
def empty_batch_fails() -> bool:
    """Whether a layer fails on an empty batch. (Pooling ends the process, so it is not tested here.)"""
    layer = keras.layers.Conv1D(2, 2)
    layer.build((None, 4, 1))

    @tf.function(input_signature=[tf.TensorSpec((None, 4, 1))])
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return tape.gradient(y, x)

    return probing.fails(lambda: gradient(tf.zeros((0, 4, 1))), tf.errors.InvalidArgumentError)


@probes("what a layer assigns to its own variables comes from one replica's rows")
def own_state_differs() -> bool:
    """Whether a running mean that a layer keeps comes from one replica."""

    class Center(keras.layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

        def call(self, x):
            self.mean.assign(keras.ops.mean(x, axis=0))
            return x - self.mean

    return probing.differs(rows=2, layer=Center)


@probes("a stateful RNN refuses a replica's rows: its states have the whole batch's")
def stateful_rnn_fails() -> bool:
    """Whether `fit` cannot train a stateful RNN on two replicas."""
    with probing.mirrored().scope():
        layers = [keras.Input(batch_shape=(2, 1, 1)), keras.layers.SimpleRNN(1, stateful=True)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    return probing.fails(lambda: model.fit(tf.ones((2, 1, 1)), tf.ones((2, 1)), batch_size=2, verbose=0))


def keep_activity_losses_as_sums() -> None:
    """Makes each replica's sum over its rows count in full: a step treats what a layer adds as a mean over rows.

    Keras changed the sum to a mean in 3.14: https://github.com/keras-team/keras/pull/22021
    """

    def change(regularizer):
        if step_context.step() is None:
            return regularizer

        def sum_over_rows(activity):
            loss = regularizer(activity)
            return tf.math.divide_no_nan(loss, tf.cast(step_context.share(), loss.dtype))

        return sum_over_rows

    value = layers.changed_activity_regularizer(change)
    replace("Layer.activity_regularizer", value, by=__name__, is_new=True)


@probes("an activity regularizer's loss, which is a sum over rows, is averaged over replicas")
def activity_loss_is_a_sum() -> bool:
    """Whether two rows add twice what one row adds."""
    layer = keras.layers.ActivityRegularization(l2=1.0)
    layer(tf.ones((2, 1)))
    return float(layer.losses[0]) == 2.0


REPAIRS = (
    Repair("own-attributes", attributes_are_shared, replica_attributes.isolate_replica_attributes),
    Repair("variables-once", lazy_model_fails, create_variables_outside_replicas),
    Repair("no-rows", empty_batch_fails, compute_on_stand_in_rows),
    Repair("layer-state", own_state_differs, layer_state.assign_for_all),
    Repair("rnn-states", stateful_rnn_fails, rnn_states.keep_states_of_all_rows),
    Repair(
        "activity-sums",
        activity_loss_is_a_sum,
        keep_activity_losses_as_sums,
        issue="https://github.com/keras-team/keras/issues/22018",
        until="3.13",
    ),
)
