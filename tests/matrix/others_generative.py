"""Models that generate or estimate densities, small, as other people write them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L
from keras import ops
from keras import optimizers as O
from material import images, numbers, sequential
from others_contrast import follow, update
from others_density import net


class Sampling(L.Layer):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(4)

    def call(self, given):
        mean, log_variance = given
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seed)


class Divergence(L.Layer):
    """Adds the divergence from a normal distribution as a loss."""

    def call(self, given):
        mean, log_variance = given
        each = ops.sum(1 + log_variance - ops.square(mean) - ops.exp(log_variance), axis=1)
        self.add_loss(-0.05 * ops.mean(each))
        return given


def vae_by_add_loss():
    x = keras.Input((6,))
    h = L.Dense(8, "tanh")(x)
    z = Sampling()(Divergence()([L.Dense(3)(h), L.Dense(3)(h)]))
    return keras.Model(x, L.Dense(6)(L.Dense(8, "tanh")(z)))


def itself(rows):
    x, _ = numbers(rows)
    return x, x


class Vae(keras.Model):
    """Keras's recipe: trackers, and a step of its own; `classes` makes it a conditional one."""

    def __init__(self, beta=0.1, classes=0):
        super().__init__()
        self.beta, self.classes = beta, classes
        self.encode, self.decode = net(6, size=6 + classes), net(6, size=3 + classes)
        self.sample = Sampling()
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "divergence")]

    @property
    def metrics(self):
        return self.trackers

    def losses_of(self, x, y):
        more = [ops.one_hot(y, self.classes)] if self.classes else []
        mean, log_variance = ops.split(self.encode(ops.concatenate([x, *more], 1)), 2, axis=1)
        made = self.decode(ops.concatenate([self.sample([mean, log_variance]), *more], 1))
        reconstruction = ops.mean(ops.sum(ops.square(x - made), axis=1))
        each = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        return reconstruction, ops.mean(ops.sum(each, axis=1))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            parts = self.losses_of(*data)
            loss = parts[0] + self.beta * parts[1]
        update(self, tape, loss)
        for tracker, value in zip(self.trackers, (loss, *parts), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Quantizer(L.Layer):
    """Nearest vectors of a book, which moves by averages of counts and of sums; the gradient passes it."""

    def build(self, shape):
        start = keras.initializers.RandomNormal(seed=1)
        self.book = self.add_weight(shape=(5, shape[-1]), initializer=start, trainable=False, name="book")
        self.counts = self.add_weight(shape=(5,), initializer="ones", trainable=False, name="counts")
        self.sums = self.add_weight(shape=(5, shape[-1]), initializer=start, trainable=False, name="sums")
        self.sums.assign(self.book)

    def call(self, x, training=False):
        apart = ops.sum(ops.square(x[:, None] - self.book[None]), -1)
        chosen = ops.one_hot(ops.argmin(apart, -1), 5)
        found = ops.matmul(chosen, self.book)
        self.add_loss(0.25 * ops.mean(ops.square(ops.stop_gradient(found) - x)))
        if training:
            self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(chosen, axis=0))
            self.sums.assign(0.9 * self.sums + 0.1 * ops.matmul(ops.transpose(chosen), x))
            total = ops.sum(self.counts)
            counts = (self.counts + 1e-2) / (total + 5e-2) * total
            self.book.assign(self.sums / counts[:, None])
        return x + ops.stop_gradient(found - x)


class Adversaries(keras.Model):
    """Keras's recipe of a GAN: one network learns, then the other, on noise that is drawn anew."""

    def __init__(self):
        super().__init__()
        self.judge, self.maker = net(1), net(6, size=4)
        self.seed = keras.random.SeedGenerator(3)
        self.seen = [keras.metrics.Mean(name=name) for name in ("judged", "fooled")]

    def compile(self, optimizer, **options):
        super().compile(optimizer=optimizer, **options)
        self.second, self.entropy = O.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return self.seen

    def noise(self, x):
        return keras.random.normal((ops.shape(x)[0], 4), seed=self.seed)

    def train_step(self, data):
        x = data[0]
        rows = ops.shape(x)[0]
        both = ops.concatenate([self.maker(self.noise(x)), x], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed)
        with tf.GradientTape() as tape:
            judged = self.entropy(labels, self.judge(both))
        update(self, tape, judged, self.judge)
        with tf.GradientTape() as tape:
            fooled = self.entropy(ops.zeros((rows, 1)), self.judge(self.maker(self.noise(x))))
        weights = self.maker.trainable_weights
        self.second.apply_gradients(zip(tape.gradient(fooled, weights), weights, strict=True))
        self.seen[0].update_state(judged)
        self.seen[1].update_state(fooled)
        return {"judged": self.seen[0].result(), "fooled": self.seen[1].result()}


