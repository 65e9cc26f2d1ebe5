"""What `Trainer` needs of Keras and Keras keeps private: its data adapters. So both paths read the same batches."""

import contextlib
import functools

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.utils.python_utils import pythonify_logs

from tfgpu.keras_fixes import pieces, resuming
from tfgpu.keras_fixes.trainer import Steps


class Batches:
    """The batches that `fit` or `evaluate` would read, epoch after epoch, under the model's strategy.

    Args:
        model: the compiled model.
        x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight: as `model.fit` has them.
    """

    def __init__(self, model, x, y, sample_weight, *, batch_size, steps_per_epoch, shuffle=False, class_weight=None):
        with pieces.places(True):
            self._epochs = TFEpochIterator(
                x=x,
                y=y,
                sample_weight=sample_weight,
                batch_size=batch_size,
                steps_per_epoch=steps_per_epoch,
                shuffle=shuffle,
                class_weight=class_weight,
                distribute_strategy=model.distribute_strategy,
            )
        model._maybe_symbolic_build(iterator=self._epochs)
        self._iterator = None
        self._read = 0

    @property
    def steps(self) -> int | None:
        """Steps of an epoch, or None where that is not known before its end."""
        return self._epochs.num_batches

    def restart(self) -> None:
        """Forgets an unfinished pass, and tells the data so, as `fit` and `evaluate` do before their first batch."""
        self._epochs.reset()
        self._iterator = None

    def begin_epoch(self) -> int:
        """Starts a new pass over the data; with `steps_per_epoch` an unfinished pass goes on.

        Returns:
            How many of the epoch's batches a run that was resumed has trained before; they are passed over.
        """
        position = resuming.take_position(self._epochs)
        if position is None:
            self._begin()
            return 0
        for _ in range(position.first, position.epoch):
            self._pass_over_an_epoch()
        self._begin()
        self._pass_over(position.done)
        return position.done

    def _begin(self) -> None:
        self._epochs.data_adapter.on_epoch_begin()
        if self._iterator is None or self._epochs.steps_per_epoch is None:
            self._iterator = iter(self._epochs._get_iterator())
            self._read = 0

    def _pass_over(self, count: int) -> None:
        with contextlib.suppress(tf.errors.OutOfRangeError):
            resuming.draw(self._iterator, count)
        self._read += count

    def _pass_over_an_epoch(self) -> None:
        self._begin()
        if self._epochs.steps_per_epoch is None:
            resuming.start_shuffle(self._epochs, self._iterator)
            self._epochs.data_adapter.on_epoch_end()
            return
        steps, in_a_pass = self._epochs.steps_per_epoch, self._epochs.data_adapter.num_batches
        count = steps if in_a_pass is None else min(steps, in_a_pass - self._read)
        self._pass_over(count)
        self.end_epoch(is_short=count < steps)

    def run(self, steps: Steps, count: int) -> tuple[int, dict]:
        """Runs up to `count` steps on the next batches; returns how many there were, and the logs after the last."""
        in_a_pass = self._epochs.data_adapter.num_batches
        if in_a_pass is not None:
            count = min(count, in_a_pass - self._read)
        try:
            done, logs = steps.run(self._iterator, count) if count > 0 else (0, {})
        except tf.errors.OutOfRangeError:
            done, logs = 0, {}
        self._read += done
        return done, logs

    def end_epoch(self, *, is_short: bool) -> None:
        """Ends the epoch; `is_short` says that the data ended before the epoch's steps were done."""
        if is_short and self._epochs.steps_per_epoch is not None:
            self._epochs._interrupted_warning()
        if is_short or self._read == self._epochs.data_adapter.num_batches:
            self._iterator = None
        if self._epochs._num_batches is None:
            self._epochs._num_batches = self._read  # a pass of unknown length is known from now on
        self._epochs.data_adapter.on_epoch_end()


def split_validation(x, y, sample_weight, fraction: float):
    """Cuts the last `fraction` of the rows off: `(x, y, sample_weight), validation_data`, as `fit` does."""
    return array_slicing.train_validation_split((x, y, sample_weight), validation_split=fraction)


def unpack(data):
    """`validation_data` as `(x, y, sample_weight)`."""
    return data_adapter_utils.unpack_x_y_sample_weight(data)


def train_steps(model) -> Steps:
    """The model's compiled training steps, made once until the next `compile`."""
    if not isinstance(model.train_function, Steps):
        model.train_function = Steps(model, model.train_step)
    return model.train_function


def test_steps(model) -> Steps:
    """The model's compiled evaluation steps, made once until the next `compile`."""
    if not isinstance(model.test_function, Steps):
        model.test_function = Steps(model, model.test_step)
    return model.test_function


def resumed_epoch(model, initial_epoch: int) -> int:
    """The epoch to begin with: what `BackupAndRestore` found, else `initial_epoch`."""
    return model._initial_epoch or initial_epoch


def resumes(fit):
    """Decorator of a `fit` method: `BackupAndRestore` finds the data that it reads, and its batches are passed over."""

    @functools.wraps(fit)
    def run(self, *args, **kwargs):
        with resuming.resumable(self.model):
            return fit(self, *args, **kwargs)

    return run


def results_before(model) -> dict:
    """Logs of an epoch that was interrupted after its last batch; empty in a run that was not resumed."""
    return model.get_metrics_result() if resuming.position_of(model) is not None else {}


def to_numbers(logs: dict) -> dict:
    """Logs as Python numbers, in Keras's order."""
    return pythonify_logs(logs)


def in_order(model, logs: dict):
    """What `evaluate` returns without `return_dict`: the values in the order of the model's metrics."""
    return model._flatten_metrics_in_order(logs)
