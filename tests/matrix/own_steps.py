"""Steps that people write by hand and that mix rows of a batch, or work on its gradients."""

import keras
import tensorflow as tf
from keras import ops


def learn(model, tape, loss):
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return {"loss": loss}


def of_positives(y, outputs):
    losses = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
    chosen = ops.cast(y > 0, losses.dtype)
    return ops.sum(losses * chosen) / (ops.sum(chosen) + 1e-3)


def divided_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
    """Divides by the positives of the batch."""
    return of_positives(y, y_pred)


def clipped_step(self, data):
    """Clips by the norm of the gradients."""
    x, y = data
    with tf.GradientTape() as tape:
        loss = of_positives(y, self(x, training=True))
    gradients = tape.gradient(loss, self.trainable_variables)
    norm = tf.linalg.global_norm(gradients)
    gradients = [gradient * ops.minimum(1.0, 0.2 / norm) for gradient in gradients]
    self.optimizer.apply(gradients, self.trainable_variables)
    return {"loss": loss, "norm": norm}


def pairs_step(self, data):
    """Brings each row's output near those of its class, and away from others."""
    x, y = data
    with tf.GradientTape() as tape:
        outputs = self(x, training=True)
        distances = ops.sum(ops.square(outputs[:, None] - outputs[None]), -1)
        same = ops.cast(ops.equal(y[:, None], y[None]), distances.dtype)
        loss = ops.sum(distances * same) / ops.sum(same) + ops.mean(ops.relu(1.0 - distances) * (1.0 - same))
    return learn(self, tape, loss)


def moved_step(self, data):
    """Moves the inputs along the loss's gradient, in units of its norm."""
    x, y = data
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = of_positives(y, self(x, training=True))
    slopes = tape.gradient(loss, x)
    with tf.GradientTape() as tape:
        loss = of_positives(y, self(x + 0.1 * slopes / (ops.norm(slopes) + 1e-3), training=True))
    return learn(self, tape, loss)


def mixed_step(self, data):
    """Mixes the batch with a shuffled one."""
    x, y = data
    order = keras.random.shuffle(ops.arange(ops.shape(x)[0]), seed=1)
    targets = ops.one_hot(y, 3)
    with tf.GradientTape() as tape:
        outputs = self(0.7 * x + 0.3 * ops.take(x, order, 0), training=True)
        targets = 0.7 * targets + 0.3 * ops.take(targets, order, 0)
        loss = ops.mean(keras.losses.categorical_crossentropy(targets, outputs, from_logits=True))
    return learn(self, tape, loss)