class Wasserstein(Adversaries):
    """The critic learns twice a step, with a penalty on the norm of its gradient between real and made."""

    def penalty(self, x, made):
        share = keras.random.uniform((ops.shape(x)[0], 1), seed=self.seed)
        between = x + share * (made - x)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.judge(between, training=True)
        norms = ops.sqrt(ops.sum(ops.square(tape.gradient(judged, between)), axis=1) + 1e-6)
        return ops.mean(ops.square(norms - 1.0))

    def train_step(self, data):
        x = data[0]
        for _ in range(2):
            with tf.GradientTape() as tape:
                made = self.maker(self.noise(x), training=True)
                critic = ops.mean(self.judge(made)) - ops.mean(self.judge(x)) + 10.0 * self.penalty(x, made)
            update(self, tape, critic, self.judge)
        with tf.GradientTape() as tape:
            maker = -ops.mean(self.judge(self.maker(self.noise(x), training=True)))
        weights = self.maker.trainable_weights
        self.second.apply_gradients(zip(tape.gradient(maker, weights), weights, strict=True))
        return {"critic": critic, "maker": maker}


class Cycle(keras.Model):
    """CycleGAN: two makers and two judges, four optimizers and one persistent tape."""

    def __init__(self):
        super().__init__()
        self.there, self.back, self.judge_x, self.judge_y = net(6), net(6), net(1), net(1)

    def compile(self, optimizer, **options):
        super().compile(optimizer=optimizer, **options)
        self.optimizers_of = {name: O.Adam(0.005, beta_1=0.5) for name in ("there", "back", "judge_x", "judge_y")}

    def train_step(self, data):
        (x, y), _ = data
        mean = keras.losses.MeanSquaredError()
        with tf.GradientTape(persistent=True) as tape:
            made_y, made_x = self.there(x), self.back(y)
            again = ops.mean(ops.abs(self.back(made_y) - x)) + ops.mean(ops.abs(self.there(made_x) - y))
            losses = {}
            for maker, judge, made, real in (("there", "judge_y", made_y, y), ("back", "judge_x", made_x, x)):
                on_made, on_real = getattr(self, judge)(made), getattr(self, judge)(real)
                losses[maker] = mean(ops.ones_like(on_made), on_made) + 5.0 * again
                losses[judge] = (mean(ops.ones_like(on_real), on_real) + mean(ops.zeros_like(on_made), on_made)) / 2
        for name, optimizer in self.optimizers_of.items():
            weights = getattr(self, name).trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(losses[name], weights), weights, strict=True))
        return losses


def two_kinds(rows):
    return (numbers(rows)[0], numbers(rows, 4)[0]), np.zeros(rows)


class Diffusion(keras.Model):
    """Keras's recipe of implicit diffusion: pictures are normalized, noised, and cleaned; a copy follows."""

    def __init__(self):
        super().__init__()
        self.normalizer = L.Normalization()
        self.network, self.averaged = self.unet(), self.unet()
        self.seed = keras.random.SeedGenerator(5)
        self.noise_loss = keras.metrics.Mean(name="noise")

    @property
    def metrics(self):
        return [self.noise_loss]

    def unet(self):
        pictures, power = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
        waves = ops.concatenate([ops.sin(power * f) for f in (1.0, 4.0)], axis=-1)
        x = L.Concatenate()([L.Conv2D(2, 1)(pictures), L.UpSampling2D(8)(waves)])
        skip = L.Conv2D(4, 3, padding="same", activation="swish")(L.BatchNormalization(center=False, scale=False)(x))
        x = L.Conv2D(4, 3, padding="same", activation="swish")(L.AveragePooling2D(2)(skip))
        x = L.Concatenate()([L.UpSampling2D()(x), skip])
        return keras.Model([pictures, power], L.Conv2D(1, 1, kernel_initializer="zeros")(x))

    def train_step(self, data):
        x = self.normalizer(data[0], training=True)
        rows = ops.shape(x)[0]
        noises = keras.random.normal(ops.shape(x), seed=self.seed)
        angles = 0.3 + 1.2 * keras.random.uniform((rows, 1, 1, 1), seed=self.seed)
        signal, power = ops.cos(angles), ops.sin(angles)
        with tf.GradientTape() as tape:
            made = self.network([signal * x + power * noises, power**2], training=True)
            loss = self.compiled_loss_of(noises, made)
        update(self, tape, loss, self.network)
        self.noise_loss.update_state(loss)
        follow_weights(self.averaged, self.network)
        return {m.name: m.result() for m in self.metrics}

    def compiled_loss_of(self, noises, made):
        return ops.mean(ops.abs(noises - made))


