"""How data is split and ordered; compiling a model under its own strategy, and building it without a batch of its data.

Stock Keras draws a real batch (one that training then misses) to build the model, and averages it over replicas:
https://github.com/keras-team/keras/issues/20861.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, layers, slots, training
from tfgpu.compat.keras import TensorFlowTrainer
from tfgpu.compat.patch import wrap, wrapped
from tfgpu.compat.tensorflow import NoneTensorSpec
from tfgpu.core import batch_sharding, extensions, metric_logs, replication, step_blocks, step_loop
from tfgpu.core.dealing import sharing
from tfgpu.core.feed import by_hand, sharded_dataset
from tfgpu.core.randomness import data_order
from tfgpu.core.state import python_state, takeover
from tfgpu.core.workers import calls
from tfgpu.errors import InputError
from tfgpu.repairs import Repair, probes, probing


@probes("a short batch goes to the first replicas only; workers get files, so a batch holds other rows")
def short_batch_is_split_unevenly() -> bool:
    """Whether 5 rows on four replicas are split into 2, 2, 1 and 0."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    (batch,) = strategy.experimental_distribute_dataset(tf.data.Dataset.range(5).batch(5))
    return min(len(part) for part in batch.values) == 0


@probes("without a seed each worker shuffles differently, so examples are read twice or never")
def order_depends_on_the_process() -> bool:
    """Whether a shuffle without a seed has a new order each time it is created, and so in each worker."""
    tf.random.set_seed(None)
    orders = [list(tf.data.Dataset.range(20).shuffle(20).as_numpy_iterator()) for _ in range(2)]
    return orders[0] != orders[1]


def _shard_and_deal() -> None:
    sharded_dataset.shard_batches()
    by_hand.make_own_rows()
    sharing.share_python_data()


_log = logging.getLogger(__name__)


def compile_in_scope() -> None:
    """Compiles a model under the strategy in which it was created; its optimizers and metrics become the strategy's.

    Raises:
        InputError: raised by `compile` if the model was created outside the strategy's scope, or an optimizer that has
            trained.
    """

    @wrap("Trainer.compile")
    def compile_model(stock, self, *args, **kwargs):
        own, here = training.strategy_of(self), tf.distribute.get_strategy()
        if own is None and replication.is_replicated(here):
            raise InputError("The model was created outside `strategy.scope()`. Create and compile it inside.")
        with _scope_of(self):
            stock(self, *args, **kwargs)
        takeover.take_over(self, own, keras.tree.flatten((args, kwargs)))
        is_auto = inspect.signature(stock).bind(self, *args, **kwargs).arguments.get("jit_compile", "auto") == "auto"
        slots.of(self).one_device_compiles = is_auto and training.one_device_compiles(self)
        run = step_blocks.current()
        if run is not None and run.model is self and run.kind == "train":  # by a callback; stock `fit` then calls None
            self.make_train_function()


def compile_one_device_by_xla() -> None:
    """Applies Keras's rule for one GPU under a one-device strategy too: XLA compiles what the layers allow."""

    @wrap("Trainer.resolve_auto_jit_compile")
    def resolve_auto_jit_compile(stock, self):
        strategy = training.strategy_of(self)
        is_spread = isinstance(strategy, tf.distribute.ParameterServerStrategy)
        if strategy is None or strategy.num_replicas_in_sync > 1 or is_spread:
            return stock(self)
        if any(prevents(self) for prevents in extensions.xla_obstacles):
            return False
        with training.without_strategy(self):
            return stock(self)


def run_in_blocks_together() -> None:
    """Runs blocks of steps, and makes workers compare the calls that lead to them."""
    step_blocks.run_in_blocks()
    calls.call_together()  # outermost, to see the errors as they are explained


def build_from_spec() -> None:
    """Builds a model from the data's `element_spec`; stock Keras draws a batch and averages it over replicas."""

    @wrap("TensorFlowTrainer.maybe_symbolic_build")
    def maybe_symbolic_build(stock, self, iterator=None, data_batch=None):
        if training.strategy_of(self) is not None and _is_built(self):
            return None
        _name_assignments_of_build(self)
        batches = [data_batch]
        if iterator is not None and training.strategy_of(self) is not None:
            batches = _batches_of(iterator, self)
        try:
            with _scope_of(self), _optimizer_built_by_step(self), _chosen_by_step(self), _uncounted(self):
                return _with_first_that_fits(functools.partial(_build, stock, self), batches)
        except Exception as error:  # a user's model may raise anything
            is_keras_s = type(self).train_step is TensorFlowTrainer.train_step and not self.run_eagerly
            if iterator is None or is_keras_s:
                raise
            # The data may suit only the model's own `train_step`, or an eager one, which builds the rest as it runs.
            _log.debug("The model was not built from the data's spec: %s", error)


