"""Reduce-scatter and all-gather over workers: each replica's piece is its own, whatever ranks TensorFlow gives."""

import gpu_way
import keras
import numpy as np
import pytest
import tensorflow as tf
import tracer

import tfgpu
from tfgpu.compat import slots
from tfgpu.core import replication
from tfgpu.parallel.zero import shard_collectives


class OverWorkers:
    """The module `replication`, to which the replicas of one process are in several."""

    def __getattr__(self, name):
        return getattr(replication, name)

    def spans_processes(self, strategy):
        return True


def test_nccl_sums_each_piece_where_it_belongs_and_gathers_bits(monkeypatch):
    monkeypatch.setattr(shard_collectives, "replication", OverWorkers())
    with gpu_way.gpu_way():
        strategy = tfgpu.strategy("mirrored", ["CPU:1", "CPU:2"])
        slots.of(strategy).replicas_by_rank = [1, 0]

        def step():
            rows = tf.ones([2, 8], tf.bfloat16)
            return shard_collectives.all_gather(shard_collectives.reduce_scatter(rows), "CPU:1")

        facts = tracer.facts_of(tf.function(lambda: strategy.run(step)).get_concrete_function())
    assert facts.has_one_order
    found = [(each.kind, each.dtype, each.hint, each.bytes) for each in facts.collectives["GPU:0"]]
    assert found == [("reduce-scatter", "float32", "nccl", 64), ("all-gather", "float16", "nccl", 16)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "mixed_float16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_narrow_weights_travel_in_tensorflows_collectives(monkeypatch, policy, stage):
    def trained(strategy, stage):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            inputs = keras.Input((8,))
            hidden = keras.layers.Dense(8, dtype=policy)(inputs)
            model = keras.Model(inputs, keras.layers.Dense(4, dtype=policy)(hidden))
            if stage:
                model = tfgpu.parallel.shard(model, stage)
            model.compile(keras.optimizers.SGD(0.25), "mse", jit_compile=False)
        x, y = np.eye(16, 8, dtype="float32"), np.ones((16, 4), "float32")
        return model.fit(x, y, 8, epochs=2, shuffle=False, verbose=0).history["loss"]

    alone = trained(tfgpu.strategy("one_device", "CPU:0"), 0)
    monkeypatch.setattr(shard_collectives, "replication", OverWorkers())
    assert trained(tfgpu.strategy("mirrored", 2), stage) == pytest.approx(alone, abs=0.02)


@pytest.mark.parametrize("ranks", [[0, 1, 2], [0, 2, 1], [2, 0, 1]])
def test_rows_by_rank_come_back_in_the_replicas_order(ranks):
    rows = tf.constant([[10.0], [11.0], [12.0]])
    by_rank = shard_collectives.in_order(rows, ranks)
    assert by_rank[:, 0].numpy().tolist() == [10.0 + replica for replica in ranks]
    np.testing.assert_array_equal(shard_collectives.in_order(by_rank, np.argsort(ranks)), rows)


SCRIPT = """
import json, sys
import numpy as np, tensorflow as tf
from benchmarks.peers import collectives as traced
from tfgpu import environment, strategies
from tfgpu.compat import slots
from tfgpu.parallel.zero import shard_collectives
environment.set_logical_devices(int(sys.argv[1]))
strategy = strategies.multi_worker(int(sys.argv[1]))
shard_collectives.learn_ranks(strategy)
count = strategy.num_replicas_in_sync
def step(dtype):
    number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, dtype)
    rows = number + 10 * tf.cast(tf.range(count), dtype)[:, None]
    device = strategy.extended.worker_devices[shard_collectives._local_replica()]
    gathered = shard_collectives.all_gather(tf.stack([number, -number]), device)
    return number, tf.cast(shard_collectives.reduce_scatter(rows), "float32"), tf.cast(gathered, "float32")
found = {"ranks": slots.of(strategy).replicas_by_rank}
for dtype in ("float32", "bfloat16"):
    run = tf.function(lambda: strategy.run(step, args=(dtype,)))
    for way, result in (("graph", run()), ("eager", strategy.run(step, args=(dtype,)))):
        number, own, gathered = ([np.asarray(tf.cast(each, "float32")).tolist() for each in
                                  strategy.experimental_local_results(part)] for part in result)
        sums = [float(sum(range(count)) + 10 * count * at) for at in number]
        expected = [[float(tf.cast(total, dtype))] for total in sums]
        assert own == expected, (dtype, way, own, expected)
        assert gathered == [[[float(at), float(-at)] for at in range(count)]] * len(number), (dtype, way, gathered)
print(json.dumps(found))
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_each_worker_gets_the_sum_of_its_own_piece(together, devices):
    for answer in together(SCRIPT, {"worker": 2}, devices).values():
        assert answer["ranks"] == list(range(2 * devices))


@pytest.mark.processes
@pytest.mark.slow
def test_twelve_workers_have_ranks_by_name_and_pieces_by_number(together):
    answers = together(SCRIPT, {"worker": 12}, 1, timeout=550)
    assert len(answers) == 12
    for answer in answers.values():
        assert answer["ranks"] == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]  # as TensorFlow sorts "task:10"
