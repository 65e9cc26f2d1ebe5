"""Incremental learning: trains a model on new data and new classes without forgetting the old ones.

    from tfgpu.training import incremental

    old = keras.models.load_model("first.keras")
    model = incremental.grow(old, classes=12)                       # old logits kept, optimizer state too
    replay = incremental.Replay(200, balance=True).add(old_x, old_y)
    model.fit(replay.mix(new_data, share=0.5), epochs=10)

Everything works with `compile` and `fit`, and with replicas gives the same result as one device.
"""

from tfgpu.training.incremental.continuing import rewarm, warm_start
from tfgpu.training.incremental.distilling import Distilled
from tfgpu.training.incremental.elastic import ElasticWeights
from tfgpu.training.incremental.freezing import by_depth, discriminative, freeze, unfreeze
from tfgpu.training.incremental.growing import GrownDense, grow
from tfgpu.training.incremental.measuring import Accuracies, accuracies
from tfgpu.training.incremental.replay import Replay
from tfgpu.training.incremental.streams import fit_stream, windows

__all__ = [
    "Accuracies",
    "Distilled",
    "ElasticWeights",
    "GrownDense",
    "Replay",
    "accuracies",
    "by_depth",
    "discriminative",
    "fit_stream",
    "freeze",
    "grow",
    "rewarm",
    "unfreeze",
    "warm_start",
    "windows",
]
