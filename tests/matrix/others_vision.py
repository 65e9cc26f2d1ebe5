"""Models of pictures, small, as other people write them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L
from keras import ops
from keras import optimizers as O
from material import colored, colors, images
from others_contrast import update
from others_text import Block

SIDE, WIDTH = 8, 8


class Patches(L.Layer):
    """Squares of 4 x 4 as vectors, with a class token before them and learned places."""

    def __init__(self, token=True):
        super().__init__()
        self.cut, self.token = L.Conv2D(WIDTH, 4, 4), token

    def build(self, shape):
        self.cut.build(shape)
        start = keras.initializers.RandomNormal(seed=2)
        if self.token:
            self.first = self.add_weight(shape=(1, 1, WIDTH), initializer=start, name="first")
        self.places = self.add_weight(shape=(1, 4 + self.token, WIDTH), initializer=start, name="places")

    def call(self, x):
        x = ops.reshape(self.cut(x), (-1, 4, WIDTH))
        if self.token:
            x = ops.concatenate([ops.tile(self.first, (ops.shape(x)[0], 1, 1)), x], axis=1)
        return x + self.places


def vit():
    x = given = keras.Input((SIDE, SIDE, 1))
    x = L.LayerNormalization()(Block(drop=0.1)(Patches()(x)))
    return keras.Model(given, L.Dense(3)(x[:, 0]))


class Masked(keras.Model):
    """A masked autoencoder: of four patches it draws two to hide, other ones in each row."""

    def __init__(self):
        super().__init__()
        self.patches, self.encode, self.decode = Patches(token=False), Block(), Block()
        self.hidden = self.add_weight(shape=(1, 1, WIDTH), initializer="random_normal", name="hidden")
        self.out = L.Dense(16)
        self.seed = keras.random.SeedGenerator(4)

    def train_step(self, data):
        x = data[0]
        squares = ops.reshape(ops.transpose(ops.reshape(x, (-1, 2, 4, 2, 4)), (0, 1, 3, 2, 4)), (-1, 4, 16))
        order = ops.argsort(keras.random.uniform((ops.shape(x)[0], 4), seed=self.seed), axis=-1)
        back, masked = ops.argsort(order, axis=-1), order[:, 2:]
        with tf.GradientTape() as tape:
            seen = self.encode(ops.take_along_axis(self.patches(x), order[:, :2, None], axis=1))
            filler = ops.broadcast_to(self.hidden, (ops.shape(x)[0], 2, WIDTH))
            restored = ops.take_along_axis(ops.concatenate([seen, filler], 1), back[:, :, None], axis=1)
            made = self.out(self.decode(restored))
            wanted, made = (ops.take_along_axis(z, masked[:, :, None], axis=1) for z in (squares, made))
            loss = self.compute_loss(y=wanted, y_pred=made)
        return update(self, tape, loss)


class Windows(L.Layer):
    """Attention within windows that lie next to each other, or shifted by half of one."""

    def __init__(self, shift):
        super().__init__()
        self.shift, self.attend = shift, L.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.attend.build((None, 4, WIDTH), (None, 4, WIDTH))

    def call(self, x):
        x = ops.roll(x, (-self.shift, -self.shift), axis=(1, 2))
        parts = ops.transpose(ops.reshape(x, (-1, 2, 2, 2, 2, WIDTH)), (0, 1, 3, 2, 4, 5))
        parts = ops.reshape(parts, (-1, 4, WIDTH))
        parts = ops.reshape(self.attend(parts, parts), (-1, 2, 2, 2, 2, WIDTH))
        x = ops.reshape(ops.transpose(parts, (0, 1, 3, 2, 4, 5)), (-1, 4, 4, WIDTH))
        return ops.roll(x, (self.shift, self.shift), axis=(1, 2))


def swin():
    x = given = keras.Input((SIDE, SIDE, 1))
    x = L.Conv2D(WIDTH, 2, 2)(x)
    for shift in (0, 1):
        x = x + Windows(shift)(L.LayerNormalization()(x))
    return keras.Model(given, L.Dense(3)(L.GlobalAveragePooling2D()(x)))


class LayerScale(L.Layer):
    def build(self, shape):
        self.gamma = self.add_weight(shape=(shape[-1],), initializer=keras.initializers.Constant(0.1), name="gamma")

    def call(self, x):
        return x * self.gamma


class StochasticDepth(L.Layer):
    """Leaves the block out for some of the rows."""

    def __init__(self, rate):
        super().__init__()
        self.rate, self.seed = rate, keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        if not training:
            return x
        keep = 1.0 - self.rate
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        return x / keep * ops.floor(keep + keras.random.uniform(shape, seed=self.seed))


def convnext():
    x = given = keras.Input((SIDE, SIDE, 1))
    x = L.LayerNormalization()(L.Conv2D(6, 2, 2)(x))
    for _ in range(2):
        inner = L.LayerNormalization()(L.DepthwiseConv2D(3, padding="same")(x))
        inner = L.Dense(6)(L.Dense(12, "gelu")(inner))
        x = x + StochasticDepth(0.3)(LayerScale()(inner))
    return keras.Model(given, L.Dense(3)(L.GlobalAveragePooling2D()(x)))


def efficient():
    x = given = keras.Input((SIDE, SIDE, 1))
    x = ops.silu(L.BatchNormalization()(L.Conv2D(4, 3, 2, padding="same", use_bias=False)(x)))
    inner = ops.silu(L.BatchNormalization()(L.DepthwiseConv2D(3, padding="same", use_bias=False)(x)))
    squeezed = L.GlobalAveragePooling2D(keepdims=True)(inner)
    inner = inner * L.Conv2D(4, 1, activation="sigmoid")(L.Conv2D(2, 1, activation="silu")(squeezed))
    inner = L.BatchNormalization()(L.Conv2D(4, 1, use_bias=False)(inner))
    x = x + L.Dropout(0.2, noise_shape=(None, 1, 1, 1), seed=6)(inner)
    return keras.Model(given, L.Dense(3)(L.GlobalAveragePooling2D()(x)))


def unet(activation="sigmoid"):
    x = given = keras.Input((SIDE, SIDE, 1))
    skip = L.Conv2D(4, 3, padding="same", activation="tanh")(x)
    x = L.BatchNormalization()(L.Conv2D(4, 3, padding="same", activation="tanh")(L.AveragePooling2D(2)(skip)))
    x = L.Concatenate()([L.Conv2DTranspose(4, 2, 2)(x), skip])
    return keras.Model(given, L.Conv2D(1, 1, activation=activation)(x))


def bright(rows):
    x, _ = images(rows)
    return x, (x > 0.8).astype("float32")


def dice_and_focal(y, p):
    """Of the whole batch, as most people write it."""
    dice = 1 - (2 * ops.sum(y * p) + 1.0) / (ops.sum(y) + ops.sum(p) + 1.0)
    p = ops.clip(p, 1e-6, 1 - 1e-6)
    focal = -ops.mean(0.25 * y * (1 - p) ** 2 * ops.log(p) + 0.75 * (1 - y) * p**2 * ops.log(1 - p))
    return dice + focal


def overlap(y, p):
    """Intersection over union of the batch, as a metric function."""
    p = ops.cast(p > 0.5, "float32")
    return ops.sum(y * p) / (ops.sum(ops.maximum(y, p)) + 1e-6)


def deeplab():
    x = given = keras.Input((SIDE, SIDE, 1))
    x = L.Conv2D(4, 3, padding="same", activation="tanh")(x)
    parts = [L.Conv2D(4, 3, padding="same", dilation_rate=rate, use_bias=False)(x) for rate in (1, 2, 3)]
    pooled = L.Conv2D(4, 1)(L.GlobalAveragePooling2D(keepdims=True)(x))
    parts.append(L.UpSampling2D(SIDE, interpolation="bilinear")(pooled))
    x = L.BatchNormalization()(L.Concatenate()(parts))
    return keras.Model(given, L.Conv2D(2, 1)(ops.tanh(x)))


def dots(rows):
    """A class for each dot; 255 where nobody says."""
    x, _ = images(rows)
    return x, np.where(x[..., 0] < -1.2, 255, x[..., 0] > 0.8).astype("int32")


class Detector(keras.Model):
    """As RetinaNet: the losses of classes and boxes are divided by the batch's positive anchors."""

    def __init__(self):
        x = given = keras.Input((SIDE, SIDE, 1))
        x = L.Conv2D(6, 3, 2, padding="same", activation="tanh")(x)
        heads = {"classes": L.Conv2D(2, 3, padding="same"), "boxes": L.Conv2D(4, 3, padding="same")}
        super().__init__(given, {name: L.Reshape((16, -1), name=name)(head(x)) for name, head in heads.items()})
        self.focal = keras.losses.BinaryFocalCrossentropy(from_logits=True, reduction="sum")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        there = ops.cast(y["classes"] > 0, "float32")
        count = ops.maximum(ops.sum(there), 1.0)
        wanted = ops.one_hot(y["classes"] - 1, 2)
        classes = self.focal(wanted, y_pred["classes"]) / count
        apart = ops.sum(ops.abs(y["boxes"] - y_pred["boxes"]), -1)
        return classes + 0.1 * ops.sum(apart * there) / count


