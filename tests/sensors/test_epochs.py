"""Hand-computed means, maxima and energies of epochs."""

import pytest

from tfgpu.sensors.epochs import Epoch, Epochs


def sample(seconds, **values):
    return {"time": 1e9 + seconds, "seconds": float(seconds), **values}


def test_an_epoch_between_samples():
    epochs = Epochs()
    assert epochs.add(sample(0, gpu_energy_j=100.0, cpu_share=None)) == []
    assert epochs.add(sample(1, gpu_energy_j=200.0, cpu_share=0.2, input_wait=0.9)) == []
    epochs.end(Epoch(1, begin_s=0.5, end_s=2.5, steps=40, train_s=1.5, timed_steps=30, examples=1280))
    assert epochs.add(sample(2, gpu_energy_j=300.0, cpu_share=0.8, input_wait=0.1)) == []  # its end is not seen yet
    (row,) = epochs.add(sample(3, gpu_energy_j=500.0, cpu_share=0.4, input_wait=0.1))
    # From 0.5 s (150 J) to 2.5 s (400 J). Samples stand for 0.5, 1.0 and 0.5 s of the epoch.
    assert row["gpu_energy_j"] == row["energy_j"] == 250.0
    assert row["energy_per_example_j"] == 250 / 1280
    assert row["cpu_share_mean"] == pytest.approx((0.5 * 0.2 + 1.0 * 0.8 + 0.5 * 0.4) / 2)
    assert row["cpu_share_max"] == 0.8
    assert row["input_wait"] == pytest.approx((0.5 * 0.9 + 1.0 * 0.1 + 0.5 * 0.1) / 2)
    assert (row["step_time_s"], row["examples_per_s"]) == (0.05, pytest.approx(32 / 0.05))
    assert row["limit"] == "input"


def test_epochs_that_are_shorter_than_a_sample_share_one():
    epochs = Epochs()
    epochs.add(sample(0, cpu_share=None, gpu_energy_j=0.0))
    for number in range(3):
        begin = number * 0.1
        epochs.end(Epoch(number + 1, begin, begin + 0.1, steps=2, train_s=0.1, timed_steps=2, examples=10))
    rows = epochs.add(sample(1, cpu_share=0.9, gpu_energy_j=50.0))
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["cpu_share_mean"] for row in rows] == pytest.approx([0.9] * 3)
    assert [row["energy_per_example_j"] for row in rows] == pytest.approx([0.5] * 3)  # 5 J each, 10 examples


def test_each_counter_has_its_energy():
    epochs = Epochs()
    epochs.add(sample(0, gpu_energy_j=0.0, gpu0_energy_j=0.0))
    epochs.end(Epoch(1, 0.0, 1.0, 1, 1.0, 1, 4))
    (row,) = epochs.add(sample(1, gpu_energy_j=30.0, gpu0_energy_j=30.0))
    assert (row["energy_j"], row["energy_per_example_j"], row["gpu0_energy_j"]) == (30.0, 7.5, 30.0)


def test_unreported_values_are_none():
    epochs = Epochs()
    epochs.end(Epoch(1, 0.0, 0.5, steps=0, train_s=0.0, timed_steps=0))
    (row,) = epochs.add(sample(1, cpu_share=None, gpu_energy_j=None))
    for name in ("step_time_s", "examples_per_s", "input_wait", "energy_j", "energy_per_example_j", "cpu_share_mean"):
        assert row[name] is None
    assert row["limit"] == "unknown"


def test_a_gpu_that_is_lost_keeps_its_energy_so_far():
    epochs = Epochs()
    epochs.add(sample(0, gpu_energy_j=0.0))
    epochs.add(sample(1, gpu_energy_j=100.0))
    epochs.end(Epoch(1, 0.0, 1.0, 1, 1.0, 1, 1))
    (row,) = epochs.add(sample(2))
    assert row["energy_j"] == 100.0


def test_old_samples_are_forgotten():
    epochs = Epochs()
    for number in range(100):
        epochs.end(Epoch(number + 1, number, number + 1.0, 1, 1.0, 1, 1))
        epochs.add(sample(number + 1.5, cpu_share=0.5))
    assert len(epochs._samples) < 5
