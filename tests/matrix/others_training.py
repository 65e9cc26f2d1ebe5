"""Ways to train that people write into `train_step` or callbacks, small."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L
from keras import ops
from keras import optimizers as O
from material import images, numbers
from others_contrast import follow, update

ENTROPY = keras.losses.sparse_categorical_crossentropy


def logits(last=3, width=8):
    return keras.Sequential([keras.Input((6,)), L.Dense(width, "tanh"), L.Dense(last)])


class Classifier(keras.Model):
    """Three classes; the kinds below train it in ways of their own."""

    def __init__(self):
        super().__init__()
        self.net = logits()

    def call(self, x):
        return self.net(x)


class Distiller(keras.Model):
    """Keras's recipe: a student learns from labels and from a teacher that stays as it is."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = logits(width=12), logits(width=5)
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        soft = ops.softmax(self.teacher(x, training=False) / 3.0, axis=1)
        apart = keras.losses.kl_divergence(soft, ops.softmax(y_pred / 3.0, axis=1))
        return 0.3 * super().compute_loss(x, y, y_pred, sample_weight) + 0.7 * ops.mean(apart) * 9.0


class MeanTeacher(keras.Model):
    """Half of the batch has labels; on all of it the student agrees with a slow teacher, more so over time."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = logits(), logits()
        self.teacher.trainable = False
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")
        self.seed = keras.random.SeedGenerator(3)

    def train_step(self, data):
        x, y = data
        noisy = x + 0.1 * keras.random.normal(ops.shape(x), seed=self.seed)
        known = ops.cast(x[:, 0] > 0, "float32")
        with tf.GradientTape() as tape:
            made, wanted = self.student(noisy, training=True), self.teacher(x, training=False)
            labeled = ops.sum(ENTROPY(y, made, from_logits=True) * known) / ops.maximum(ops.sum(known), 1.0)
            share = ops.minimum(self.steps / 5.0, 1.0)
            loss = labeled + share * ops.mean(ops.square(ops.softmax(made) - ops.softmax(wanted)))
        logs = update(self, tape, loss, self.student)
        self.steps.assign_add(1.0)
        follow(self.teacher, self.student, 0.9)
        return logs


class Mixed(keras.Model):
    """Each row is mixed with that of another place in the batch, by a share drawn for each."""

    def __init__(self):
        super().__init__()
        self.net, self.seed = logits(), keras.random.SeedGenerator(4)

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        rows = ops.shape(x)[0]
        share = keras.random.beta((rows, 1), 0.4, 0.4, seed=self.seed)
        order = keras.random.shuffle(ops.arange(rows), seed=self.seed)
        y = ops.one_hot(y, 3)
        x = share * x + (1 - share) * ops.take(x, order, axis=0)
        y = share * y + (1 - share) * ops.take(y, order, axis=0)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return update(self, tape, loss)


class Cut(keras.Model):
    """A square of each picture comes from the picture after it."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((8, 8, 1)), L.Conv2D(3, 3), L.GlobalAveragePooling2D(), L.Dense(3)])
        self.seed = keras.random.SeedGenerator(4)

    def train_step(self, data):
        x, y = data
        corner = keras.random.randint((2,), 0, 5, seed=self.seed)
        lines = ops.arange(8)
        inside = [ops.logical_and(lines >= corner[i], lines < corner[i] + 4) for i in range(2)]
        box = ops.cast(ops.logical_and(inside[0][:, None], inside[1][None]), "float32")[None, :, :, None]
        x, share = x * (1 - box) + ops.roll(x, 1, axis=0) * box, ops.mean(box)
        with tf.GradientTape() as tape:
            made = self.net(x, training=True)
            parts = (ops.mean(ENTROPY(each, made, from_logits=True)) for each in (y, ops.roll(y, 1, axis=0)))
            loss = sum(part * weight for part, weight in zip(parts, (1 - share, share), strict=True))
        return update(self, tape, loss)


