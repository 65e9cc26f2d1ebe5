"""`model.fit`: tfgpu's, stock Keras's, and Keras's on JAX."""

import time

import keras
import numpy as np

from benchmarks.peers import process
from benchmarks.peers.keras_models import build
from benchmarks.peers.process import Task
from benchmarks.peers.works import EPSILON

MANY = (4, 32, 256)  # what `many` tries for `steps_per_execution`, besides a whole round
RESTARTS = 5


class Rounds(keras.callbacks.Callback):
    """Makes an epoch of a running `fit` a round: waits between them, and times them."""

    every_batch = False

    def __init__(self, channel: process.Channel):
        super().__init__()
        self._channel, self._began = channel, None

    def on_epoch_begin(self, epoch, logs=None):
        self._began = self._began or time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self._channel.say(seconds=time.perf_counter() - self._began)
        if self._channel.go():
            self._began = time.perf_counter()
        else:
            self.model.stop_training = True


class ArrayFit:
    """`fit` on arrays, for backends that do without TensorFlow.

    Args:
        task: what to do.
        many: try several `steps_per_execution` and keep the quickest.
        xla: compile with XLA; otherwise as Keras decides, which means without on TensorFlow and a CPU, and with on JAX.
    """

    def __init__(self, task: Task, *, many: bool = False, xla: bool = False):
        self._task, self._many = task, many
        self._jit = {"jit_compile": True} if xla else {}
        self._build()
        self._compile(1)
        self.parameters = int(sum(np.prod(variable.shape) for variable in self.model.trainable_variables))

    def _build(self) -> None:
        self.model = build(self._task.work)
        self._optimizer = keras.optimizers.Adam(self._task.work.learning_rate, epsilon=EPSILON)

    def _compile(self, steps: int) -> None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        options = {"metrics": ["accuracy"], "steps_per_execution": steps, **self._jit}
        self.model.compile(self._optimizer, loss, **options)

    def start(self) -> None:
        """Every `fit` begins with the first batch."""

    def epoch(self, steps: int) -> float:
        return self.fit(steps).history["loss"][0]

    def fit(self, steps: int, **options) -> keras.callbacks.History:
        return self.model.fit(**self._data(steps), verbose=0, **options)

    def _data(self, steps: int) -> dict:
        inputs, labels = self._task.work.data()
        order = np.arange(steps) % len(inputs)
        x, y = (part[order].reshape(-1, *part.shape[2:]) for part in (inputs, labels))
        return {"x": x, "y": y, "batch_size": self._task.work.batch, "shuffle": False}

    def facts(self) -> dict:
        return {"steps_per_execution": self._quickest()} if self._many else {}

    def _quickest(self) -> int:
        steps, seconds = self._task.work.steps, {}
        for count in sorted({1, steps, *(count for count in MANY if steps % count == 0)}):
            self._compile(count)
            self.epoch(steps)
            began = time.perf_counter()
            self.epoch(steps)
            seconds[count] = time.perf_counter() - began
        best = min(seconds, key=seconds.get)
        self._compile(best)
        return best

    def rounds(self, steps: int, channel: process.Channel) -> None:
        if channel.go():
            self.fit(steps, epochs=1_000_000, callbacks=[Rounds(channel)])

    def last_word(self) -> dict:
        """How long a `fit` of one step takes once all is traced: what it costs to start again."""
        seconds = []
        for _ in range(RESTARTS):
            began = time.perf_counter()
            self.epoch(1)
            seconds.append(time.perf_counter() - began)
        return {"fit_of_one_step_s": seconds}


class Fit(ArrayFit):
    """`fit` on a `tf.data.Dataset`, under the topology's strategy.

    Args:
        task: what to do.
        many: as for `ArrayFit`.
        xla: as for `ArrayFit`.
        repaired: with tfgpu.
    """

    def __init__(self, task: Task, *, many: bool = False, xla: bool = False, repaired: bool = False):
        from benchmarks.peers import feeds

        feeds.prepare(task)
        self._strategy = (feeds.tfgpu_strategy if repaired else feeds.stock_strategy)(task)
        super().__init__(task, many=many, xla=xla)

    def _build(self) -> None:
        from benchmarks.peers import feeds

        with self._strategy.scope():
            self.model = build(self._task.work, synchronized=self._strategy.num_replicas_in_sync > 1)
            self._optimizer = keras.optimizers.Adam(self._task.work.learning_rate, epsilon=EPSILON)
        self._dataset = feeds.dataset(*self._task.work.data())

    def _compile(self, steps: int) -> None:
        with self._strategy.scope():
            super()._compile(steps)

    def _data(self, steps: int) -> dict:
        return {"x": self._dataset, "steps_per_epoch": steps}

    def facts(self) -> dict:
        from benchmarks.peers import collectives

        found = super().facts()
        if self._task.topology.processes > 1:
            self._compile(found.get("steps_per_execution", 1))  # so that the loop is made anew
            found["collectives"] = collectives.count(lambda: self.epoch(2))
        return found
