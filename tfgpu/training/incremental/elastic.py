"""Elastic weight consolidation: keeps weights that old tasks need near their old values (Kirkpatrick et al., 2017)."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu import packing
from tfgpu.errors import InputError, is_number, unknown, whole_number
from tfgpu.optim.parameter_groups import grown
from tfgpu.training.incremental import names
from tfgpu.training.incremental.distilling import Distilled, check_classes, gives_probabilities

LABELS = ("expected", "observed")
_KIND = "penalty on elastic weights"


class ElasticWeights:
    """A penalty on changes of weights, in proportion to their Fisher information in past tasks.

    After a task, `add(model, x, y)` measures the diagonal of the Fisher information from the gradients of each
    example's log likelihood, and saves the weights. From then on the model's loss includes, as a regularizer,

        strength / 2 * sum over tasks t, weights i of F[t, i] * (w[i] - w[t, i])^2

    which is stored exactly in two numbers per weight, whatever the number of tasks. `decay` selects the online form:
    one anchor, the latest weights, and `F = decay * F + F_new`.

    Args:
        strength: the paper's lambda.
        decay: None (the default) for one penalty per task; a number from 0 to 1 for the online form.
        labels: `"expected"` (the default) averages squared gradients over the labels that the model predicts, which is
            the Fisher information; `"observed"` uses the data's labels, which is cheaper by the number of classes.

    Raises:
        InputError: an argument is out of range.

    Example:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, "softmax", use_bias=False)])
        >>> elastic = ElasticWeights(strength=10.0).add(model, np.ones((3, 1), "float32"), np.array([0, 1, 1]))
        >>> float(elastic.penalty(model)), len(model.losses)
        (0.0, 1)

    Sources: J. Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", 2017, arXiv:1612.00796;
    the online form: J. Schwarz et al., "Progress & Compress", 2018, arXiv:1805.06370; which labels: G. van de Ven,
    "On the computation of the Fisher information in continual learning", 2025, arXiv:2502.11756.
    """

    def __init__(self, strength: float, *, decay: float | None = None, labels: str = "expected"):
        if not is_number(strength) or strength < 0:
            raise InputError(f"`strength` must be a number of at least 0. Received: {strength!r}.")
        if decay is not None and (not is_number(decay) or not 0 <= decay <= 1):
            raise InputError(f"`decay` must be None or a number from 0 to 1. Received: {decay!r}.")
        if labels not in LABELS:
            raise unknown("labels", labels, LABELS)
        self.strength: float = float(strength)
        self.decay: float | None = decay
        self.labels: str = labels
        self.tasks: int = 0
        self._state: dict[str, tuple[np.ndarray, np.ndarray, float]] = {}  # precision, center, constant
        self._is_attached = False

    def add(self, model: keras.Model, x: Any, y: Any = None, *, examples: int | None = None) -> "ElasticWeights":
        """Ends a task: measures its Fisher information, saves the current weights and attaches the penalty.

        Args:
            model: a built classifier with logits or probabilities, trained on the task.
            x: the task's inputs, arrays; or a dataset of batches `(x, y)`, without weights. The same on all workers.
            y: class indices [rows], if `x` is arrays.
            examples: the number of rows to use, from the start; None for all.

        Returns:
            Itself.

        Raises:
            InputError: the model's outputs are not mutually exclusive classes, or the data does not match the model.
        """
        inner = _inner(model)
        found = fisher(inner, x, y, labels=self.labels, examples=examples)
        for path, (variable, information) in zip(names.trainable(inner), found, strict=True):
            value = np.asarray(variable.numpy(), "float32")
            self._state[path] = self._merged(self._fitted(path, value), information, value)
        self.tasks += 1
        return self.attach(model)

    def attach(self, model: keras.Model) -> "ElasticWeights":
        """Adds the penalty to a model, matching weights by name: for grown or loaded models.

        New weights, and a grown head's new columns, have no penalty.
        """
        inner = _inner(model)
        names.check_whole(inner, "Attach the penalty to")
        matched, is_new = 0, False
        for path, variable in names.trainable(inner).items():
            if path not in self._state:
                continue
            matched += 1
            state = self._fitted(path, np.asarray(variable.numpy(), "float32"))
            if not isinstance(variable.regularizer, _Elastic):
                is_new = True
                variable.regularizer = _Elastic(self.strength, variable, model.distribute_strategy)
            variable.regularizer.put(*state)
        if self._state and not matched:
            raise InputError(f"{inner.name} has none of the {len(self._state)} saved weights: their names differ.")
        self._is_attached = True
        if is_new:
            names.retrace(inner)
            names.retrace(model)
        return self

    def detach(self, model: keras.Model) -> None:
        """Removes the penalty from a model, which keeps its other regularizers."""
        for variable in model.trainable_variables:
            if isinstance(variable.regularizer, _Elastic):
                variable.regularizer.forget()  # a traced step may still use it
                variable.regularizer = variable.regularizer.stock
        self._is_attached = False
        names.retrace(model)

    def penalty(self, model: keras.Model) -> tf.Tensor:
        """Returns the penalty of a model's current weights, a float32 scalar."""
        found = [v for v in model.trainable_variables if isinstance(v.regularizer, _Elastic)]
        return tf.add_n([v.regularizer.own(v) for v in found]) if found else tf.zeros([])

    def state(self) -> dict[str, Any]:
        """Returns the complete state as plain values and arrays, for `Checkpoint(remember=)`."""
        return {
            "settings": {"strength": self.strength, "decay": self.decay, "labels": self.labels},
            "tasks": self.tasks,
            "is_attached": self._is_attached,
            "weights": {name: (p.copy(), c.copy(), float(at)) for name, (p, c, at) in self._state.items()},
        }

    def put(self, state: dict[str, Any], model: keras.Model | None = None) -> None:
        """Restores the result of `state`; keeps its own settings.

        Args:
            state: of an `ElasticWeights`.
            model: the penalty is attached to it or detached from it, as when the state was taken; None changes no
                model.
        """
        self.tasks, self._state = state["tasks"], dict(state["weights"])
        if model is not None and state["is_attached"]:
            self.attach(model)
        elif model is not None and any(isinstance(v.regularizer, _Elastic) for v in model.trainable_variables):
            self.detach(model)

    def save(self, path: str | Path) -> None:
        """Writes the complete state to one safetensors file, atomically."""
        packing.write(path, _KIND, self.state())

    def load(self, path: str | Path) -> "ElasticWeights":
        """Restores the result of `save`, but keeps its own settings; `attach` adds it to a model. Returns itself.

        Raises:
            InputError: the file is missing, damaged, or of another kind.
        """
        self.put(packing.read(path, _KIND))
        return self

    @classmethod
    def from_file(cls, path: str | Path) -> "ElasticWeights":
        """Creates a penalty from the result of `save`, with its settings.

        Raises:
            InputError: the file is missing, damaged, or of another kind.

        Example:
            >>> ElasticWeights(3.0, decay=0.9).save("elastic.safetensors")
            >>> ElasticWeights.from_file("elastic.safetensors").decay
            0.9
        """
        state = packing.read(path, _KIND)
        made = cls(**state["settings"])
        made.put(state)
        return made

    def _merged(self, state: tuple, information: np.ndarray, value: np.ndarray) -> tuple:
        precision, center, constant = state
        if self.decay is not None:
            return (self.decay * precision + information).astype("float32"), value.copy(), 0.0
        # The sum of two parabolas has the sum of their curvatures, about the weighted mean of their centers.
        a, b = precision.astype("float64"), information.astype("float64")
        total = a + b
        share = np.divide(b, total, out=np.zeros_like(total), where=total > 0)
        constant += 0.5 * float(np.sum(a * share * (center.astype("float64") - value) ** 2))
        moved = np.where(total > 0, center + share * (value.astype("float64") - center), value)
        return total.astype("float32"), moved.astype("float32"), constant

    def _fitted(self, path: str, value: np.ndarray) -> tuple:
        """Returns a weight's state in the weight's current shape."""
        if path not in self._state:
            return np.zeros_like(value), value.copy(), 0.0
        precision, center, constant = self._state[path]
        if precision.ndim != value.ndim or any(a > b for a, b in zip(precision.shape, value.shape, strict=True)):
            raise InputError(f"{path} had the shape {precision.shape} and has {value.shape} now. It can only grow.")
        return grown(precision, np.zeros_like(value)), grown(center, value), constant