class Attacked(Classifier):
    """Learns from inputs and from those moved against it, by the sign of the gradient."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.compute_loss(x, y, self(x, training=True))
        moved = x + 0.1 * ops.sign(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            losses = [self.compute_loss(x, y, self(each, training=True)) for each in (x, moved)]
            loss = sum(losses) / 2
        return update(self, tape, loss)


class Sharpness(Classifier):
    """Sharpness-aware minimization, as in Keras's recipe: it climbs, and descends from there."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients = tape.gradient(loss, variables)
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
        steps = [g * 0.05 / (norm + 1e-12) for g in gradients]
        for variable, step in zip(variables, steps, strict=True):
            variable.assign_add(step)
        with tf.GradientTape() as tape:
            moved = self.compute_loss(x, y, self(x))
        gradients = tape.gradient(moved, variables)
        for variable, step in zip(variables, steps, strict=True):
            variable.assign_sub(step)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


class Adaptive(Classifier):
    """Adaptive clipping: each unit's gradient is at most a share of the unit's weights."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        clipped = []
        for v, g in zip(self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True):
            axis = 0 if len(v.shape) > 1 else None
            limit = 0.02 * ops.maximum(ops.sqrt(ops.sum(ops.square(v), axis=axis, keepdims=True)), 1e-3)
            norm = ops.sqrt(ops.sum(ops.square(g), axis=axis, keepdims=True))
            clipped.append(ops.where(norm > limit, g * limit / ops.maximum(norm, 1e-6), g))
        self.optimizer.apply_gradients(zip(clipped, self.trainable_variables, strict=True))
        return {"loss": loss}


class Accumulates(keras.Model):
    """Adds gradients up by hand over two steps, as answers on Stack Overflow show."""

    def __init__(self):
        super().__init__()
        self.net = logits()
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False, name="sum")
            for v in self.net.trainable_variables
        ]

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.count.assign_add(1)
        for total, g in zip(self.sums, tape.gradient(loss, self.net.trainable_variables), strict=True):
            total.assign_add(g / 2)
        due = ops.cast(ops.equal(self.count % 2, 0), "float32")
        self.optimizer.apply_gradients(
            zip([total * due for total in self.sums], self.net.trainable_variables, strict=True)
        )
        for total in self.sums:
            total.assign(total * (1 - due))
        return {"loss": loss}


class Physics(keras.Model):
    """A physics-informed network: the second derivative of its output is part of the loss, and so are edges."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((2,)), L.Dense(8, "tanh"), L.Dense(8, "tanh"), L.Dense(1)])

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        place, time = x[:, :1], x[:, 1:]
        with tf.GradientTape() as tape:
            with tf.GradientTape() as second:
                second.watch(place)
                with tf.GradientTape(persistent=True) as first:
                    first.watch([place, time])
                    u = self.net(ops.concatenate([place, time], 1))
                along, later = first.gradient(u, place), first.gradient(u, time)
            rest = later + u * along - 0.1 * second.gradient(along, place)
            edges = self.net(ops.convert_to_tensor([[-1.0, 0.0], [1.0, 0.0]]))
            loss = ops.mean(ops.square(rest)) + ops.mean(ops.square(u - y)) + ops.mean(ops.square(edges))
        return update(self, tape, loss)


def places(rows):
    x = np.tanh(numbers(rows)[0][:, :2])
    return x, np.sin(3 * x[:, :1])


class Uncertain(keras.Model):
    """Two tasks that are weighed by uncertainties, which it learns too."""

    def __init__(self):
        x = keras.Input((6,))
        h = L.Dense(8, "tanh")(x)
        super().__init__(x, {"kind": L.Dense(3)(h), "size": L.Dense(1)(h)})
        self.logs = self.add_weight(shape=(2,), initializer="zeros", name="logs")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        kind = ops.mean(ENTROPY(y["kind"], y_pred["kind"], from_logits=True))
        size = ops.mean(ops.square(y["size"] - y_pred["size"]))
        return ops.sum(ops.exp(-self.logs) * ops.stack([kind, size]) + self.logs)


def two_tasks(rows):
    x, y = numbers(rows)
    return x, {"kind": y, "size": x[:, :1] * 2}


