"""Training on streams that do not fit in memory: one window at a time, with replay of earlier examples."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu.errors import InputError, whole_number
from tfgpu.training.incremental.replay import Replay, described


def windows(stream: Iterable[Any], rows: int) -> Iterator[tuple[Any, ...]]:
    """Divides a stream of batches into windows that fit in memory.

    Args:
        stream: an iterable of batches `(x, y)` or `(x, y, sample_weight)` of any sizes, as arrays or tensors (or dicts
            or tuples of them): a generator or a `tf.data.Dataset`, of any length. It is read once, on demand.
        rows: rows per window; the last one may have fewer.

    Returns:
        An iterator of windows, each with arrays of `rows` rows in the batches' structure.

    Example:
        >>> batches = ((np.full((4, 1), at), np.full(4, at)) for at in range(3))
        >>> [len(y) for x, y in windows(batches, rows=5)]
        [5, 5, 2]
    """
    rows = whole_number("rows", rows)
    return _cut(stream, rows)


def _cut(stream: Iterable, rows: int) -> Iterator[tuple]:
    held, count, structure = [], 0, None
    for batch in stream:
        if not isinstance(batch, tuple) or not 2 <= len(batch) <= 3:
            raise InputError(f"A stream's batches must be `(x, y)` or `(x, y, weights)`. Received: {type(batch)}.")
        structure = batch if structure is None else structure
        flat = _flat(batch, structure)
        if held and [part.shape[1:] for part in flat] != [part.shape[1:] for part in held[0]]:
            raise InputError(
                f"All rows of a window must have one shape. Received: {[part.shape[1:] for part in flat]} after "
                f"{[part.shape[1:] for part in held[0]]}."
            )
        begin, size = 0, len(flat[0])
        while begin < size:
            take = min(rows - count, size - begin)
            held.append([part[begin : begin + take] for part in flat])
            begin, count = begin + take, count + take
            if count == rows:
                yield _joined(structure, held)
                held, count = [], 0
    if count:
        yield _joined(structure, held)


def _flat(batch: tuple, structure: tuple) -> list[np.ndarray]:
    try:
        tf.nest.assert_same_structure(structure, batch)
    except (TypeError, ValueError):
        raise InputError(
            "A stream's batches must have one structure: the same keys, all with or all without weights. Received: "
            f"{described(batch)} after {described(structure)}."
        ) from None
    flat = [np.asarray(part) for part in tf.nest.flatten(batch)]
    if len({part.shape[:1] for part in flat}) != 1 or not flat[0].ndim:
        raise InputError(
            f"All arrays of a stream's batch must have the same length. Received: {[part.shape for part in flat[:6]]}."
        )
    return flat


def _joined(structure, held: list) -> tuple:
    return tf.nest.pack_sequence_as(structure, [np.concatenate(column) for column in zip(*held, strict=True)])


def fit_stream(
    model: keras.Model,
    stream: Iterable[Any],
    *,
    window: int,
    global_batch: int,
    replay: Replay | None = None,
    share: float = 0.5,
    epochs: int = 1,
    seed: int = 0,
    skip: int = 0,
    after_window: Callable[[int, dict[str, Any]], None] | None = None,
    tasks: Any = None,
    **fit: Any,
) -> list[dict[str, Any]]:
    """Trains on a stream of any length, with one window and the replayed examples in memory.

    Each window is shuffled, mixed with replayed examples of earlier windows, and trained on for some epochs; then it is
    added to the replay memory and discarded.

    Args:
        model: a compiled model, under any strategy.
        stream: batches, as for `windows`.
        window: rows in memory at a time.
        global_batch: new rows per batch, over all replicas; replayed ones are added, see `Replay.mix`.
        replay: the memory; None trains on the windows alone.
        share: of replayed rows in a batch.
        epochs: per window.
        seed: of the windows' shuffling.
        skip: windows to skip: those that an interrupted run has finished.
        after_window: called after each window with its number (from 0) and its logs; can save the model and the memory.
        tasks: a `tfgpu.callbacks.Tasks(folder, remember={"replay": replay})`, whose tasks are the windows: restarted
            with the same stream, training resumes where it stopped, even within a window.
        **fit: further arguments of `model.fit`, such as `callbacks`; each window is one `fit`.

    Returns:
        The logs of each window's last epoch; with `tasks`, of earlier runs' windows too.

    Raises:
        InputError: an argument is out of range, or a batch has another structure than earlier ones.

    Example:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> stream = ((np.ones((8, 1)), np.ones((8, 1))) for _ in range(4))
        >>> logs = fit_stream(model, stream, window=16, global_batch=4, replay=Replay(10), verbose=0)
        >>> len(logs)
        2
    """
    for name, value, least in (("global_batch", global_batch, 1), ("epochs", epochs, 1), ("skip", skip, 0)):
        whole_number(name, value, minimum=least)
    taken = {"x", "y", "batch_size", "shuffle", "steps_per_epoch", "sample_weight", "initial_epoch"} & set(fit)
    if taken:
        raise InputError(f"`fit_stream` sets these arguments of `fit`: {', '.join(sorted(taken))}. Remove them.")
    given = fit.get("callbacks") or []
    callbacks = [given] if isinstance(given, keras.callbacks.Callback) else list(given)
    if any(callable(getattr(one, "restore", None)) for one in callbacks):
        raise InputError(
            "A Checkpoint supports a single `fit`, but each window is one. Use "
            '`tasks=tfgpu.callbacks.Tasks(folder, remember={"replay": replay})` instead.'
        )
    if tasks is not None:
        if skip:
            raise InputError(f"`tasks` determines how many windows are done. Received: skip={skip} too. Remove it.")
        if replay is not None and not tasks.remembers(replay):
            raise InputError('`tasks` must save the replay memory: Tasks(folder, remember={"replay": replay}).')
        skip = tasks.begin(model)
    done: list[dict[str, Any]] = [] if tasks is None else tasks.logs
    for at, rows in enumerate(windows(stream, window)):
        if at < skip:
            continue
        data = _shuffled(rows, seed + at).batch(global_batch)
        data = data if replay is None else replay.mix(data, share)
        if tasks is not None:
            fit["callbacks"] = [*callbacks, tasks.checkpoint()]
        history = model.fit(data, epochs=epochs, shuffle=False, **fit)
        if replay is not None:
            replay.add(*rows)
        done.append({name: np.asarray(values[-1], float).tolist() for name, values in history.history.items()})
        if after_window is not None:
            after_window(at, done[-1])
        if tasks is not None:
            tasks.end(model, done[-1])
    return done


def _shuffled(rows: tuple, seed: int) -> tf.data.Dataset:
    with tf.device("CPU:0"):
        data = tf.data.Dataset.from_tensor_slices(rows)
    return data.shuffle(len(tf.nest.flatten(rows)[0]), seed=seed)
