"""Workers that shuffle without a seed read every example once per epoch, in a changing order."""

import pytest

SCRIPT = """
import json, sys
import keras, numpy as np, tensorflow as tf, tfgpu
strategy = tfgpu.strategy()
rows = np.eye(23, dtype="float32")

class Seen(keras.metrics.Metric):
    def __init__(self, weighed):
        super().__init__(name="order" if weighed else "most")
        self.counts = self.add_weight(shape=(23,), initializer="zeros")
        self.batches, self.weighed = self.add_weight(initializer="zeros"), weighed
    def update_state(self, y, predicted, sample_weight=None):
        self.batches.assign_add(1.0)
        self.counts.assign_add(tf.reduce_sum(y, 0) * (self.batches if self.weighed else 1.0))
    def result(self):
        places = tf.range(23.0) if self.weighed else tf.ones(23)
        return tf.reduce_sum(places * self.counts) if self.weighed else tf.reduce_max(tf.abs(self.counts - 1))

with strategy.scope():
    model = keras.Sequential([keras.Input((23,)), keras.layers.Dense(23)])
    model.compile("sgd", "mse", metrics=[Seen(False), Seen(True)])
arrays = model.fit(rows, rows, batch_size=8, epochs=6, verbose=0).history
dataset = tf.data.Dataset.from_tensor_slices((rows, rows)).shuffle(23).batch(8)
shuffled = model.fit(dataset, epochs=6, verbose=0).history

class Own(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.order = np.random.permutation(23)
    def __len__(self):
        return 3
    def __getitem__(self, i):
        at = self.order[8 * i : 8 * i + 8]
        return rows[at], rows[at]
    def on_epoch_end(self):
        np.random.shuffle(self.order)

own = model.fit(Own(), epochs=3, verbose=0).history
assert own["most"] == [0.0] * 3, own
noise = strategy.run(lambda: tf.random.normal([]))
print(json.dumps({
    "arrays": [arrays["most"], arrays["order"]], "dataset": [shuffled["most"], shuffled["order"]],
    "noise": float(strategy.experimental_local_results(noise)[0]),
}))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_every_example_once_in_an_order_that_changes(together):
    found = together(SCRIPT, {"worker": 2})
    assert found["worker0"].pop("noise") != found["worker1"].pop("noise")
    for most, order in (*found["worker0"].values(), *found["worker1"].values()):
        assert most == [0.0] * 6  # no example was seen twice or never
        assert len(set(order)) > 1