class Harder(keras.Model):
    """Rows whose loss is above a threshold do not count; a callback raises it each epoch."""

    def __init__(self):
        super().__init__()
        self.net = logits()
        self.limit = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(1.0), trainable=False, name="limit"
        )

    def call(self, x):
        return self.net(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        losses = ENTROPY(y, y_pred, from_logits=True)
        easy = ops.cast(ops.stop_gradient(losses) < self.limit, "float32")
        return ops.sum(losses * easy) / (ops.sum(easy) + 1e-3)


class Raises(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.limit.assign(1.0 + 0.5 * (epoch + 1))


def adapted():
    """A frozen base with BatchNormalization, and low-rank parts that learn beside it."""
    x = given = keras.Input((6,))
    base = keras.Sequential([keras.Input((6,)), L.Dense(8, "tanh"), L.BatchNormalization(), L.Dense(8, "tanh")])
    base.trainable = False
    x = base(x, training=False)
    model = keras.Model(given, L.Dense(3)(x))
    for layer in base.layers:
        if isinstance(layer, L.Dense):
            layer.enable_lora(2)
    base.trainable = True
    base.layers[1].trainable = False
    return model


class Hyper(keras.Model):
    """One network makes the weights of another, for each row."""

    def __init__(self):
        super().__init__()
        self.maker = logits(last=2 * 3 + 3)

    def call(self, x):
        made = self.maker(x)
        return ops.einsum("bi,bij->bj", x[:, :2], ops.reshape(made[:, :6], (-1, 2, 3))) + made[:, 6:]


class Values(keras.Model):
    """Q-learning: a target network says what the next state is worth, and is copied every third step."""

    def __init__(self):
        super().__init__()
        self.net, self.target = logits(), logits()
        self.target.trainable = False
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps")

    def train_step(self, data):
        (state, following, action), reward = data
        best = ops.max(self.target(following, training=False), axis=1)
        with tf.GradientTape() as tape:
            taken = ops.sum(self.net(state, training=True) * ops.one_hot(action, 3), axis=1)
            loss = self.compute_loss(y=reward + 0.9 * best, y_pred=taken)
        logs = update(self, tape, loss, self.net)
        self.steps.assign_add(1)
        due = ops.equal(self.steps % 3, 0)
        for slow, fast in zip(self.target.variables, self.net.variables, strict=True):
            slow.assign(ops.where(due, fast, slow))
        return logs | {"worth": ops.mean(best)}


def moves(rows):
    (x, action), (other, _) = numbers(rows), numbers(rows, 4)
    return (x, other, action), other[:, 0]


class Policy(keras.Model):
    """Proximal policy: advantages are standardized over the batch, the change of the policy is clipped."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = logits(), logits(1)
        self.second = O.Adam(0.01)

    def train_step(self, data):
        (state, before, action), reward = data
        before = ops.log_softmax(before[:, :3])
        with tf.GradientTape(persistent=True) as tape:
            value = self.critic(state)[:, 0]
            gain = reward - ops.stop_gradient(value)
            gain = (gain - ops.mean(gain)) / (ops.std(gain) + 1e-3)
            logs = ops.log_softmax(self.actor(state))
            ratio = ops.exp(ops.sum((logs - before) * ops.one_hot(action, 3), 1))
            actor = -ops.mean(ops.minimum(ratio * gain, ops.clip(ratio, 0.8, 1.2) * gain))
            critic = ops.mean(ops.square(reward - value))
        for optimizer, part, loss in ((self.optimizer, self.actor, actor), (self.second, self.critic, critic)):
            weights = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"actor": actor, "critic": critic}


SMALL = {"optimizer": lambda: O.SGD(0.05)}
ROWS = {
    "distillation": {"model": Distiller, "metrics": lambda: ["accuracy"]},
    "mean-teacher": {"model": MeanTeacher, "optimizer": lambda: O.Adam(0.01)},
    "mixup": {"model": Mixed, "loss": lambda: keras.losses.CategoricalCrossentropy(from_logits=True)},
    "cutmix": {"model": Cut, "data": images},
    "adversarial-signs": {"model": Attacked},
    "sharpness-aware": {"model": Sharpness},
    "clipped-by-unit": {"model": Adaptive},
    "accumulated-by-hand": {"model": Accumulates},
    "physics-informed": {"model": Physics, "data": places, **SMALL},
    "uncertain-tasks": {"model": Uncertain, "data": two_tasks, **SMALL},
    "curriculum": {"model": Harder, "callbacks": lambda at: [Raises()]},
    "low-rank": {"loop": True, "model": adapted, "metrics": lambda: ["accuracy"]},
    "hypernetwork": {"model": Hyper, "optimizer": lambda: O.Adam(0.01)},
    "q-learning": {"model": Values, "data": moves, "loss": lambda: keras.losses.Huber()},
    "policy-gradient": {"model": Policy, "data": moves, **SMALL},
}
