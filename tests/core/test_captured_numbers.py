"""Numbers that a user's function compares labels with are found wherever the code gets them from."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu.core.row_mixing.trials import captures, comparison

IN_SET = {31, 32}
settings = types.ModuleType("settings_of_the_user")
settings.IGNORE, settings.unused = 47, 48


class Options:
    ignore = 43
    unused = 44


def by_module(y, p):
    return y != settings.IGNORE


def by_class(y, p):
    return y != Options.ignore


def by_set(y, p):
    return y not in IN_SET


def by_array(values):
    return lambda y, p: y != values


FOUND = {
    "module": (by_module, [47]),
    "class": (by_class, [43]),
    "set": (by_set, [31, 32]),
    "array": (by_array(np.array([29, 30])), [29, 30]),
    "number of NumPy": (by_array(np.int64(28)), [28]),
    "tensor": (by_array(tf.constant([27])), [27]),
    "large array": (by_array(np.arange(100)), []),
    "texts": (by_array(np.array(["a"])), []),
}


@pytest.mark.parametrize("what", FOUND)
def test_numbers_are_found(what):
    function, expected = FOUND[what]
    assert sorted(captures.of(function).numbers) == expected


@pytest.mark.parametrize(("number", "expected"), [(96, 0), (1000, 1000), (10**9, 0)])
def test_numbers_of_steps_beyond_those_that_are_tried(number, expected):
    assert captures.of(lambda step: step > number).beyond == expected


def test_a_variable_in_the_logs_is_a_number():
    rate = keras.Variable(0.5, trainable=False)
    assert comparison.in_float64(rate) == 0.5 and captures.of(lambda y: y * rate).numbers == []
