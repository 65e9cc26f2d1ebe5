"""TensorFlow's coordination service: texts that workers leave for each other, beside their collectives.

The service runs in the first task of the cluster, on the port that TensorFlow uses anyway.
"""

import tensorflow as tf
from tensorflow.python.eager import context

_PREFIX = "tfgpu/"
_DEFAULT_S = 10


class Unreachable(Exception):
    """The service does not answer, or this process has none."""


def is_available() -> bool:
    """Whether this process is in a cluster with a coordination service."""
    config = context.context().coordination_service
    return config is not None and bool(config.service_type)


def put(key: str, text: str) -> bool:
    """Stores a text for all workers; returns whether the key had none, else the old text stays.

    Raises:
        Unreachable: see there.
    """
    try:
        context.context().set_config_key_value(_PREFIX + key, text)
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
        context.context().delete_config_key_value(_PREFIX + key)
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


def _meant(error: Exception) -> BaseException:
    """The error to raise for one of TensorFlow's.

    Ctrl-C may come while TensorFlow makes an error, as it does at each timeout. Pybind then makes a RuntimeError of
    both.
    """
    is_ctrl_c = isinstance(error, RuntimeError) and "KeyboardInterrupt" in str(error)
    return KeyboardInterrupt() if is_ctrl_c else Unreachable(str(error))
