"""Flows, mixtures, differential equations and fields, small, as other people write them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L
from keras import ops
from keras import optimizers as O
from material import numbers, sequential
from others_contrast import update


def net(last, width=8, size=6, **options):
    return keras.Sequential([keras.Input((size,)), L.Dense(width, "tanh"), L.Dense(last, **options)])


class Coupling(L.Layer):
    """Half of the numbers moves and scales the other half; a condition may say how."""

    def __init__(self, first):
        super().__init__()
        self.first, self.hidden, self.both = first, L.Dense(8, "tanh"), L.Dense(6)

    def call(self, x, condition=None):
        a, b = (x[:, :3], x[:, 3:]) if self.first else (x[:, 3:], x[:, :3])
        given = a if condition is None else ops.concatenate([a, condition], 1)
        shift, scale = ops.split(self.both(self.hidden(given)), 2, axis=1)
        scale = ops.tanh(scale)
        b = b * ops.exp(scale) + shift
        return ops.concatenate([a, b] if self.first else [b, a], 1), ops.sum(scale, 1)


class RealNvp(keras.Model):
    """A normalizing flow: the loss is the negative logarithm of the density."""

    def __init__(self):
        super().__init__()
        self.steps = [Coupling(True), Coupling(False)]

    def call(self, x, condition=None):
        total = 0.0
        for step in self.steps:
            x, volume = step(x, condition)
            total += volume
        return x, total

    def nll(self, x, condition=None):
        z, volume = self(x, condition)
        return -ops.mean(-0.5 * ops.sum(ops.square(z), axis=1) + volume)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.nll(data[0])
        return update(self, tape, loss)


class Posterior(keras.Model):
    """Simulation-based inference: sets are summarized, a flow is conditioned on it, and the summaries of a batch
    are drawn toward a normal distribution by their maximum mean discrepancy."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.flow = L.Dense(8, "silu"), L.Dense(3), RealNvp()
        self.seed = keras.random.SeedGenerator(8)

    def call(self, sets):
        return self.outer(ops.mean(self.inner(sets), axis=1))

    def compute_metrics(self, sets, parameters):
        summary = self(sets)
        drawn = keras.random.normal(ops.shape(summary), seed=self.seed)
        apart = 0.0
        for a, b, sign in ((summary, summary, 1), (drawn, drawn, 1), (summary, drawn, -2)):
            apart += sign * ops.mean(ops.exp(-0.5 * ops.sum(ops.square(a[:, None] - b[None]), -1)))
        return {"loss": self.flow.nll(parameters, summary) + ops.sqrt(ops.maximum(apart, 1e-4)), "apart": apart}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            metrics = self.compute_metrics(*data)
        return metrics | update(self, tape, metrics["loss"])


def sets(rows):
    rng = np.random.default_rng(3)
    means = rng.normal(size=(rows, 6)).astype("float32")
    return (means[:, None] + rng.normal(size=(rows, 5, 6))).astype("float32"), means


def mixtures():
    """The parameters of three normal distributions."""
    return keras.Sequential([net(8), L.Dense(3 + 3 + 3)])


def mixture_loss(y, p):
    shares, means, widths = ops.split(p, 3, axis=-1)
    deviations = ops.softplus(widths) + 1e-2
    logs = -0.5 * ops.square((y - means) / deviations) - ops.log(deviations)
    return -ops.logsumexp(ops.log_softmax(shares) + logs, axis=-1)


def one_number(rows):
    x, y = numbers(rows)
    return x, (x[:, :1] * 2 + y[:, None]).astype("float32")


class Euler(L.Layer):
    """A neural differential equation: fixed steps of one network."""

    def __init__(self):
        super().__init__()
        self.slope = net(6)

    def call(self, x):
        for _ in range(4):
            x = x + 0.25 * self.slope(x)
        return x


class Rays(keras.Model):
    """Radiance along rays: positions are encoded by waves, and samples weighed by what lies before them."""

    def __init__(self):
        super().__init__()
        self.field = net(4, size=12, width=10)

    def call(self, rays):
        points = rays[:, None, :3] + rays[:, None, 3:] * ops.linspace(0.1, 1.0, 6)[None, :, None]
        waves = ops.concatenate([f(points * k) for f in (ops.sin, ops.cos) for k in (1.0, 2.0)], -1)
        found = ops.reshape(self.field(ops.reshape(waves, (-1, 12))), (-1, 6, 4))
        solid = 1 - ops.exp(-ops.softplus(found[..., 0]) * 0.2)
        seen = ops.cumprod(1 - solid + 1e-6, axis=1)
        weights = solid * ops.concatenate([ops.ones_like(seen[:, :1]), seen[:, :-1]], 1)
        return ops.sum(weights[..., None] * ops.sigmoid(found[..., 1:]), axis=1)

    def train_step(self, data):
        rays, colors = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(rays, colors, self(rays, training=True))
        ratio = -10.0 * ops.log(loss) / ops.log(10.0)
        return update(self, tape, loss) | {"psnr": ratio}


def rays(rows):
    x, _ = numbers(rows)
    return x, (0.5 + 0.5 * np.tanh(x[:, :3])).astype("float32")


MEAN, SMALL = {"loss": lambda: "mse"}, {"optimizer": lambda: O.SGD(0.02)}
ADAM = {"optimizer": lambda: O.Adam(0.01)}
ROWS = {
    "real-nvp": {"model": RealNvp, **SMALL},
    "posterior-flow": {"model": Posterior, "data": sets, **SMALL},
    "mixture-density": {"model": mixtures, "data": one_number, "loss": lambda: mixture_loss, **SMALL, "judged": True},
    "neural-ode": {"model": sequential((6,), Euler, lambda: L.Dense(3)), **ADAM, "metrics": lambda: ["accuracy"]},
    "radiance": {"model": Rays, "data": rays, **MEAN, **ADAM},
}
