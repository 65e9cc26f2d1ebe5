"""Random draws inside a replica: row i of the global batch gets the numbers that one device draws for it.

Stock Keras hands each replica's own shape to `tf.random.stateless_*` with the same seed, so all replicas draw the
numbers of the first rows: dropout masks repeat from replica to replica. Here a replica draws its rows of the global
batch's draw (`row_draws`).

Which draws are per example? A draw's first dimension is compared with the number of rows that the replica holds:

| first dimension | taken as |
|---|---|
| equal to the replica's rows, unless a trial has shown that it is fixed (`draw_sizes`) | one row per example |
| a multiple of them, known only at run time or from a layer's input | rows flattened, batch first |
| none; anything else; a Python number while the batch size is known only at run time | same on all replicas |

A layer's input that is made from weights only is not a batch, whatever its shape.

Draws that initialize variables are always the same on all replicas. In a hand-written `strategy.run` the rows are
those of the first tensor among its distributed arguments; without such arguments, Keras draws as usual.

Where XLA compiles the step of one device, the numbers are those that XLA makes (`xla_numbers`).

Not repaired: under XLA, TensorFlow's kernels may fold a draw with a constant seed and a static shape into a constant.
"""

import contextlib
import weakref
from collections.abc import Callable

import keras
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat import slots
from tfgpu.compat import tensorflow as private_tf
from tfgpu.compat.distribute import PerReplica
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, batch_sharding, extensions, replica_attributes, replication, step_context
from tfgpu.core.randomness import draw_sizes, row_draws, trace_choices, xla_numbers
from tfgpu.core.randomness.row_draws import DrawShard, RowDraw
from tfgpu.core.randomness.tensor_origin import CONSTANTS, WEIGHTS, origin_of
from tfgpu.core.row_mixing import reduced_outputs, row_sums
from tfgpu.core.row_mixing.trials import step_recorder
from tfgpu.errors import InputError


def wrap_random_functions() -> None:
    """Wraps the backend's ten random functions, and makes `strategy.run` tell each replica which rows it holds."""
    _wrap_run()
    _wrap_counted()
    _wrap_dropout()
    _wrap_taken()
    _wrap_shuffle()
    for layer in ("GaussianNoise", "GaussianDropout", "AlphaDropout"):

        @wrap(f"keras.layers.{layer}.call")
        def call(stock, self, inputs, *args, **kwargs):
            origin = origin_of(inputs)
            field = "draws_alike" if origin == WEIGHTS or _has_common_noise(self) else "draws_follow_input"
            with step_context.scope(**{field: origin != CONSTANTS}):
                return stock(self, inputs, *args, **kwargs)

    @wrap("Variable.initialize_with_initializer")
    def initialize(stock, self, initializer):
        with same_on_all_replicas():
            return stock(self, initializer)


def same_on_all_replicas():
    """Inside the block, every replica draws what one device draws for the requested shape."""
    return step_context.scope(draws_alike=True)


def sharding(shard: DrawShard):
    """Inside the block, dropout draws a piece of what one device draws."""
    return step_context.scope(draw_shard=shard)