def follow_weights(target, source):
    follow(target, source, 0.9)


def normalized():
    model = Diffusion()
    model.normalizer.adapt(images(16)[0])
    return model


class Steps(keras.Model):
    """Diffusion of numbers at drawn steps, with a table of variances."""

    def __init__(self):
        super().__init__()
        self.network = net(6, size=7)
        self.kept = np.cumprod(1.0 - np.linspace(1e-3, 0.2, 10)).astype("float32")
        self.seed = keras.random.SeedGenerator(5)

    def noised(self, x):
        steps = keras.random.randint((ops.shape(x)[0],), 0, 10, seed=self.seed)
        noise = keras.random.normal(ops.shape(x), seed=self.seed)
        kept = ops.take(self.kept, steps)[:, None]
        return ops.sqrt(kept) * x + ops.sqrt(1 - kept) * noise, noise, ops.cast(steps, "float32")[:, None] / 10

    def train_step(self, data):
        x, noise, at = self.noised(data[0])
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=noise, y_pred=self.network(ops.concatenate([x, at], 1), training=True))
        return update(self, tape, loss, self.network)


class Flow(Steps):
    """Flow matching: the network learns the way from noise to data."""

    def noised(self, x):
        at = keras.random.uniform((ops.shape(x)[0], 1), seed=self.seed)
        noise = keras.random.normal(ops.shape(x), seed=self.seed)
        return (1 - at) * noise + at * x, x - noise, at


class Scores(Steps):
    """Sliced score matching: the derivative of the scores along drawn directions."""

    def train_step(self, data):
        x = ops.concatenate([data[0], ops.ones_like(data[0][:, :1])], 1)
        along = keras.random.normal(ops.shape(data[0]), seed=self.seed)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                scores = self.network(x)
                projected = ops.sum(scores * along, -1)
            slope = ops.sum(inner.gradient(projected, x)[:, :6] * along, -1)
            loss = ops.mean(slope + 0.5 * ops.square(projected))
        return update(self, tape, loss, self.network)


def condensed(quantizer=Quantizer):
    return sequential((6,), lambda: L.Dense(4, "tanh"), quantizer, lambda: L.Dense(6))


MEAN, SMALL = {"loss": lambda: "mse"}, {"optimizer": lambda: O.SGD(0.02)}
ADAM = {"optimizer": lambda: O.Adam(0.01)}
ROWS = {
    "vae-add-loss": {
        "model": vae_by_add_loss,
        "data": itself,
        **MEAN,
        **ADAM,
        "metrics": lambda: ["mae"],
        "judged": True,
    },
    "vae": {"model": Vae, **ADAM},
    "vae-beta": {"model": lambda: Vae(4.0), **SMALL},
    "vae-conditional": {"model": lambda: Vae(classes=3), **ADAM},
    "vq-vae": {"model": condensed(), "data": itself, **MEAN},
    "gan": {"model": Adversaries, **ADAM},
    "gan-wasserstein": {"model": Wasserstein, **SMALL},
    "gan-cycle": {"model": Cycle, "data": two_kinds},
    "diffusion-implicit": {"model": normalized, "data": images, **SMALL},
    "diffusion-steps": {"model": Steps, **MEAN, **ADAM},
    "flow-matching": {"model": Flow, **MEAN},
    "score-matching": {"model": Scores, **SMALL},
}
