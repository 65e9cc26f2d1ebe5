"""Learning without Forgetting: distills an old model's outputs while training on new data (Li and Hoiem, 2016).

The kind of a classifier's outputs is found here, too.
"""

from typing import Any

import keras
import tensorflow as tf

from tfgpu.errors import InputError, is_number
from tfgpu.parallel import model_graph

_AS_IS = (keras.layers.Dropout, keras.layers.Identity, keras.layers.ActivityRegularization)


def ends_in(model: keras.Model) -> str:
    """Returns the name of the function that a model's output comes from: "softmax", "sigmoid", ...; "linear" if none.

    Args:
        model: a built model with one output. Without a graph, only the last layer is examined.

    Example:
        >>> ends_in(keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax"), keras.layers.Dropout(0.5)]))
        'softmax'
    """
    if not model_graph.is_functional(model):
        layers = getattr(model, "layers", [])
        return _function(layers[-1]) if layers else "linear"
    made_by = {id(tensor): call for call in model_graph.calls(model) for tensor in call.outputs}
    call = made_by.get(id(model_graph.functional(model).outputs[0]))
    while call is not None:
        found = _function(call.operation)
        passes_on = isinstance(call.operation, _AS_IS) or type(call.operation) is keras.layers.Activation
        if found != "linear" or not passes_on:
            return found
        call = made_by.get(id(call.inputs[0])) if call.inputs else None
    return "linear"


def gives_probabilities(model: keras.Model) -> bool:
    """Whether a model ends in a softmax; otherwise its outputs are considered logits.

    Example:
        >>> gives_probabilities(keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")]))
        True
    """
    return ends_in(model) == "softmax"


def check_classes(model: keras.Model, count: int | None, what: str) -> None:
    """Raises `InputError` if a model's outputs are not mutually exclusive classes.

    Args:
        model: the classifier.
        count: number of output columns; None if unknown.
        what: the operation that needs classes.
    """
    if count == 1:
        raise InputError(
            f"{model.name} has one output column, and a softmax over one class is always 1. {what} needs one column "
            "per class, also for two classes."
        )
    if ends_in(model) == "sigmoid":
        raise InputError(
            f"{model.name} ends in a sigmoid, whose columns are not mutually exclusive classes. {what} needs logits or "
            "a softmax."
        )


def _function(operation) -> str:
    if isinstance(operation, keras.Model):
        return ends_in(operation)
    kind = type(operation).__name__.lower()  # a layer, or an operation of `keras.ops`
    name = getattr(getattr(operation, "activation", None), "__name__", "linear").removesuffix("_v2")
    return kind if kind in ("softmax", "sigmoid") else name


