"""What a trial's failures write does not reach the screen; all else does."""

import os
import subprocess
import sys

import pytest

from tfgpu.core.row_mixing.trials import isolation

SCRIPT = """
import numpy as np, tensorflow as tf, keras, tfgpu

devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
x, y = np.ones((12, 4), "float32"), np.arange(12) % 3

class Own(keras.losses.Loss):
    def call(self, y, logits):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(tf.reshape(y, [-1]), tf.int32), logits)

with strategy.scope():
    model, loss = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]), Own()
    model.compile("sgd", loss)
model.fit(x, y, batch_size=8, verbose=0)

def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)) / 8
    weights = model.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

run = tf.function(lambda *batch: strategy.run(step, args=batch))
for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(8)):
    run(*batch)
"""


def screen_of(code, tmp_path, **variables):
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "TFGPU_CACHE": str(tmp_path), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_label_that_a_loss_does_not_take_is_not_named_on_the_screen(tmp_path):
    assert "outside the valid range" not in screen_of(SCRIPT, tmp_path)


def test_it_is_where_all_is_asked_for(tmp_path):
    assert "outside the valid range" in screen_of(SCRIPT, tmp_path, TF_CPP_MIN_LOG_LEVEL="0")


def test_all_else_is_shown(tmp_path):
    code = (
        "import os, sys\n"
        "from tfgpu.core.row_mixing.trials.isolation import hidden_kernel_errors as hidden\n"
        "lines = ['W0000 00:00:1.2 3 op_kernel.cc:18] failed', 'E0000 00:00:1.2 3 pool.cc:1] kept']\n"
        "lines += ['2026-11-28 20:51:01.98: W tensorflow/core/framework/op_kernel.cc:18] as 2.17 writes it']\n"
        "with hidden():\n"
        "    with hidden():\n"
        "        os.write(2, '\\n'.join([*lines, '']).encode())\n"
        "    print('said', file=sys.stderr)\n"
        "print(lines[0], file=sys.stderr)\n"
        "with hidden():\n"
        "    os.write(2, b'last words')\n"
        "    os._exit(0)\n"
    )
    expected = ["E0000 00:00:1.2 3 pool.cc:1] kept", "said", "W0000 00:00:1.2 3 op_kernel.cc:18] failed", "last words"]
    shown = screen_of(code, tmp_path).splitlines()
    assert [line for line in shown if line in expected] == expected
    assert not any("2.17" in line for line in shown)


def closed(descriptor):
    raise OSError


@pytest.mark.parametrize("lacks", ["a screen", "grep"])
def test_what_cannot_be_filtered_is_left_as_it_is(lacks, monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    monkeypatch.setenv("PATH", "")
    if lacks == "a screen":
        monkeypatch.setattr(isolation.os, "dup", closed)
    before = os.fstat(2)
    with isolation.hidden_kernel_errors():
        assert os.path.samestat(os.fstat(2), before)
    assert os.path.samestat(os.fstat(2), before)
