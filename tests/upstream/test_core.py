"""Keras's own tests pass with the repairs as they pass without; `.ci/run` runs many more of them (run.py)."""

import importlib.util
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from tfgpu import repairs

_spec = importlib.util.spec_from_file_location("upstream_run", Path(__file__).with_name("run.py"))
upstream = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(upstream)


@pytest.mark.slow
def test_what_passes_with_stock_keras_passes_with_the_repairs(tmp_path):
    stock, repaired = upstream.run(upstream.files(upstream.CORE), tmp_path, timeout=550)
    assert {test.partition("::")[0] for test in stock} == set(upstream.CORE)
    assert [test for test, (outcome, _) in stock.items() if outcome == "failed"] == []
    assert upstream.compare(stock, repaired) == {}


def test_accumulation_in_a_loop_takes_the_step_that_keras_s_test_states():
    # As its test_gradient_accumulation: two replicas with the gradient 1, three times, at a rate of 1. The mean over
    # three batches of the sum over two replicas is 2; Keras's test then looks into the accumulators, which are ours.
    repairs.repair_keras()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
        optimizer = keras.optimizers.SGD(learning_rate=1.0, gradient_accumulation_steps=3)
        gradient = tf.constant([[1.0, 1.0], [2.0, 2.0]])
        seen = []
        for _ in range(6):
            strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))
            seen.append((variable.numpy().tolist(), int(optimizer.iterations)))
    first, second, third = [[1, 2], [3, 4]], [[-1, 0], [-1, 0]], [[-3, -2], [-5, -4]]
    assert seen == [(first, 0), (first, 0), (second, 1), (second, 1), (second, 1), (third, 2)]


def test_a_failure_and_a_missing_outcome_are_told_from_what_fails_both_ways():
    stock = {"a": ("passed", ""), "b": ("passed", ""), "c": ("failed", "No jax"), "d": ("passed", "")}
    repaired = {"a": ("passed", ""), "b": ("failed", "1 != 2"), "c": ("failed", "No jax")}
    assert upstream.compare(stock, repaired) == {"b": "failed 1 != 2", "d": "no outcome: its process ended early"}
    text = upstream.report(stock, repaired)
    assert "1 in c: No jax" in text and "BROKEN by the repairs: b: failed 1 != 2" in text


def test_the_worst_part_of_a_test_counts(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    path.write_text(
        '{"test": "a", "outcome": "passed", "reason": ""}\n{"test": "a", "outcome": "failed", "reason": "teardown"}\n'
        '{"test": "b", "outcome": "failed", "reason": "x"}\n{"test": "b", "outcome": "passed", "reason": ""}\n'
    )
    assert upstream.outcomes(path) == {"a": ("failed", "teardown"), "b": ("failed", "x")}


def test_a_file_that_keras_no_longer_has_is_named():
    with pytest.raises(FileNotFoundError, match="gone_test.py"):
        upstream.files(["gone_test.py"])


def test_files_of_another_library_are_looked_for_in_its_clone(tmp_path):
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "cross_test.py").touch()
    assert upstream.files(["layers"], tmp_path) == [tmp_path / "layers" / "cross_test.py"]
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no .*gone_test.py"):
        upstream.files(["gone_test.py"], tmp_path)
