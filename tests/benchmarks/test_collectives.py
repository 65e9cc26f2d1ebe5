"""What reads TensorFlow's graphs off a run leaves nothing behind."""

import sys
from pathlib import Path

import tensorflow as tf
from tensorflow.python.eager import context

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers import collectives  # noqa: E402


def test_graphs_are_collected_within_and_not_after():
    assert collectives.graphs(lambda: tf.function(lambda: tf.ones([2]))())
    tf.function(lambda: tf.zeros([2]))()
    assert not context.context().export_run_metadata().function_graphs  # they would stay in memory