def _wrap_run() -> None:
    @wrap("tf.distribute.Strategy.run")
    def run(stock, self, fn, args=(), kwargs=None, options=None):
        given = tf.nest.flatten((args, kwargs or {}))
        is_distributed = [isinstance(v, PerReplica) for v in given]
        if not replication.is_replicated(self) or not any(is_distributed):
            return stock(self, fn, args, kwargs, options)
        if isinstance(fn, private_tf.Function) and tf.executing_eagerly():
            # replicas meet within it, as in stock TensorFlow
            return reduced_outputs.marked(self, fn.python_function, _run_within(self, fn)(*args, **(kwargs or {})))
        replication.made.discard(self)
        body = private_tf.body_of(fn)
        _check_is_not_of_fit(body, args, kwargs or {})
        for observe in extensions.run_observers:
            observe(self, fn, args, kwargs or {})
        fn = private_tf.with_autograph_of_caller(fn)  # as `run` does, which then has nothing left to convert
        choices, python = [], replica_attributes.PythonState()
        code = getattr(body, "__code__", None)
        key = slots.get(self, "function_keys", {}).get(code)  # of its code and settings, as a trial has kept them
        changes = slots.get(self, "changes_in_python", {}).get(key, ())
        scalar_ways = slots.get(self, "scalar_ways", {}).get(key, {})
        python.note([body], changes)
        are_even = batch_sharding.are_even(self, given) and not replication.spans_processes(self)

        @tf.autograph.experimental.do_not_convert
        def with_rows(*args, **kwargs):
            held = [v for v, is_own in zip(tf.nest.flatten((args, kwargs)), is_distributed, strict=True) if is_own]
            rows = batch_rows.given(batch_sharding.num_rows(held), scalar_ways, are_even=are_even)
            if not tf.executing_eagerly():
                args, kwargs = tf.nest.map_structure(batch_sharding.without_static_zero, (args, kwargs))
            sizes = draw_sizes.known(draw_sizes.kept(self, key))
            with python.on_replica(), rows, sizes, trace_choices.shared(choices):
                return fn(*args, **kwargs)

        return reduced_outputs.marked(self, body, stock(self, with_rows, args, kwargs, options))


def _check_is_not_of_fit(function: Callable, args: tuple, kwargs: dict) -> None:
    """Refuses an own `make_train_function` that does not call Keras's: it cannot read the batches of `fit`."""
    is_of_fit = any(isinstance(each, batch_sharding.ReplicaBatch) for each in (*args, *kwargs.values()))
    if is_of_fit and (getattr(function, "__module__", None) or "").split(".")[0] not in ("keras", "tfgpu"):
        raise InputError(
            "Your `make_train_function`, `make_test_function` or `make_predict_function` runs `strategy.run` on the "
            "batches that `fit` reads. "
            "Override `train_step` (`test_step`, `predict_step`) instead, or call "
            "`super().make_train_function(force)` and wrap the `self.train_function` that it makes."
        )


def _run_within(strategy: tf.distribute.Strategy, function: Callable) -> Callable:
    """A `tf.function` that runs another's Python code on each replica; kept, for it is traced once."""
    kept = vars(slots.of(strategy)).setdefault("run_within", weakref.WeakKeyDictionary())
    if function not in kept:
        body = function.python_function
        kept[function] = private_tf.with_body(function, lambda *args, **kwargs: strategy.run(body, args, kwargs))
    return kept[function]


def _here(rows: RowDraw | None, shape) -> RowDraw | None:
    """The rows to draw; None if the draw is left to Keras, which knows nothing of XLA on one device."""
    return row_draws.of_all(shape) if rows is None and _are_other() else rows


def _are_other() -> bool:
    """Whether one device draws other numbers than Keras's functions would draw here: XLA compiles its step."""
    return step_context.current().draws_as_xla and not tf.executing_eagerly()


def _unit(rows: RowDraw, dtype: str, seed: tf.Tensor) -> tf.Tensor:
    """Numbers from 0 to 1."""
    if step_context.draws_as_xla():
        return row_draws.draw(lambda alg, **how: xla_numbers.uniform(dtype=dtype, **how), rows, seed, dtype)
    operation = tf.raw_ops.StatelessRandomUniformV2
    return row_draws.draw(lambda **how: operation(dtype=dtype, **how), rows, seed, dtype)


def _uniform(rows: RowDraw, minval, maxval, dtype: str, seed: tf.Tensor) -> tf.Tensor:
    minval, maxval = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    return _unit(rows, dtype, seed) * (maxval - minval) + minval