class _Elastic(keras.regularizers.Regularizer):
    """The penalty on one weight, in addition to its own regularizer. Its values are variables, so they can change."""

    def __init__(self, strength: float, variable: keras.Variable, strategy: tf.distribute.Strategy):
        self.stock, self._strength = variable.regularizer, strength

        def made(shape):
            return keras.Variable(np.zeros(shape, "float32"), trainable=False, dtype="float32", autocast=False)

        with strategy.scope():
            self._precision, self._center, self._constant = made(variable.shape), made(variable.shape), made(())

    def put(self, precision: np.ndarray, center: np.ndarray, constant: float) -> None:
        self._precision.assign(precision)
        self._center.assign(center)
        self._constant.assign(constant)

    def forget(self) -> None:
        for variable in (self._precision, self._constant):
            variable.assign(keras.ops.zeros_like(variable))

    def own(self, x) -> tf.Tensor:
        moved = tf.convert_to_tensor(x) - self._center
        return self._strength * (0.5 * tf.reduce_sum(self._precision * moved * moved) + self._constant)

    def __call__(self, x):
        return self.own(x) if self.stock is None else self.own(x) + self.stock(x)


def fisher(model: keras.Model, x, y=None, *, labels: str = "expected", examples: int | None = None) -> list[tuple]:
    """Computes the diagonal of the Fisher information: the mean of each row's squared log-likelihood gradients.

    Runs on one device, with the layers in inference mode.

    Returns:
        Each trainable weight with a float32 array of its shape.
    """
    if not isinstance(model, keras.Model) or not model.built:
        raise InputError(f"`model` must be a built Keras model. Received: {model!r}.")
    names.check_whole(model, "Measure")
    variables = model.trainable_variables
    weights = [tf.constant(v.numpy()) for v in variables]
    rest = [tf.constant(v.numpy()) for v in model.non_trainable_variables]
    if examples is not None:
        whole_number("examples", examples)
    has_logits = not gives_probabilities(model)
    totals, rows = [np.zeros(v.shape, "float64") for v in weights], 0

    def outputs(rows):
        return model.stateless_call(weights, rest, rows, training=False)[0]

    def likelihoods(one) -> tf.Tensor:
        out = tf.cast(outputs(tf.nest.map_structure(lambda v: v[None], one)), tf.float32)
        logs = tf.nn.log_softmax(out) if has_logits else tf.math.log(tf.maximum(out, keras.config.epsilon()))
        return logs[0]

    def squares(one, label) -> list[tf.Tensor]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            logs = likelihoods(one)
            if labels == "observed":
                logs = logs[label]
        if labels == "observed":
            return [g * g for g in tape.gradient(logs, weights, unconnected_gradients="zero")]
        all_classes = tape.jacobian(logs, weights, unconnected_gradients="zero")
        return [tf.tensordot(tf.exp(logs), g * g, 1) for g in all_classes]

    def of_batch(batch, numbers):
        begin = [tf.zeros_like(v, tf.float32) for v in weights]
        return tf.foldl(lambda sums, row: list(map(tf.add, sums, squares(*row))), (batch, numbers), begin)

    traced = None
    for batch, numbers in _batches(x, y, examples):
        if traced is None:
            classes = _classes(model, outputs(tf.nest.map_structure(lambda v: v[:1], batch)))
            specs = tf.nest.map_structure(lambda v: tf.TensorSpec((None, *v.shape[1:]), v.dtype), (batch, numbers))
            traced = tf.function(of_batch).get_concrete_function(*specs)
        if labels == "observed":
            _check_numbers(numbers, classes)
        for total, found in zip(totals, traced(batch, numbers), strict=True):
            total += found.numpy()
        rows += int(tf.shape(numbers)[0])
    if not rows:
        raise InputError("The Fisher information needs data. Received: no rows.")
    return [(v, (total / rows).astype("float32")) for v, total in zip(variables, totals, strict=True)]


