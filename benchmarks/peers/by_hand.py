"""The loop that a TensorFlow user writes by hand for speed: many steps per tf.function, metrics read once per call."""

import contextlib

import keras
import tensorflow as tf

from benchmarks.peers import collectives, feeds, process
from benchmarks.peers.keras_models import build
from benchmarks.peers.process import Task
from benchmarks.peers.works import EPSILON

_cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits


class Hand:
    """Plain tf.data; each worker reads its own rows, several replicas of a process get theirs in the graph.

    Args:
        task: what to do.
        xla: compile the step; on one device.
        slices: keep the gradients of embeddings in slices, as one device's optimizer receives them.
    """

    def __init__(self, task: Task, *, xla: bool = False, slices: bool = False):
        feeds.prepare(task)
        self._slices = slices
        self._task, self._strategy = task, self._make_strategy(task)
        self._replicas = self._strategy.num_replicas_in_sync
        self._here = self._replicas // (task.topology.processes if self._replicas > 1 else 1)
        with self._scope():
            self._model = build(task.work, synchronized=self._replicas > 1)
            self._variables = self._model.trainable_variables
            self._optimizer = keras.optimizers.Adam(task.work.learning_rate, epsilon=EPSILON)
            self._optimizer.build(self._variables)
            self._loss, self._accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
            _ = self._loss.variables, self._accuracy.variables
        self._data = feeds.dataset(*(part[:, task.rows] for part in task.work.data()))
        self._once = tf.function(self._step, jit_compile=True) if xla else self._step
        self._loop = tf.function(self._steps)
        self.parameters = int(sum(tf.size(variable) for variable in self._variables))
        self.start()

    def _make_strategy(self, task: Task) -> tf.distribute.Strategy:
        return feeds.stock_strategy(task)

    def _scope(self):
        has_one = self._strategy is tf.distribute.get_strategy()
        return contextlib.nullcontext() if has_one else self._strategy.scope()

    def start(self) -> None:
        """The next epoch begins with the first batch."""
        self._iterator = iter(self._data)

    def epoch(self, steps: int) -> float:
        loss, _ = self._loop(self._iterator, tf.constant(steps))
        return float(loss)

    def rounds(self, steps: int, channel: process.Channel) -> None:
        process.rounds(self, steps, channel)

    def facts(self) -> dict:
        if self._task.topology.processes == 1 or self._replicas == 1:
            return {}
        fresh = tf.function(self._steps)
        return {"collectives": collectives.count(lambda: fresh(self._iterator, tf.constant(2)))}

    def last_word(self) -> dict:
        return {}

    def _steps(self, iterator, steps):
        self._loss.reset_state()
        self._accuracy.reset_state()
        for _ in tf.range(steps):
            x, y = iterator.get_next()
            self._spread(x, y)
        return self._loss.result(), self._accuracy.result()

    def _spread(self, x, y) -> None:
        if self._strategy is tf.distribute.get_strategy():
            self._once(x, y)
            return
        if self._here > 1:
            parts = list(zip(tf.split(x, self._here), tf.split(y, self._here), strict=True))
            x, y = self._strategy.experimental_distribute_values_from_function(
                lambda context: parts[context.replica_id_in_sync_group]
            )
        self._strategy.run(self._step, args=(x, y))

    def _step(self, x, y) -> None:
        with tf.GradientTape() as tape:
            logits = self._model(x, training=True)
            loss = tf.reduce_mean(_cross_entropy(y, logits))
            share = loss / self._replicas
        gradients = tape.gradient(share, self._variables)
        if self._replicas > 1 and not self._slices:
            # An embedding's comes in slices, which are gathered one by one. Made whole it is summed with all others,
            # but Adam's squares then differ from one device's.
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        self._optimizer.apply_gradients(zip(gradients, self._variables, strict=True))
        self._loss.update_state(loss)
        self._accuracy.update_state(y, logits)


class Repaired(Hand):
    """The same loop around `strategy.run` with tfgpu's strategy and repairs, on one device too."""

    def _make_strategy(self, task: Task) -> tf.distribute.Strategy:
        return feeds.tfgpu_strategy(task)


class Alone(Hand):
    """Each process trains on its rows by itself: what the step would take if the network took nothing."""

    def _make_strategy(self, task: Task) -> tf.distribute.Strategy:
        return tf.distribute.get_strategy()
