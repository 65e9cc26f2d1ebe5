"""A thread's step context: set for a block, restored afterward, and separate for each thread."""

import threading

import pytest
import tensorflow as tf

from tfgpu.core import step_context


def test_fields_are_put_back_after_the_block_and_after_an_error():
    with step_context.scope(draws_alike=True):
        with pytest.raises(ZeroDivisionError), step_context.scope(draws_alike=False, steps_per_call=3):
            assert step_context.current().steps_per_call == 3 and not step_context.current().draws_alike
            raise ZeroDivisionError
        assert step_context.current().draws_alike and step_context.current().steps_per_call is None
    assert not step_context.current().draws_alike


def test_a_field_that_does_not_exist_is_an_error():
    with pytest.raises(AttributeError, match="no_such_field"), step_context.scope(no_such_field=1):
        pass


def test_each_thread_has_its_own():
    seen = []
    with step_context.scope(is_trying=True):
        thread = threading.Thread(target=lambda: seen.append(step_context.current().is_trying))
        thread.start()
        thread.join()
    assert seen == [False]


def test_features_keep_values_in_slots():
    one, other = step_context.Slot("test.one"), step_context.Slot("test.other")
    with one.set_to(1), other.set_to(2):
        with one.set_to(3):
            assert (one.get(), other.get()) == (3, 2)
        assert one.get() == 1
    assert one.get() is None


def test_outside_a_replica_there_is_no_step():
    facts = step_context.Step(step_context.RowRange(*map(tf.constant, (2, 0, 2))), tf.constant(1.0))
    with step_context.scope(step=facts):
        assert step_context.step() is None and step_context.rows() is None and step_context.share() is None
        assert bool(step_context.has_rows()) and step_context.surely_has_rows()


def test_as_one_device_a_replica_holds_all_rows():
    facts = step_context.Step(step_context.RowRange(*map(tf.constant, (2, 2, 4))), tf.constant(0.5), jit=True)
    with step_context.scope(step=facts), step_context.as_one_device(4):
        found = step_context.current().step
        assert [int(number) for number in vars(found.rows).values()] == [4, 0, 4]
        assert float(found.share) == 1.0 and found.jit and found.local_forward and not facts.local_forward