def _inner(model: keras.Model) -> keras.Model:
    """Returns the model that has the weights."""
    return model.model if isinstance(model, Distilled) else model


def _classes(model: keras.Model, out) -> int:
    """Returns the number of classes, from the model's outputs for one row."""
    shapes = [tuple(part.shape) for part in tf.nest.flatten(out)]
    if len(shapes) != 1 or len(shapes[0]) != 2:
        raise InputError(f"The model must output one row of classes per example. Received: {shapes}.")
    check_classes(model, shapes[0][1], "The Fisher information")
    return shapes[0][1]


def _check_numbers(numbers: tf.Tensor, classes: int) -> None:
    least, most = int(tf.reduce_min(numbers)), int(tf.reduce_max(numbers))
    if not 0 <= least <= most < classes:
        raise InputError(
            f"Labels must be class indices from 0 to {classes - 1}, as the model has {classes} outputs. Received: "
            f"{least} to {most}."
        )


def _batches(x, y, examples: int | None):
    left = float("inf") if examples is None else examples
    for batch in x if isinstance(x, tf.data.Dataset) else _cut(x, y):
        if not isinstance(batch, tuple) or len(batch) != 2:
            parts = f"{len(batch)} parts" if isinstance(batch, tuple) else type(batch).__name__
            raise InputError(
                f"The data must be batches (x, y), without weights. Received: {parts}. Remove weights with "
                "`data.map(lambda x, y, weights: (x, y))`."
            )
        numbers = tf.convert_to_tensor(batch[1])
        if numbers.shape.rank == 2:  # one column per class, or a single column
            numbers = numbers[:, 0] if numbers.shape[1] == 1 else tf.argmax(numbers, -1)
        take = int(min(left, numbers.shape[0]))
        if not take:
            return
        left -= take
        inputs = [tf.convert_to_tensor(part)[:take] for part in tf.nest.flatten(batch[0])]
        yield tf.nest.pack_sequence_as(batch[0], inputs), tf.cast(numbers[:take], tf.int32)


def _cut(x, y) -> tf.data.Dataset:
    if y is None:
        raise InputError("Labels are missing. Use `add(model, x, y)`, or a dataset of batches (x, y).")
    try:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(256)
    except ValueError as error:
        raise InputError(f"`x` and `y` must be arrays of the same length. {error}.") from error