class WeightedDetector(Detector):
    """As KerasHub's: weights that the batch's positives normalize, given to the compiled losses."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        there = ops.cast(y["classes"] > 0, "float32")
        weights = there / ops.maximum(ops.sum(there), 1.0)
        wanted = {"classes": ops.one_hot(y["classes"] - 1, 2), "boxes": y["boxes"]}
        both = {"classes": ops.ones_like(there) / ops.maximum(ops.sum(there), 1.0), "boxes": weights}
        return super(Detector, self).compute_loss(x, wanted, y_pred, both, training)


def anchors(rows):
    rng = np.random.default_rng(6)
    classes = rng.integers(1, 3, (rows, 16)) * (rng.random((rows, 16)) < np.linspace(0.02, 0.4, rows)[:, None])
    return images(rows)[0], {
        "classes": classes.astype("int32"),
        "boxes": rng.normal(size=(rows, 16, 4)).astype("float32"),
    }


def summed_losses():
    return {
        "classes": keras.losses.BinaryCrossentropy(from_logits=True, reduction="sum"),
        "boxes": keras.losses.Huber(reduction="sum"),
    }


def grid():
    """Three outputs, one of them normalized by a layer that keeps a running mean and variance."""
    x = given = keras.Input((SIDE, SIDE, 1))
    x = L.BatchNormalization(momentum=0.9)(L.Conv2D(6, 3, 2, padding="same")(x))
    x = ops.leaky_relu(x, 0.1)
    sizes = {"boxes": 4, "there": 1, "classes": 2}
    return keras.Model(given, {name: L.Conv2D(size, 1, name=name)(x) for name, size in sizes.items()})


def cells(rows):
    x, y = anchors(rows)
    classes = y["classes"].reshape(rows, 4, 4)
    there = (classes > 0).astype("float32")
    targets = {
        "boxes": y["boxes"].reshape(rows, 4, 4, 4),
        "there": there[..., None],
        "classes": np.maximum(classes - 1, 0),
    }
    return x, targets, {"boxes": there, "there": np.ones_like(there), "classes": there}


def grid_losses():
    return {
        "boxes": "mse",
        "there": keras.losses.BinaryCrossentropy(from_logits=True),
        "classes": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }


class Queries(keras.Model):
    """As DETR: three queries look at the picture; each takes the target that suits it best."""

    def __init__(self):
        super().__init__()
        self.see, self.attend, self.out = L.Conv2D(WIDTH, 4, 4), L.MultiHeadAttention(2, 4), L.Dense(4)
        self.queries = self.add_weight(shape=(1, 3, WIDTH), name="queries")

    def call(self, x):
        seen = ops.reshape(self.see(x), (-1, 4, WIDTH))
        return self.out(self.attend(ops.repeat(self.queries, ops.shape(x)[0], axis=0), seen))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        apart = ops.sum(ops.abs(y_pred[:, :, None] - y["boxes"][:, None]), -1)
        there = y["there"][:, None]
        chosen = ops.one_hot(ops.argmin(ops.stop_gradient(apart) + 100.0 * (1 - there), -1), 3)
        count = ops.maximum(ops.sum(y["there"]), 1.0)
        return ops.sum(apart * chosen * there) / count


def boxes(rows):
    rng = np.random.default_rng(6)
    there = (np.arange(3) <= np.arange(rows)[:, None] % 3).astype("float32")
    return images(rows)[0], {"boxes": rng.normal(size=(rows, 3, 4)).astype("float32"), "there": there}


def heat_loss(y, p):
    """CenterNet's: where a peak is, one loss, near it less of the other; all by the number of peaks."""
    p = ops.clip(ops.sigmoid(p), 1e-4, 1 - 1e-4)
    peak = ops.cast(y > 0.99, "float32")
    at = ops.log(p) * (1 - p) ** 2 * peak
    around = ops.log(1 - p) * p**2 * (1 - y) ** 4 * (1 - peak)
    return -ops.sum(at + around) / ops.maximum(ops.sum(peak), 1.0)