def _wrap_counted() -> None:
    """Wraps distributions of which a replica draws only its own rows."""

    @wrap("random.uniform")
    def uniform(stock, shape, minval=0.0, maxval=1.0, dtype=None, seed=None):
        rows = _here(row_draws.of_shape(shape), shape)
        if rows is None:
            return stock(shape, minval, maxval, dtype, seed)
        return _uniform(rows, minval, maxval, _name(dtype), private.draw_seed(seed))

    @wrap("random.normal")
    def normal(stock, shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
        rows = _here(row_draws.of_shape(shape), shape)
        if rows is None:
            return stock(shape, mean, stddev, dtype, seed)
        dtype, seed = _name(dtype), private.draw_seed(seed)
        if step_context.draws_as_xla():
            numbers = row_draws.take(lambda whole: xla_numbers.normal(whole, seed, dtype), rows)
        else:
            operation = tf.raw_ops.StatelessRandomNormalV2
            numbers = row_draws.draw(lambda **how: operation(dtype=dtype, **how), rows, seed, dtype)
        return numbers * tf.convert_to_tensor(stddev, dtype) + tf.convert_to_tensor(mean, dtype)

    @wrap("random.randint")
    def randint(stock, shape, minval, maxval, dtype="int32", seed=None):
        rows = row_draws.of_shape(shape)
        if rows is None:
            return stock(shape, minval, maxval, dtype, seed)
        drawn = _name(dtype) if _name(dtype) in ("int32", "int64") else "int64"
        ends = {"minval": tf.convert_to_tensor(minval, drawn), "maxval": tf.convert_to_tensor(maxval, drawn)}
        operation = tf.raw_ops.StatelessRandomUniformIntV2
        numbers = row_draws.draw(lambda **how: operation(**ends, **how), rows, private.draw_seed(seed), drawn)
        return tf.cast(numbers, dtype)


def _wrap_dropout() -> None:
    @wrap("keras.layers.Dropout.call")
    def call(stock, self, *args, **kwargs):
        with same_on_all_replicas() if _has_common_noise(self) else contextlib.nullcontext():
            return stock(self, *args, **kwargs)

    @wrap("random.dropout")
    def dropout(stock, inputs, rate, noise_shape=None, seed=None):
        shard = step_context.current().draw_shard
        if rate in (0.0, 1.0) or (row_draws.held_rows() is None and shard is None and not _are_other()):
            return stock(inputs, rate, noise_shape, seed)
        inputs = tf.convert_to_tensor(inputs)
        shape = private.noise_shape(inputs, noise_shape)
        rows = _here(row_draws.of_input(inputs, shape), shape)
        if rows is None and shard is None:
            return stock(inputs, rate, noise_shape, seed)
        rows, seed = rows or row_draws.of_all(shape), private.draw_seed(seed)
        if step_context.draws_as_xla() and not tf.is_tensor(rate) and 0 < rate < 1 and inputs.dtype.is_floating:
            return _masked(inputs, rate, rows, shard, seed)

        def sampler(shape, dtype):
            if shard is None:
                return _uniform(rows, 0, 1, dtype, seed)
            return shard.take(_uniform(shard.unsplit(rows), 0, 1, dtype, seed), rows.static)

        return tf.nn.experimental.general_dropout(inputs, rate=rate, noise_shape=rows.shape, uniform_sampler=sampler)


def _has_common_noise(layer: keras.layers.Layer) -> bool:
    """Whether all rows get the same noise, which a draw of one row does not show where a replica has one."""
    shape = getattr(layer, "noise_shape", None)
    return bool(shape) and shape[0] == 1


def _masked(inputs: tf.Tensor, rate: float, rows: RowDraw, shard: DrawShard | None, seed: tf.Tensor) -> tf.Tensor:
    """Dropout by the numbers that XLA makes."""
    dtype, drawn = inputs.dtype, rows if shard is None else shard.unsplit(rows)

    def operation(alg, **how):
        return xla_numbers.is_uniform_at_least(rate, dtype=dtype, **how)

    kept = row_draws.draw(operation, drawn, seed, dtype)
    kept = kept if shard is None else shard.take(kept, rows.static)
    found = tf.where(kept, inputs * tf.constant(1 / (1 - rate), dtype), tf.constant(0, dtype))
    return tf.ensure_shape(found, inputs.shape)


def _wrap_taken() -> None:
    """Wraps distributions of which every replica draws the global batch's numbers."""

    @wrap("random.truncated_normal")
    def truncated_normal(stock, shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
        rows = _here(row_draws.of_shape(shape), shape)
        if rows is None:
            return stock(shape, mean, stddev, dtype, seed)
        if step_context.draws_as_xla():
            dtype = _name(dtype)
            numbers = _unit(rows, xla_numbers.computed_dtype(dtype), private.draw_seed(seed))
            numbers = xla_numbers.truncated_normal(numbers, dtype)
        else:
            numbers = row_draws.take(lambda whole: stock(whole, 0.0, 1.0, dtype, seed), rows)
        return numbers * tf.convert_to_tensor(stddev, numbers.dtype) + tf.convert_to_tensor(mean, numbers.dtype)

    @wrap("random.gamma")
    def gamma(stock, shape, alpha, dtype=None, seed=None):
        return _taken(stock, shape, (alpha,), dtype, seed)

    @wrap("random.binomial")
    def binomial(stock, shape, counts, probabilities, dtype=None, seed=None):
        return _taken(stock, shape, (counts, probabilities), dtype, seed)

    @wrap("random.beta")
    def beta(stock, shape, alpha, beta, dtype=None, seed=None):
        return _taken(stock, shape, (alpha, beta), dtype, seed)

    @wrap("random.categorical")
    def categorical(stock, logits, num_samples, dtype="int64", seed=None):
        logits = tf.convert_to_tensor(logits)
        rows = _here(row_draws.of_input(logits, tf.shape(logits)), tf.shape(logits))
        if rows is None:
            return stock(logits, num_samples, dtype, seed)
        if step_context.draws_as_xla():
            # a draw for each sample from the logits
            shape = tf.concat([rows.shape[:1], [num_samples], rows.shape[1:]], 0)
            static = rows.static[:1].concatenate([num_samples]).concatenate(rows.static[1:])
            each = RowDraw(shape, static, rows.start, rows.local, rows.total)
            numbers = _unit(each, xla_numbers.computed_dtype(logits.dtype), private.draw_seed(seed))
            return tf.cast(xla_numbers.categorical(numbers, logits), dtype)
        return row_draws.take(lambda whole: stock(row_draws.pad_rows(logits, rows), num_samples, dtype, seed), rows)


def _taken(stock: Callable, shape, parameters: tuple, dtype, seed) -> tf.Tensor:
    """This replica's rows of the global batch's numbers; a parameter may have a value for each row."""
    rows = row_draws.of_shape(shape)
    if rows is None:
        return stock(shape, *parameters, dtype, seed)
    padded = [row_draws.pad_rows(each, rows) for each in parameters]
    return row_draws.take(lambda whole: stock(whole, *padded, dtype, seed), rows)


def _wrap_shuffle() -> None:
    @wrap("random.shuffle")
    def shuffle(stock, x, axis=0, seed=None):
        x = tf.convert_to_tensor(x)
        rows = row_draws.of_shape(tf.shape(x)) if axis in (0, -x.shape.rank) else None
        if rows is None and not _are_other():
            return stock(x, axis, seed)
        if rows is None:
            return tf.gather(x, _order(tf.shape(x)[axis], seed), axis=axis)
        may_be_numbers = x.dtype.is_integer and x.shape.rank == 1
        if step_recorder.is_by_hand() and may_be_numbers and _counts_from_0(x):
            raise ValueError("it shuffles the numbers of a batch's rows, which count from 0 on each replica")
        if step_context.current().is_trying and step_context.step() is None and may_be_numbers:
            return stock(x, axis, seed)  # so that the trial finds that the step needs all of the batch's numbers
        # A row may go to any replica, so all rows are gathered.
        order = _order(rows.total, seed)
        return tf.ensure_shape(row_sums.own_rows(tf.gather(row_sums.all_rows(x), order), x), x.shape)


def _order(count: tf.Tensor, seed: object) -> tf.Tensor:
    """The indices of a shuffle, as Keras draws them."""
    return tf.argsort(_unit(row_draws.of_all([count]), "float32", private.draw_seed(seed)))


def _counts_from_0(x: tf.Tensor) -> bool:
    return bool(tf.reduce_all(x == tf.range(tf.size(x), dtype=x.dtype)))


def _name(dtype) -> str:
    return keras.utils.standardize_dtype(dtype or keras.config.floatx())
