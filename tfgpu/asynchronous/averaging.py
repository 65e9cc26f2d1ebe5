"""Local SGD; `traffic` reports how much data the replicas of a model have sent to each other.

Example:
    >>> import keras, numpy as np, tfgpu
    >>> from tfgpu.asynchronous import averaging
    >>> strategy = tfgpu.strategies.averaging(every=2)
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=4, epochs=1, verbose=0)
    >>> traffic = averaging.traffic(model)
    >>> traffic.steps, traffic.rounds
    (8, 4)
"""

from dataclasses import dataclass

import keras

from tfgpu.errors import InputError
from tfgpu.optim.local_sgd import settle
from tfgpu.strategies.averaging import averaging

__all__ = ["Traffic", "averaging", "settle", "traffic"]


@dataclass(frozen=True)
class Traffic:
    """What one replica has sent to collectives since its model was compiled.

    Attributes:
        steps: training steps.
        rounds: how often the weights were averaged; 0 in synchronous training.
        bytes: payload of all collectives in training: gradients, weights and metrics. The network traffic depends on
            the all-reduce: a ring of N replicas sends 2 (N - 1) / N times the payload of a sum, and N - 1 times the
            payload of a gather (`top_k`).
        is_whole: False if `bytes` excludes tensors whose shapes change.
    """

    steps: int
    rounds: int
    bytes: int
    is_whole: bool = True


def traffic(model: keras.Model) -> Traffic:
    """Returns what each replica of a model has sent to the others in training, under any replicated strategy.

    Args:
        model: a model that has been trained by `fit`, `Trainer` or `train_on_batch`.

    Raises:
        InputError: the model has not been trained.
    """
    steps = model.train_function
    if not hasattr(steps, "traffic"):
        raise InputError("The model has not been trained since it was compiled. Call `fit` first.")
    averager = steps.averager
    sent, rounds = steps.traffic.bytes, 0
    if averager is not None:
        sent, rounds = sent + averager.sent_bytes, averager.rounds
    return Traffic(steps.done, rounds, round(sent), steps.traffic.is_whole)
