"""TensorFlow's coordination service: texts that workers leave for each other, beside their collectives.

The service runs in the first task of the cluster, on the port that TensorFlow uses anyway.
"""

import threading
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.eager import context

_PREFIX = "tfgpu/"
_DEFAULT_S = 10

LONGEST_S = 60.0
"""The time that a text may take on its way."""


class Unreachable(Exception):
    """The service does not answer, or this process has none."""


def is_available() -> bool:
    """Whether this process is in a cluster with a coordination service."""
    config = context.context().coordination_service
    return config is not None and bool(config.service_type)


def put(key: str, text: str, seconds: float = LONGEST_S) -> bool:
    """Stores a text for all workers; returns whether the key had none, else the old text stays.

    Raises:
        Unreachable: see there; also after `seconds` without an answer. The text may still arrive then.
    """
    try:
        _within(seconds, lambda: context.context().set_config_key_value(_PREFIX + key, text))
    except tf.errors.AlreadyExistsError:
        return False
    except (tf.errors.OpError, RuntimeError) as error:
        raise _meant(error) from error
    return True


def get(key: str, seconds: float = 0.001) -> str | None:
    """Waits up to `seconds` for a text and returns it, or None. Other Python threads run meanwhile.

    Raises:
        Unreachable: see there.
    """
    try:
        return context.context().get_config_key_value(_PREFIX + key, max(1, int(1000 * seconds)))
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return None
    except (tf.errors.OpError, RuntimeError) as error:
        raise _meant(error) from error


def delete(key: str) -> None:
    """Deletes a text.

    Raises:
        Unreachable: see there.
    """
    try:
        _within(LONGEST_S, lambda: context.context().delete_config_key_value(_PREFIX + key))
    except (tf.errors.OpError, RuntimeError) as error:
        raise _meant(error) from error


def answers(task: str, seconds: int = _DEFAULT_S) -> bool:
    """Whether the server of a task, such as `"/job:worker/replica:0/task:1"`, answers, and was not restarted."""
    try:
        context.context().check_collective_ops_peer_health(task, 1000 * seconds)
    except tf.errors.OpError:
        return False
    except RuntimeError as error:
        raise _meant(error) from error
    return True


def abort_collectives(message: str) -> None:
    """Ends the collectives in which this process waits, and all later ones, by `tf.errors.AbortedError`."""
    context.context().abort_collective_ops(tf.errors.ABORTED, message)


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Makes a call that TensorFlow gives no deadline: it waits forever when the network of the service is lost.

    Also in the first task itself, once the service has lost another task.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="tfgpu-text", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Unreachable(f"no answer within {seconds:g} s")
    if raised:
        raise raised[0]


def _meant(error: Exception) -> BaseException:
    """The error to raise for one of TensorFlow's.

    Ctrl-C may come while TensorFlow makes an error, as it does at each timeout. Pybind then makes a RuntimeError of
    both.
    """
    is_ctrl_c = isinstance(error, RuntimeError) and "KeyboardInterrupt" in str(error)
    return KeyboardInterrupt() if is_ctrl_c else Unreachable(str(error))
