"""`fit`, `evaluate` and `predict` under parameter servers: the coordinator sends batches, the workers run the steps.

Stock Keras asks the strategy for a distributed dataset, which only `ClusterCoordinator.create_per_worker_dataset` can
make, and raises: https://github.com/tensorflow/tensorflow/issues/61129.

A closure is a few steps that one worker runs in one call. The coordinator reads the data and sends each closure its
batches (`worker_data.py` has an alternative), so an epoch has every batch once, however fast the workers are. If a
worker dies, another one runs its closure again with the same batches. Each closure counts metrics from zero, and the
coordinator adds up the closures that finished, so nothing is counted twice. Weights and `iterations` are on the
parameter servers, which apply each update as it arrives.
"""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfgpu.compat import distribute, training
from tfgpu.compat.keras import EpochIterator
from tfgpu.compat.patch import wrap
from tfgpu.core import extensions, nested_graphs, step_blocks
from tfgpu.core.feed import sharded_dataset
from tfgpu.core.state import training_state
from tfgpu.errors import InputError, MachineError
from tfgpu.parallel import remote_devices
from tfgpu.parameter_server import worker_data
from tfgpu.parameter_server.remote_steps import RemoteSteps, workers_of

_log = logging.getLogger(__name__)


def is_coordinated(strategy) -> bool:
    """Whether the strategy keeps its variables on parameter servers."""
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


def train_by_coordinator() -> None:
    """Makes `RemoteSteps` the train and test functions of models under parameter servers.

    The coordinator reads the data, unless the workers do (`worker_data.py`).
    """

    @wrap("TFEpochIterator.__init__")
    def init(stock, self, distribute_strategy=None, *args, **kwargs):
        if not is_coordinated(distribute_strategy):
            return stock(self, distribute_strategy, *args, **kwargs)
        stock(self, sharded_dataset.Undistributed(), *args, **kwargs)
        training.set_iterator_strategy(self, distribute_strategy)
        given = inspect.signature(EpochIterator.__init__).bind(self, *args, **kwargs).arguments
        data = worker_data.of(given["x"], workers_of(distribute_strategy))
        if data is not None:
            if given.get("class_weight"):
                why = "`class_weight` cannot be applied to data that workers read."
                raise InputError(f"{why} Let the dataset yield sample weights.")
            training.set_dataset(self, data)

    @wrap("TensorFlowTrainer.make_function")
    def make_function(stock, self, step_function):
        if not is_coordinated(training.strategy_of(self)):
            return stock(self, step_function)
        return RemoteSteps(self, step_function)

    @wrap("TensorFlowTrainer.make_predict_function")
    def make_predict_function(stock, self, force=False):
        if not is_coordinated(training.strategy_of(self)):
            return stock(self, force)
        if self.predict_function is None or force:
            self.predict_function = _predict_here(self)

    @wrap("Trainer.get_metrics_result_or_logs")
    def results_or_logs(stock, self, logs):
        for function in _remote_steps_of(self):
            if function.is_running:
                return function.join()
        return stock(self, logs)

    extensions.compilations.register(_around_compile, order=-1)
    _explain_lost_servers()


@contextlib.contextmanager
def _around_compile(model, arguments: dict) -> Iterator[None]:
    asked = arguments.get("jit_compile")
    yield
    if is_coordinated(training.strategy_of(model)):
        _refuse(model, asked)
        model.jit_compile = False  # overrides Keras's own choice: XLA cannot reach another machine's variables


def _explain_lost_servers() -> None:
    extensions.method_calls.register(_around_call, order=-2)
    for name in ("train_on_batch", "test_on_batch", "predict_on_batch"):

        @wrap(f"TensorFlowTrainer.{name}")
        def method(stock, self, *args, name=name, **kwargs):
            with _around_call(self, name, {}):
                return stock(self, *args, **kwargs)


@contextlib.contextmanager
def _around_call(model, name: str, arguments: dict) -> Iterator[None]:
    if not is_coordinated(training.strategy_of(model)):
        yield
        return
    _refuse_callbacks(arguments.get("callbacks"))
    try:
        yield
    except tf.errors.OpError as error:
        gone = _explain(error, model.distribute_strategy)
        if gone is None:
            raise
        _log.debug("TensorFlow's own error:", exc_info=True)
        remote_devices.end_at_once_after_an_error()
        raise gone from None
    finally:
        for function in _remote_steps_of(model):
            function.stop()


class ScheduledSteps(training_state.StateProvider):
    """Waits for the scheduled steps before a checkpoint reads the model."""

    def settle(self, model) -> None:
        for function in _remote_steps_of(model):
            if function.is_running:
                function.join()


extensions.state_providers.register(ScheduledSteps())


def _remote_steps_of(model) -> list[RemoteSteps]:
    return [f for f in (model.train_function, model.test_function) if isinstance(f, RemoteSteps)]


def _predict_here(model) -> Callable:
    """Predicts on the coordinator, in the order of the data, with the weights of the parameter servers."""
    step = nested_graphs.own(training.without_optionals(model, model.predict_step), reduce_retracing=True)

    def predict(data: list):
        found = [step(batch) for batch in data]
        return found[0] if len(found) == 1 else tf.nest.map_structure(lambda *v: training.concatenate(v), *found)

    return predict


def _refuse(model, jit_compile) -> None:
    """Refuses what workers that update one copy of the weights asynchronously cannot do."""
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if model.run_eagerly:
        raise InputError("`run_eagerly=True`: with parameter servers, workers run compiled steps only. Remove it.")
    if jit_compile is True:
        why = "`jit_compile=True`: XLA cannot reach variables on a parameter server."
        raise InputError(f"{why} Remove it, or use `multi_worker`.")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        problem = "Asynchronous workers cannot share a dynamic loss scale (`mixed_float16`)."
        raise InputError(f"{problem} Use the policy 'mixed_bfloat16', or `loss_scale_factor` of the optimizer.")
    for name in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        if getattr(inner, name, None):
            raise InputError(
                f"`{name}={getattr(inner, name)}` does not work with parameter servers: asynchronous workers have no "
                "step in common. Remove it (a larger batch replaces accumulation), or use `multi_worker`."
            )
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise InputError(
            f"Each worker has {model.distribute_strategy.num_replicas_in_sync} GPUs, but with parameter servers a "
            "worker trains on one. Start one worker per GPU."
        )


def _refuse_callbacks(callbacks) -> None:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return
    for callback in tf.nest.flatten(callbacks) if callbacks else []:
        if step_blocks.needs_every_batch(callback, "train") or step_blocks.needs_every_batch(callback, "test"):
            raise InputError(
                f"{type(callback).__name__} needs every batch, but with parameter servers training does not wait for "
                "batches. Use its epoch hooks (`save_freq='epoch'`, `update_freq='epoch'`), or set `every_batch = "
                "False` on it: it is then called when a closure is scheduled, with the logs of those that finished."
            )


def _explain(error: tf.errors.OpError, strategy: tf.distribute.Strategy) -> MachineError | None:
    """The error to raise if a parameter server is gone; None for any other error."""
    is_gone = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError)
    if not is_gone and not distribute.is_server_failure(error):
        return None
    tasks, addresses = distribute.failed_servers(error), distribute.server_addresses(strategy)
    named = ", ".join(f"{at} ({addresses[at]})" for at in tasks if at < len(addresses))
    return MachineError(
        f"Parameter server {named or 'or worker'} stopped responding, and its variables are lost. Start all "
        "processes again: the script resumes from its newest checkpoint (tfgpu.callbacks.Checkpoint)."
    )
