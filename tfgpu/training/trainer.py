"""`Trainer(model).fit(...)`: the job of `model.fit` through a loop that runs many steps a call."""

import keras

from tfgpu import keras_fixes
from tfgpu.errors import InputError
from tfgpu.keras_fixes import inputs, replica
from tfgpu.training.loop import STEPS_ACROSS_PROCESSES, Pace, needs_every_batch, run_epoch


class Trainer:
    """Trains a compiled Keras model with the arguments, callbacks and result of `model.fit`.

    The steps are `model.train_step`'s, the batches are the ones `fit` would read, and so are the weights, logs and
    metrics; only the way between two callbacks is shorter: one tf.function runs a block of steps on the distributed
    iterator. `on_train_batch_begin` and `on_train_batch_end` are called once a block, as Keras does with
    `steps_per_execution`; where a callback looks at single batches, each block is one step.

    Args:
        model: a compiled model, made under the strategy's scope.
        steps_per_call: steps of a block; None (the default) takes the model's `steps_per_execution` if that was
            set, and otherwise lets blocks grow to about a tenth of a second (16 steps across processes).

    Raises:
        InputError: the model is not compiled, or makes its own train function, which a loop cannot honour.

    Example:
        >>> import keras, numpy as np, tfgpu
        >>> with tfgpu.strategy().scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = tfgpu.Trainer(model).fit(np.ones((8, 4)), np.ones((8, 1)), epochs=2, verbose=0)
        >>> len(history.history["loss"])
        2
    """

    def __init__(self, model: keras.Model, *, steps_per_call: int | None = None):
        if not isinstance(model, keras.Model):
            raise InputError(f"`model` must be a Keras model. Received: {type(model).__name__}.")
        for name in ("make_train_function", "make_test_function", "fit"):
            if getattr(type(model), name) is not getattr(keras.Model, name):
                raise InputError(
                    f"Trainer runs `train_step`, but {type(model).__name__} overrides `{name}`. Use model.fit."
                )
        if steps_per_call is not None and (not isinstance(steps_per_call, int) or steps_per_call < 1):
            raise InputError(f"`steps_per_call` must be a whole number from 1. Received: {steps_per_call!r}.")
        installed = keras_fixes.install()
        if replica.is_spread(model.distribute_strategy) and not installed:
            raise InputError("Trainer needs the Keras repairs under several replicas. Unset TFGPU_REPAIR.")
        self.model = model
        self._steps_per_call = steps_per_call

    @inputs.resumes
    def fit(
        self,
        x=None,
        y=None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose="auto",
        callbacks=None,
        validation_split: float = 0.0,
        validation_data=None,
        shuffle: bool = True,
        class_weight=None,
        sample_weight=None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | list[int] = 1,
    ) -> keras.callbacks.History:
        """Trains; all arguments mean what they mean in `keras.Model.fit`.

        Returns:
            The Keras `History`, one entry an epoch.

        Example:
            tfgpu.Trainer(model).fit(data.train, validation_data=data.validation, epochs=10)
        """
        model = self._compiled("fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = inputs.split_validation(x, y, sample_weight, validation_split)
        train = inputs.Batches(
            model,
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        held_out = None
        if validation_data is not None:
            held_out = inputs.Batches(
                model,
                *inputs.unpack(validation_data),
                batch_size=validation_batch_size or batch_size,
                steps_per_epoch=validation_steps,
            )
        callbacks = _callback_list(callbacks, model, verbose, epochs=epochs, steps=train.steps, add_history=True)
        pace = self._pace(callbacks)
        model.stop_training = False
        steps = inputs.train_steps(model)
        train.restart()
        callbacks.on_train_begin()
        logs: dict = {}
        for epoch in range(inputs.resumed_epoch(model, initial_epoch), epochs):
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            logs = inputs.to_numbers(
                run_epoch(
                    train,
                    steps,
                    pace,
                    before=callbacks.on_train_batch_begin,
                    after=lambda step, logs: callbacks.on_train_batch_end(step, logs) or model.stop_training,
                )
                or inputs.results_before(model)
            )
            if held_out is not None and _is_due(epoch, validation_freq):
                found = self._evaluate(held_out, callbacks)
                logs |= {f"val_{name}": value for name, value in found.items()}
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        if epochs > 0 and hasattr(model.optimizer, "finalize_variable_values"):
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs or None)
        return model.history

    def evaluate(
        self,
        x=None,
        y=None,
        batch_size: int | None = None,
        verbose="auto",
        sample_weight=None,
        steps: int | None = None,
        callbacks=None,
        return_dict: bool = False,
    ):
        """Evaluates; all arguments mean what they mean in `keras.Model.evaluate`.

        Returns:
            The metrics by name with `return_dict=True`, else the loss alone or a list, as Keras returns them.
        """
        model = self._compiled("evaluate")
        batches = inputs.Batches(model, x, y, sample_weight, batch_size=batch_size, steps_per_epoch=steps)
        logs = self._evaluate(batches, _callback_list(callbacks, model, verbose, epochs=1, steps=batches.steps))
        return logs if return_dict else inputs.in_order(model, logs)

    def predict(self, x, batch_size: int | None = None, verbose="auto", steps: int | None = None, callbacks=None):
        """`model.predict`: under replicas the rows come back in the order in which they went in."""
        return self.model.predict(x, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks)

    def _compiled(self, what: str) -> keras.Model:
        if not self.model.compiled:
            raise InputError(f"The model must be compiled before `{what}`. Call model.compile(optimizer, loss, ...).")
        return self.model

    def _evaluate(self, batches, callbacks) -> dict:
        model = self.model
        model.stop_evaluating = False
        batches.restart()
        callbacks.on_test_begin()
        model.reset_metrics()
        logs = run_epoch(
            batches,
            inputs.test_steps(model),
            self._pace(callbacks),
            before=callbacks.on_test_batch_begin,
            after=lambda step, logs: callbacks.on_test_batch_end(step, logs) or model.stop_evaluating,
        )
        logs = inputs.to_numbers(logs)
        callbacks.on_test_end(logs)
        return logs

    def _pace(self, callbacks: keras.callbacks.CallbackList) -> Pace:
        steps = self._steps_per_call
        if steps is None and self.model.steps_per_execution > 1:
            steps = self.model.steps_per_execution
        if steps is None and any(needs_every_batch(callback) for callback in callbacks.callbacks):
            steps = 1
        if steps is None and replica.spans_processes(self.model.distribute_strategy):
            steps = STEPS_ACROSS_PROCESSES
        return Pace(steps)


def _callback_list(callbacks, model, verbose, *, epochs, steps, add_history=False) -> keras.callbacks.CallbackList:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=add_history,
        add_progbar=verbose != 0,
        model=model,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
    )


def _is_due(epoch: int, validation_freq: int | list[int]) -> bool:
    if isinstance(validation_freq, int):
        return (epoch + 1) % validation_freq == 0
    if isinstance(validation_freq, list):
        return epoch + 1 in validation_freq
    raise InputError(f"`validation_freq` must be a whole number or a list of epochs. Received: {validation_freq!r}.")