def _build(stock, model, batch):
    if training.strategy_of(model) is not None and not _is_dense(batch):
        training.build_on_specs(model, batch)
    return stock(model, None, batch)


def _with_first_that_fits(build: Callable, batches: list):
    """What `build` makes of the first batch that it takes; the error of the last one if it takes none."""
    for batch in batches[:-1]:
        with contextlib.suppress(Exception):  # a user's model may raise anything
            return build(batch)
    return build(batches[-1])


@contextlib.contextmanager
def _uncounted(model) -> Iterator[None]:
    """Calls of losses, metrics and layers in the block are not counted in Python: one device has none there.

    But for a model's first call by which Keras builds it, which one device has too.
    """
    kept = [python_state.Kept(training.compiled_losses_and_metrics(model), ())]
    call, held = model.call, vars(model).get("call")

    def built(*args, **kwargs):
        if model.built and len(kept) == 1:
            kept.append(python_state.Kept([model], layers.that_build_nothing(model)))
        return call(*args, **kwargs)

    vars(model)["call"] = built
    try:
        yield
    finally:
        vars(model).pop("call")
        if held is not None:
            vars(model)["call"] = held
        for each in kept:
            each.put_back_counts()


@contextlib.contextmanager
def _optimizer_built_by_step(model) -> Iterator[None]:
    """Hides the optimizer of a step of the user's own, which may first make layers that it updates."""
    optimizer, strategy = getattr(model, "optimizer", None), model.distribute_strategy
    is_own = type(model).train_step is not TensorFlowTrainer.train_step
    is_here = replication.is_replicated(strategy) and not replication.spans_processes(strategy)
    if optimizer is None or optimizer.built or not (is_own and is_here):
        yield
        return
    with training.without_optimizer(model):
        yield


def _chosen_by_step(model) -> contextlib.AbstractContextManager:
    """Leaves "accuracy" to a step of the user's own, which may make other labels than the data have."""
    steps = ("train_step", "test_step")
    is_own = any(getattr(type(model), each) is not getattr(TensorFlowTrainer, each) for each in steps)
    strategy = training.strategy_of(model)
    is_here = strategy is not None and not isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if not (is_own and is_here and model.compiled):
        return contextlib.nullcontext()
    return training.without_parts_chosen_by_shape(model)


def _name_assignments_of_build(model) -> None:
    """Warns of an optimizer whose `build` assigns: without a strategy Keras traces that into each training step."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built or model.run_eagerly or training.strategy_of(model) is None:
        return
    libraries = "builtins", "keras", "tfgpu"
    own = [each for each in type(optimizer).__mro__ if each.__module__.split(".")[0] not in libraries]
    builds = [inspect.unwrap(vars(each)["build"]) for each in own if "build" in vars(each)]
    used = {name for each in builds if inspect.isfunction(each) for name in each.__code__.co_names}
    if used & {"assign", "assign_add", "assign_sub"}:
        _log.warning(
            "The optimizer %r (%s) assigns to variables in `build`. Under a strategy this happens once. Without one, "
            "Keras traces `build` into the training step and repeats the assignment in every step, so one device "
            "learns something else. Pass an initializer to `add_variable` instead.",
            optimizer.name,
            type(optimizer).__name__,
        )


def build_now(model, iterator) -> None:
    """Creates the variables that the first step on this data would create: layers', metrics' and the loss's."""
    if not _is_built(model):
        with _scope_of(model):
            batches = _batches_of(iterator, model)
            _with_first_that_fits(functools.partial(training.build_symbolically, model), batches)


def _batches_of(iterator, model) -> list:
    """A replica's rows of a batch, as specs; then all rows, if their number is known, for code that takes no fewer."""
    spec = training.dataset_of(iterator).element_spec
    if not isinstance(spec, batch_sharding.ReplicaBatch):
        return [tf.nest.map_structure(_one_replica, spec)]
    own, count = tf.nest.map_structure(_one_replica, spec.data), model.distribute_strategy.num_replicas_in_sync

    def whole(each):  # shards of a known size are all of the same
        if type(each) is not tf.TensorSpec or not each.shape.rank or each.shape[0] is None:
            return each
        return tf.TensorSpec([each.shape[0] * count, *each.shape[1:]], each.dtype)

    both = [own, tf.nest.map_structure(whole, own)]
    return both if tf.nest.flatten(both[0]) != tf.nest.flatten(both[1]) else both[:1]