class Distilled(keras.Model):
    """Trains a model with an old model, the teacher, as the target for the old classes.

    Adds `weight * temperature^2 * KL(teacher || model)` to the compiled loss, averaged over the batch's rows, of the
    softmax over the teacher's classes at that temperature (T^2 preserves the gradient's scale, as in Hinton et al.,
    2015). Masked steps, such as padding, are excluded, as in a compiled loss; sample weights have no effect. It applies
    only in training: `val_loss` is the compiled loss. The logs show it, unweighted, as `distillation`.

    The weights are those of `model`, and the teacher is not saved: save `model`, and create the teacher again to
    resume.

    Args:
        model: the model to train: a Keras model with one output and classes last; at least as many as the teacher's,
            which come first (see `grow`).
        teacher: the old model, created under the same strategy; it is not changed.
        weight: of the distillation; 1 by default.
        temperature: of both softmaxes; 2 by default, as in the paper.
        from_logits: whether the models output logits; None (the default) checks if they end in a softmax.

    Raises:
        InputError: shapes do not match, or the teacher shares weights with the model or has another strategy.

    Example:
        >>> from tfgpu.training.incremental import grow
        >>> old = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model = Distilled(grow(old, classes=3), old)
        >>> model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        >>> history = model.fit(tf.ones((8, 4)), tf.fill((8,), 2), verbose=0)
        >>> sorted(history.history)
        ['distillation', 'loss']

    Source: Z. Li and D. Hoiem, "Learning without Forgetting", 2016, arXiv:1606.09282.
    """

    def __init__(
        self,
        model: keras.Model,
        teacher: keras.Model,
        *,
        weight: float = 1.0,
        temperature: float = 2.0,
        from_logits: bool | None = None,
    ):
        super().__init__(name=f"distilled_{model.name}")
        _check(model, teacher, weight, temperature)
        self.model = model
        self.weight: float = float(weight)
        self.temperature: float = float(temperature)
        self._hidden = _Teacher(teacher)
        self._has_logits = [
            not gives_probabilities(m) if from_logits is None else from_logits for m in (model, teacher)
        ]
        self._distance = _Distance(self.distances)
        self._mean_distance = keras.metrics.MeanMetricWrapper(self.distances, "distillation")
        self.built = True

    @property
    def teacher(self) -> keras.Model:
        """The old model."""
        return self._hidden.model

    def call(self, x: Any, training: Any = None) -> Any:
        """The model's outputs."""
        return self.model(x, training=training)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: Any = True
    ) -> Any:
        """Returns the model's loss, plus the distillation in training."""
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        if not training:
            return loss
        said = tf.stop_gradient(self.teacher(x, training=False))
        self._mean_distance.update_state(said, y_pred)
        return loss + tf.cast(self.weight * self.temperature**2 * self._distance(said, y_pred), loss.dtype)

    def distances(self, said: Any, y_pred: Any) -> tf.Tensor:
        """KL(teacher || model) of each row, at the temperature.

        Args:
            said: the teacher's outputs [batch, ..., its classes].
            y_pred: the model's outputs [batch, ..., classes].

        Returns:
            float32 [batch] (and further dims, such as time).
        """
        old = _softened(said, self.temperature, self._has_logits[1])
        new = _softened(y_pred[..., : said.shape[-1]], self.temperature, self._has_logits[0])
        return tf.reduce_sum(tf.exp(old) * (old - new), -1)

    def get_config(self) -> dict[str, Any]:
        """Raises `InputError`: save the model instead."""
        raise InputError("A Distilled model cannot be saved. Save the inner model: `distilled.model.save(path)`.")


class _Distance(keras.losses.Loss):
    """The mean distance as a Keras loss, so that masks and replicas affect it like a compiled one."""

    def __init__(self, distances):
        super().__init__(name="distillation", dtype="float32")
        self._distances = distances

    def call(self, y_true, y_pred):
        return self._distances(y_true, y_pred)


class _Teacher:
    """Hides a model from Keras, so that its weights are not tracked."""

    def __init__(self, model: keras.Model):
        self.model = model


def _softened(outputs, temperature: float, has_logits: bool) -> tf.Tensor:
    """Returns the log softmax at a temperature. The logarithms of probabilities are logits up to a constant."""
    outputs = tf.cast(outputs, tf.float32)
    logits = outputs if has_logits else tf.math.log(tf.maximum(outputs, keras.config.epsilon()))
    return tf.nn.log_softmax(logits / temperature)


def _check(model: keras.Model, teacher: keras.Model, weight: float, temperature: float) -> None:
    for name, number in (("weight", weight), ("temperature", temperature)):
        if not is_number(number) or number <= 0:
            raise InputError(f"`{name}` must be a number above 0. Received: {number!r}.")
    for name, value in (("model", model), ("teacher", teacher)):
        if not isinstance(value, keras.Model) or not value.built or not hasattr(value, "outputs"):
            raise InputError(f"`{name}` must be a built Sequential or functional model. Received: {value!r}.")
        if len(value.outputs) != 1:
            raise InputError(f"`{name}` must have one output. Received: {len(value.outputs)}.")
    for value in (model, teacher):
        check_classes(value, value.outputs[0].shape[-1], "Distillation")
    if model.outputs[0].shape[-1] < teacher.outputs[0].shape[-1]:
        raise InputError(
            f"The model has {model.outputs[0].shape[-1]} classes, its teacher {teacher.outputs[0].shape[-1]}. "
            "The model needs the teacher's classes first: `incremental.grow(teacher, classes)`."
        )
    known = {id(v) for v in model.weights}
    if any(id(v) in known for v in teacher.weights):
        raise InputError("The teacher shares weights with the model and would change with it. Clone it first.")
    if model.distribute_strategy is not teacher.distribute_strategy:
        raise InputError("Create or load the teacher under the model's strategy: `with strategy.scope():`.")
