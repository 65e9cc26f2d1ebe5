"""Tests of models sketch large ones: they make their variables, and do not fill them."""

import keras
import pytest


@pytest.fixture(autouse=True)
def sketches_are_forgotten():
    """Keras keeps unfilled variables, and would fill them all, gigabytes, when the next model is made."""
    yield
    keras.utils.clear_session(free_memory=False)