def _is_dense(batch) -> bool:
    others = tf.RaggedTensor, tf.RaggedTensorSpec, tf.SparseTensor, tf.SparseTensorSpec
    return not any(isinstance(each, others) for each in tf.nest.flatten(batch))


def _scope_of(model):
    """The scope of the model's own strategy, if it is not the current one."""
    own = training.strategy_of(model)
    replication.check_scope(own)
    return contextlib.nullcontext() if own is None or own is tf.distribute.get_strategy() else own.scope()


def _is_built(model) -> bool:
    """Whether nothing is left of the model that needs data to be built."""
    return all(part is None or part.built for part in training.compiled_parts(model))


def _one_replica(spec):
    found = distribute.replica_spec(spec)
    return None if isinstance(found, (tf.OptionalSpec, NoneTensorSpec)) else found


@probes("a model compiled outside its scope gets an optimizer that cannot train it")
def compiled_outside_fails() -> bool:
    """Whether training fails if a model was created inside the scope and compiled by name outside it."""
    with probing.mirrored().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    errors = RuntimeError, ValueError, AssertionError
    return probing.fails(lambda: model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0), errors)


@probes("fit returns to Python after every batch, even if no callback has per-batch hooks")
def fit_calls_for_every_batch() -> bool:
    """Whether `fit` calls callbacks after every batch even if none has per-batch hooks."""

    class Calls(keras.callbacks.Callback):
        every_batch, made = False, 0

        def on_train_batch_end(self, batch, logs=None):
            self.made += 1

    model, calls = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), Calls()
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=1, verbose=0, callbacks=[calls])
    return calls.made == 8


@probes("at the end of an epoch, every metric in the logs is reduced over replicas again")
def results_are_read_again() -> bool:
    """Whether `fit` reads a metric again, outside its steps, at the end of an epoch."""

    class Mean(keras.metrics.MeanMetricWrapper):
        read = 0

        def result(self):
            Mean.read += tf.executing_eagerly()
            return super().result()

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Mean(lambda y, y_pred: y_pred, name="mean")])
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    return Mean.read > 0


@probes("fit draws a batch and averages it over replicas to build the model")
def uneven_first_batch_fails() -> bool:
    """Whether an unbuilt model cannot be built from a first batch that is split unevenly."""
    return probing.differs(is_built=False)


@probes("XLA, which Keras uses on one GPU, is off under a strategy of one device")
def one_gpu_has_no_xla() -> bool:
    """Whether Keras turns XLA off under a strategy of one GPU, which a fake entry in the list of devices represents."""
    listed = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]

    def uses_xla(strategy: tf.distribute.Strategy) -> bool:
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile="auto")
        return model.jit_compile

    with wrapped("tf.config.list_physical_devices", lambda stock, kind=None: listed):
        return uses_xla(tf.distribute.get_strategy()) and not uses_xla(tf.distribute.OneDeviceStrategy("CPU:0"))


@probes("steps_per_execution above 1 crashes under replicas")
def many_steps_fail() -> bool:
    """Whether two steps in one execution crash."""
    return probing.differs(rows=2, steps=2)


REPAIRS = (
    Repair(
        "even-pieces",
        short_batch_is_split_unevenly,
        _shard_and_deal,
        issue="https://github.com/tensorflow/tensorflow/issues/36846",
    ),
    Repair("one-order", order_depends_on_the_process, data_order.agree_on_data_order),
    Repair("xla-on-one-device", one_gpu_has_no_xla, compile_one_device_by_xla),
    Repair("compiled-in-scope", compiled_outside_fails, compile_in_scope),
    Repair(
        "many-steps-a-call",
        many_steps_fail,
        step_loop.use_step_runner,
        issue="https://github.com/keras-team/keras/issues/20861",
    ),
    Repair("blocks-of-steps", fit_calls_for_every_batch, run_in_blocks_together),
    Repair("results-once", results_are_read_again, metric_logs.read_results_once),
    Repair(
        "build-from-spec",
        uneven_first_batch_fails,
        build_from_spec,
        issue="https://github.com/keras-team/keras/issues/20585",
    ),
)