def peaks(rows):
    x, y = bright(rows)
    return x, np.maximum(np.where(x > 1.9, 1.0, 0.0), 0.4 * y).astype("float32")


class StandardConv(L.Conv2D):
    """Its kernel is standardized before it is used."""

    def convolution_op(self, inputs, kernel):
        mean, variance = ops.moments(kernel, axes=(0, 1, 2), keepdims=True)
        return super().convolution_op(inputs, (kernel - mean) / ops.sqrt(variance + 1e-3))


def standardized():
    x = given = keras.Input((SIDE, SIDE, 1))
    x = L.GroupNormalization(2)(StandardConv(4, 3, padding="same")(x))
    return keras.Model(given, L.Dense(3)(L.GlobalAveragePooling2D()(ops.silu(x))))


class Capsules(L.Layer):
    """Routing by agreement, in three rounds."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[1], 3, shape[2], 4), name="kernel")

    def call(self, x):
        votes = ops.einsum("bid,ijdk->bijk", x, self.kernel)
        scores = ops.zeros(ops.shape(votes)[:3])
        for _ in range(3):
            both = ops.sum(ops.softmax(scores, axis=2)[..., None] * votes, axis=1)
            power = ops.sum(ops.square(both), -1, keepdims=True)
            both = both * power / (1 + power) / ops.sqrt(power + 1e-3)
            scores = scores + ops.einsum("bijk,bjk->bij", votes, both)
        return ops.sqrt(ops.sum(ops.square(both), -1) + 1e-3)


def capsules():
    x = given = keras.Input((SIDE, SIDE, 1))
    return keras.Model(given, Capsules()(ops.reshape(L.Conv2D(WIDTH, 4, 4)(x), (-1, 4, WIDTH))))


def spectral():
    return colored(lambda: L.SpectralNormalization(L.Conv2D(2, 3)))()


def margin(y, p):
    chosen = ops.one_hot(ops.cast(ops.reshape(y, (-1,)), "int32"), 3)
    lost = chosen * ops.relu(0.9 - p) ** 2 + 0.5 * (1 - chosen) * ops.relu(p - 0.1) ** 2
    return ops.mean(ops.sum(lost, 1))


ENTROPY = {"metrics": lambda: ["accuracy"]}
ROWS = {
    "vision-transformer": {"loop": True, "model": vit, **ENTROPY, "judged": True},
    "masked-autoencoder": {"model": Masked, "loss": lambda: "mse", "optimizer": lambda: O.SGD(0.02), "rounding": True},
    "swin-windows": {"model": swin, **ENTROPY},
    "convnext": {"loop": True, "model": convnext, **ENTROPY, "optimizer": lambda: O.AdamW(0.01)},
    "efficient-squeeze": {"loop": True, "model": efficient, **ENTROPY},
    "unet-dice-focal": {"model": unet, "data": bright, "loss": lambda: dice_and_focal, "metrics": lambda: [overlap]},
    "deeplab": {"model": deeplab, "data": dots}
    | {"loss": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255)},
    "detector-positives": {"model": Detector, "data": anchors},
    "detector-weights": {"model": WeightedDetector, "data": anchors, "loss": summed_losses},
    "detector-grid": {"model": grid, "data": cells, "loss": grid_losses},
    "detector-set": {"model": Queries, "data": boxes, "optimizer": lambda: O.SGD(0.02)},
    "detector-centers": {"model": lambda: unet(None), "data": peaks, "loss": lambda: heat_loss},
    "standardized-weights": {"model": standardized, **ENTROPY},
    "capsules": {"model": capsules, "loss": lambda: margin},
    "spectral-normalization": {"model": spectral, "data": colors, **ENTROPY},
}
for row in ROWS.values():
    row.setdefault("data", images)
