"""`fit`, `evaluate` and `predict` under parameter servers: the coordinator deals batches, the workers run the steps.

Stock Keras asks the strategy for a distributed dataset, which only `ClusterCoordinator.create_per_worker_dataset` can
make, and raises: https://github.com/tensorflow/tensorflow/issues/61129.

A closure is a few steps that one worker runs in one call. The coordinator reads the data and sends each closure its
batches (`worker_data.py` has another way), so an epoch has every batch once however fast the workers are, and a closure
whose worker died is run again with its own batches by another. Metrics are counted inside the closure, from zero, and
the coordinator adds up the closures that were done: what a dead worker had counted is counted once. Weights and
`iterations` lie on the parameter servers, where each update is applied as it comes.
"""

import inspect
import logging
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.trainers.trainer import Trainer
from tensorflow.python.distribute.coordinator import cluster_coordinator

from tfgpu.compat.patch import wrap
from tfgpu.core import batch_sharding, nested_functions, step_blocks, training_state
from tfgpu.errors import InputError, MachineError
from tfgpu.parallel import remote_devices
from tfgpu.parameter_server import worker_data
from tfgpu.parameter_server.remote_steps import Closures, workers_of

_log = logging.getLogger(__name__)


def is_coordinated(strategy) -> bool:
    """Whether the strategy keeps its variables on parameter servers."""
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


def train_by_coordinator() -> None:
    """Gives models under parameter servers `Closures` as their train and test functions."""

    @wrap(keras_trainer.TFEpochIterator, "__init__")
    def init(stock, self, distribute_strategy=None, *args, **kwargs):
        if not is_coordinated(distribute_strategy):
            return stock(self, distribute_strategy, *args, **kwargs)
        stock(self, batch_sharding.Whole(), *args, **kwargs)
        self._distribute_strategy = distribute_strategy
        given = inspect.signature(EpochIterator.__init__).bind(self, *args, **kwargs).arguments
        data = worker_data.of(given["x"], workers_of(distribute_strategy))
        if data is not None:
            if given.get("class_weight"):
                raise InputError("`class_weight` does not reach data that workers read. Let the data set make weights.")
            self._distributed_dataset = data

    @wrap(keras_trainer.TensorFlowTrainer, "_make_function")
    def make_function(stock, self, step_function):
        if not is_coordinated(self._distribute_strategy):
            return stock(self, step_function)
        return Closures(self, step_function)

    @wrap(keras_trainer.TensorFlowTrainer, "make_predict_function")
    def make_predict_function(stock, self, force=False):
        if not is_coordinated(self._distribute_strategy):
            return stock(self, force)
        if self.predict_function is None or force:
            self.predict_function = _predict_here(self)

    @wrap(Trainer, "_get_metrics_result_or_logs")
    def results_or_logs(stock, self, logs):
        for function in _closures_of(self):
            if function.is_out:
                return function.join()
        return stock(self, logs)

    @wrap(Trainer, "compile")
    def compile_model(stock, self, *args, **kwargs):
        asked = inspect.signature(stock).bind(self, *args, **kwargs).arguments.get("jit_compile")
        stock(self, *args, **kwargs)
        if is_coordinated(self._distribute_strategy):
            _refuse(self, asked)
            self.jit_compile = False  # whatever Keras's own rule says: XLA cannot reach another machine's variables

    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):

        @wrap(keras_trainer.TensorFlowTrainer, name)
        def method(stock, self, *args, **kwargs):
            if not is_coordinated(self._distribute_strategy):
                return stock(self, *args, **kwargs)
            _refuse_callbacks(inspect.signature(stock).bind(self, *args, **kwargs).arguments.get("callbacks"))
            try:
                return stock(self, *args, **kwargs)
            except tf.errors.OpError as error:
                gone = _explained(error, self.distribute_strategy)
                if gone is None:
                    raise
                _log.debug("TensorFlow's own words.", exc_info=True)
                remote_devices.end_at_once_after_an_error()
                raise gone from None
            finally:
                for function in _closures_of(self):
                    function.stop()


class ScheduledSteps(training_state.StateProvider):
    """Waits for the scheduled steps before a checkpoint reads the model."""

    def settle(self, model) -> None:
        for function in _closures_of(model):
            if function.is_out:
                function.join()


training_state.register(ScheduledSteps())


def _closures_of(model) -> list[Closures]:
    return [f for f in (model.train_function, model.test_function) if isinstance(f, Closures)]


def _predict_here(model) -> Callable:
    """Predicts on the coordinator, in the data's order, reading the weights from the parameter servers."""
    step = nested_functions.own(model._autoconvert_optionals(model.predict_step), reduce_retracing=True)

    def predict(data: list):
        found = [step(batch) for batch in data]
        return found[0] if len(found) == 1 else tf.nest.map_structure(lambda *v: keras_trainer.concat(v), *found)

    return predict


def _refuse(model, jit_compile) -> None:
    """Raises for what many workers that update one copy of the weights cannot do exactly."""
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if model.run_eagerly:
        raise InputError("`run_eagerly=True`: workers of a parameter server run compiled steps only. Leave it out.")
    if jit_compile is True:
        raise InputError(
            "`jit_compile=True`: XLA cannot reach variables on a parameter server. Leave it out, or use `multi_worker`."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InputError(
            "A loss scale that follows overflows (`mixed_float16`) cannot be shared by workers that do not wait for "
            "each other. Use the policy 'mixed_bfloat16', or `loss_scale_factor` of the optimizer."
        )
    for name in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        if getattr(inner, name, None):
            raise InputError(
                f"`{name}={getattr(inner, name)}`: workers that do not wait for each other have no step in common at "
                "which to do it. Leave it out (a larger batch is the same as accumulation), or use `multi_worker`."
            )
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise InputError(
            f"Each worker has {model.distribute_strategy.num_replicas_in_sync} GPUs; a worker of a parameter server "
            "trains on one. Start one worker for each GPU."
        )


def _refuse_callbacks(callbacks) -> None:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return
    for callback in tf.nest.flatten(callbacks) if callbacks else []:
        if step_blocks.needs_every_batch(callback, "train") or step_blocks.needs_every_batch(callback, "test"):
            raise InputError(
                f"{type(callback).__name__} looks at single batches, which parameter servers do not wait for. Use its "
                "epoch's hooks (`save_freq='epoch'`, `update_freq='epoch'`); or set `every_batch = False` on it: it is "
                "then called once a closure is scheduled, with the logs of those that are done."
            )


def _explained(error: tf.errors.OpError, strategy: tf.distribute.Strategy) -> MachineError | None:
    """The error to raise where a parameter server is gone; None for any other error."""
    is_gone = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError)
    if not is_gone and not cluster_coordinator._is_ps_failure(error):
        return None
    tasks = sorted(cluster_coordinator._extract_failed_ps_instances(str(error)))
    peers = strategy._cluster_resolver.cluster_spec().as_dict().get("ps", [])
    named = ", ".join(f"{at} ({peers[at]})" for at in tasks if at < len(peers))
    return MachineError(
        f"Parameter server {named or 'or worker'} does not answer any more, and its variables are lost with it. Start "
        "all processes again: the script goes on from its newest checkpoint (tfgpu.callbacks.Checkpoint)."
    )
