import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.training.perplexity import Perplexity

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 5, size=(11, 4)).astype("int32")


def test_it_is_the_exponential_of_the_mean_over_all_tokens():
    metric, shares = Perplexity(from_logits=False), np.array([[[0.5, 0.5], [0.25, 0.75]]])
    metric.update_state(np.array([[0, 0]]), shares)  # 1/2 and 1/4: the mean of their logarithms is that of 1 / 8 ** 0.5
    np.testing.assert_allclose(float(metric.result()), 8**0.5, rtol=1e-6)
    metric.update_state(np.array([[1]]), np.array([[[0.0, 1.0]]]))  # certain: a third of the tokens adds nothing
    np.testing.assert_allclose(float(metric.result()), 8 ** (1 / 3), rtol=1e-5)
    metric.reset_state()
    metric.update_state(np.array([[0, 0]]), shares, sample_weight=np.array([[0.0, 1.0]]))
    np.testing.assert_allclose(float(metric.result()), 4.0, rtol=1e-5)


@pytest.mark.slow
def test_replicas_and_a_file_give_what_one_device_gives(tmp_path):
    found = []
    for devices in (["CPU:0"], ["CPU:0", "CPU:1"]):
        with tfgpu.strategy("mirrored" if len(devices) > 1 else "one_device", devices=devices).scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(5, 5)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, metrics=[Perplexity()])
        found.append(model.evaluate(TOKENS, TOKENS, batch_size=4, verbose=0, return_dict=True))
    np.testing.assert_allclose(found[0]["perplexity"], found[1]["perplexity"], rtol=1e-6)
    np.testing.assert_allclose(found[0]["perplexity"], np.exp(found[0]["loss"]), rtol=1e-6)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras").evaluate(TOKENS, TOKENS, verbose=0, return_dict=True)
    np.testing.assert_allclose(again["perplexity"], found[0]["perplexity"], rtol=1e-6)
