"""Is the upstream fault still there? Each probe runs stock Keras on two logical CPU devices and looks.

They must run where no repair is in force: `python -m tfgpu.repairs.probes` does so in a process of its own and
prints one JSON object, `{"name of the repair": true, ...}`; `tfgpu doctor` reads it.
"""

import inspect
import json
import os
import pathlib
import tempfile
import warnings

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

_X = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]], "float32")
_Y = np.array([[1.0], [0.0], [2.0]], "float32")


def second_strategy_reuses_keys() -> bool:
    """Whether two strategies of one process number their collectives alike."""
    first, second = _mirrored(), _mirrored()
    return first.extended._collective_keys._group_key == second.extended._collective_keys._group_key


def uneven_batch_differs() -> bool:
    """Whether three rows on two replicas teach something else than on one device."""
    return _differs()


def weighted_mean_differs() -> bool:
    """Whether a mean by sample weight is taken on each replica alone."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return _differs(rows=2, loss=loss, weights=np.array([1.0, 5.0], "float32"))


def dice_differs() -> bool:
    """Whether a loss that mixes rows is computed on each replica alone."""
    return _differs(rows=2, loss="dice")


def own_dice_differs() -> bool:
    """Whether a loss written by hand, which is no mean over rows, is computed on each replica alone."""
    return _differs(rows=2, loss=lambda y, p: 1 - tf.reduce_sum(y * p) / tf.reduce_sum(y + p))


def convolution_of_nothing_fails() -> bool:
    """Whether a layer cannot bear a batch without rows. (Pooling ends the process, so it is not tried here.)"""
    layer = keras.layers.Conv1D(2, 2)
    layer.build((None, 4, 1))

    @tf.function(input_signature=[tf.TensorSpec((None, 4, 1))])
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return tape.gradient(y, x)

    try:
        gradient(tf.zeros((0, 4, 1)))
    except tf.errors.InvalidArgumentError:
        return True
    return False


def own_state_differs() -> bool:
    """Whether a running mean that a layer keeps is one replica's."""

    class Centre(keras.layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

        def call(self, x):
            self.mean.assign(keras.ops.mean(x, axis=0))
            return x - self.mean

    return _differs(rows=2, layer=Centre)


def batch_norm_differs() -> bool:
    """Whether BatchNormalization sees one replica's rows only."""
    return _differs(rows=2, layer=keras.layers.BatchNormalization)


def clipping_differs() -> bool:
    """Whether gradients are clipped before they are summed."""
    return _differs(rows=2, optimizer={"global_clipnorm": 0.1})


def accumulation_fails() -> bool:
    """Whether gradient accumulation crashes or learns something else."""
    return _differs(rows=2, optimizer={"gradient_accumulation_steps": 2})


def order_depends_on_the_process() -> bool:
    """Whether a shuffle without a seed has another order each time that a process makes it, so in each worker too."""
    tf.random.set_seed(None)
    orders = [list(tf.data.Dataset.range(20).shuffle(20).as_numpy_iterator()) for _ in range(2)]
    return orders[0] != orders[1]


def short_batch_is_dealt_unevenly() -> bool:
    """Whether 5 rows on four replicas are dealt as 2, 2, 1 and 0."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    (batch,) = strategy.experimental_distribute_dataset(tf.data.Dataset.range(5).batch(5))
    return min(len(part) for part in batch.values) == 0


def many_steps_fail() -> bool:
    """Whether two steps in one execution crash."""
    return _differs(rows=2, compile_options={"steps_per_execution": 2})


def fit_calls_for_every_batch() -> bool:
    """Whether `fit` calls callbacks after every batch of an epoch where none of them looks at batches."""

    class Calls(keras.callbacks.Callback):
        every_batch, made = False, 0

        def on_train_batch_end(self, batch, logs=None):
            self.made += 1

    model, calls = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), Calls()
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=1, verbose=0, callbacks=[calls])
    return calls.made == 8


def results_are_read_again() -> bool:
    """Whether `fit` reads a metric once more, outside its steps, when the epoch has ended."""

    class Mean(keras.metrics.MeanMetricWrapper):
        read = 0

        def result(self):
            Mean.read += tf.executing_eagerly()
            return super().result()

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Mean(lambda y, y_pred: y_pred, name="mean")])
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    return Mean.read > 0


def uneven_first_batch_fails() -> bool:
    """Whether an unbuilt model cannot be built from a first batch that replicas hold unequal parts of."""
    return _differs(is_built=False)


def attributes_are_shared() -> bool:
    """Whether a replica finds another one's tensor in a layer's attribute after they have met."""
    strategy, layer = _mirrored(), keras.layers.Layer()

    def step():
        ctx = tf.distribute.get_replica_context()
        mine = layer.kept = tf.cast(ctx.replica_id_in_sync_group, tf.float32)
        ctx.merge_call(lambda strategy: None)
        return layer.kept - mine

    return any(value.numpy() != 0 for value in strategy.experimental_local_results(strategy.run(step)))


def average_loss_counts_replicas() -> bool:
    """Whether `tf.nn.compute_average_loss` of one row on each of two replicas is half of that row's loss."""
    strategy = _mirrored()
    found = strategy.run(lambda: tf.nn.compute_average_loss([1.0]))
    return float(strategy.experimental_local_results(found)[0]) == 0.5


def lazy_model_fails() -> bool:
    """Whether a hand-written step cannot build its model and optimizer under two replicas."""
    strategy = _mirrored()
    with strategy.scope():
        model, optimizer = keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.Adam()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    try:
        tf.function(lambda x: strategy.run(step, args=(x,)))(tf.ones((1, 2)))
    except Exception:
        return True
    return False


def predict_on_batch_repeats() -> bool:
    """Whether three rows come back as six."""
    with _mirrored().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    return len(model.predict_on_batch(_X)) != 3


def dropout_masks_repeat() -> bool:
    """Whether two replicas drop the same positions of different rows."""
    masks = _mirrored().run(lambda: keras.random.dropout(tf.ones([8, 16]), 0.5, seed=1))
    first, second = masks.values
    return bool(tf.reduce_all(first == second))


def compiled_outside_fails() -> bool:
    """Whether training fails where a model was made inside the scope and compiled by name outside it."""
    with _mirrored().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    try:
        model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    except (RuntimeError, ValueError, AssertionError):
        return True
    return False


def function_cannot_meet() -> bool:
    """Whether a tf.function that a replica calls fails where replicas are to meet."""

    @tf.function
    def meet():
        tf.distribute.get_replica_context().merge_call(lambda strategy: None)

    strategy = _mirrored()
    try:
        tf.function(lambda: strategy.run(lambda: meet()))()
    except RuntimeError:
        return True
    return False


def pictures_stay_on_their_replica() -> bool:
    """Whether the only picture of a replica is mixed with itself."""
    mix = keras.layers.MixUp(seed=1)
    pictures = iter([tf.zeros([1, 2, 2, 1]), tf.ones([1, 2, 2, 1])])
    first, second = _mirrored().run(lambda: mix(next(pictures), training=True)).values
    return float(tf.reduce_max(first)) < 1e-5 and float(tf.reduce_min(second)) > 1 - 1e-5


def picks_differ() -> bool:
    """Whether two replicas pick other operations for the same pictures."""
    augment = keras.layers.AugMix(num_chains=4, chain_depth=4)
    pictures = tf.ones([1, 2, 2, 3])
    picked = []

    def step():
        chains = augment.get_random_transformation(pictures)["chain_transforms"]
        picked.append([[one["layer_name"] for one in chain] for chain in chains])

    _mirrored().run(step)
    return picked[0] != picked[1]


def global_seeds_differ() -> bool:
    """Whether each replica makes a global seed generator of its own, with another seed."""
    keras.utils.set_random_seed(0)
    strategy = _mirrored()
    try:
        first, second = tf.function(lambda: strategy.run(lambda: keras.random.uniform([4])))().values
    except ValueError:  # the second one is made while the first one's graph is
        return True
    return not bool(tf.reduce_all(first == second))


def distribution_is_silent() -> bool:
    """Whether a distribution over two devices leaves a variable on one, without a word."""
    before = keras.distribution.distribution()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
        value = keras.Variable([1.0]).value
        keras.distribution.set_distribution(before)
    return not said and not isinstance(value, tf.distribute.DistributedValues)


def every_worker_writes() -> bool:
    """Whether a worker that is not the chief leaves a file."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    strategy.extended._is_chief = False
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/w.weights.h5")
        return bool(os.listdir(folder))


def failed_save_destroys() -> bool:
    """Whether a save that fails half-way takes the file with it that was there."""

    class Fails(keras.layers.Layer):
        def save_own_variables(self, store):
            raise InterruptedError

    model = keras.Sequential([keras.Input((2,)), Fails()])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "m.keras")
        path.write_text("before")
        try:
            model.save(path)
        except InterruptedError:
            pass
        return path.read_bytes() != b"before"


def resumed_epoch_repeats() -> bool:
    """Whether a run that stopped after one of three batches trains on all three again."""

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise InterruptedError

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with tempfile.TemporaryDirectory() as folder:
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=1)
        try:
            model.fit(_X, _Y, batch_size=1, callbacks=[backup, Stops()], verbose=0)
        except InterruptedError:
            pass
        model.fit(_X, _Y, batch_size=1, callbacks=[backup], verbose=0)
    return int(model.optimizer.iterations) != 3


def second_run_draws_anew() -> bool:
    """Whether a recomputed dropout drops other numbers in the backward pass."""
    x = tf.ones((64,))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = keras.remat(keras.layers.Dropout(0.5, seed=1))(x, training=True)
    return bool(tf.reduce_any(tape.gradient(y, x) != y))


def adding_is_not_one_operation() -> bool:
    """Whether `assign_add` of a Keras variable is made of a read and an assignment."""
    variable = keras.Variable(0.0)
    return "AssignAddVariableOp" not in _operations(lambda: variable.assign_add(1.0))


def look_up_reads_the_table() -> bool:
    """Whether an embedding reads its whole table where `ResourceGather` would read the rows."""
    layer = keras.layers.Embedding(4, 2)
    layer.build()
    return "ResourceGather" not in _operations(lambda: layer(tf.constant([1])))


def no_coordinator_in_fit() -> bool:
    """Whether Keras's trainer, which a real cluster takes seconds to try, knows of no coordinator."""
    return "coordinator" not in inspect.getsource(keras_trainer).lower()


def _operations(function) -> set[str]:
    graph = tf.function(function, autograph=False).get_concrete_function().graph
    return {operation.type for operation in graph.get_operations()}


def learning_rate_is_no_number() -> bool:
    """Whether Python cannot read a variable that lies on several devices."""
    with _mirrored().scope():
        optimizer = keras.optimizers.SGD(0.5)
    try:
        return float(optimizer.learning_rate) != 0.5
    except TypeError:
        return True


def _mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def _differs(
    *, rows=3, loss="mse", weights=None, layer=None, optimizer=None, compile_options=None, is_built=True
) -> bool:
    """Trains for an epoch of one batch on one device and on two replicas: do the weights differ, or does it crash?"""

    def train(strategy: tf.distribute.Strategy) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Dense(2)] + ([layer()] if layer else []) + [keras.layers.Dense(1)]
            model = keras.Sequential(([keras.Input((2,))] if is_built else []) + layers)
            model.compile(keras.optimizers.SGD(0.1, **(optimizer or {})), loss, **(compile_options or {}))
        data = [a[:rows] for a in (_X, _Y)]
        model.fit(*data, sample_weight=weights, batch_size=rows, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    alone = train(tf.distribute.get_strategy())
    try:
        spread = train(_mirrored())
    except Exception:
        return True
    return max(float(np.abs(a - b).max()) for a, b in zip(alone, spread, strict=True)) > 1e-5


def main() -> None:
    """Prints what every probe finds, as JSON."""
    from tfgpu.repairs.catalogue import FIXES

    warnings.simplefilter("ignore")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    print(json.dumps({fix.name: fix.probe() for fix in FIXES}))


if __name__ == "__main__":
    main()
