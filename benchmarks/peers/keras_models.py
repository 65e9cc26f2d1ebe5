"""The models in plain Keras, for whichever backend it has; layers have the names of works.py."""

import keras
from keras import layers

from benchmarks.peers.works import DEPTH, HEADS, NORM_EPSILON, WIDTH, Work, resnet_blocks


def build(work: Work, *, synchronized: bool = False) -> keras.Model:
    """Builds a model with the work's first weights.

    Args:
        work: what to build.
        synchronized: BatchNormalization takes its moments over all replicas, as one device does.
    """
    inputs = keras.Input(work.shape, dtype="int32" if work.tokens else "float32")
    model = keras.Model(inputs, MODELS[work.name](inputs, work, synchronized))
    first = work.weights()
    if unknown := {variable.path for variable in model.weights} ^ set(first):
        raise AssertionError(f"works.py and this model disagree about {sorted(unknown)}")
    for variable in model.weights:
        variable.assign(first[variable.path])
    return model


def _mlp(x, work, _):
    return layers.Dense(work.classes, name="logits")(layers.Dense(64, "relu", name="hidden")(x))


def _cnn(x, work, _):
    for name in ("conv1", "conv2"):
        x = layers.MaxPooling2D(2)(layers.Conv2D(32, 3, activation="relu", name=name)(x))
    return layers.Dense(work.classes, name="logits")(layers.Flatten()(x))


def _resnet18(x, work, synchronized):
    def convolve(x, channels, kernel, stride, name):
        x = layers.Conv2D(channels, kernel, stride, padding="same", use_bias=False, name=name)(x)
        return layers.BatchNormalization(
            momentum=0.9, epsilon=NORM_EPSILON, synchronized=synchronized, name=f"{name}_norm"
        )(x)

    x = layers.ReLU()(convolve(x, 64, 3, 1, "stem"))
    for name, _, channels, stride in resnet_blocks():
        y = layers.ReLU()(convolve(x, channels, 3, stride, f"{name}_conv1"))
        y = convolve(y, channels, 3, 1, f"{name}_conv2")
        if stride > 1:
            x = convolve(x, channels, 1, stride, f"{name}_shortcut")
        x = layers.ReLU()(layers.Add()([x, y]))
    return layers.Dense(work.classes, name="logits")(layers.GlobalAveragePooling2D()(x))


def _transformer(x, work, _):
    x = layers.Embedding(work.tokens, WIDTH, name="embedding")(x)
    for i in range(1, DEPTH + 1):
        y = layers.LayerNormalization(epsilon=NORM_EPSILON, name=f"block{i}_norm1")(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"block{i}_attention")
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(epsilon=NORM_EPSILON, name=f"block{i}_norm2")(x)
        y = layers.Dense(4 * WIDTH, "gelu", name=f"block{i}_wide")(y)
        x = layers.Add()([x, layers.Dense(WIDTH, name=f"block{i}_narrow")(y)])
    x = layers.LayerNormalization(epsilon=NORM_EPSILON, name="norm")(x)
    return layers.Dense(work.classes, name="logits")(x)


MODELS = {"mlp": _mlp, "cnn": _cnn, "resnet18": _resnet18, "transformer": _transformer}
