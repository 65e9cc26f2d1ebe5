"""What `compile` takes as `jit_compile`."""

import keras
import pytest

import tfgpu

tfgpu.repair_keras()


def test_an_unknown_value_is_an_error():
    with pytest.raises(tfgpu.InputError, match="`jit_compile` must be True, False or \"auto\". Received: 'always'"):
        keras.Sequential([keras.layers.Dense(1)]).compile(jit_compile="always")
