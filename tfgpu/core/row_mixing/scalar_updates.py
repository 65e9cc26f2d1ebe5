"""One number under a `Mean` or a `Sum` in a loop by hand: a loss, a rate, a count. One device counts it once.

Each replica has a number of its own: a part of one device's (a Keras loss, weighted by the replica's rows), a mean over
the replica's rows, or the same number. The trial of the function shows which, and the metric counts it accordingly.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.core import batch_rows, replication, step_context
from tfgpu.core.row_mixing import choices
from tfgpu.core.row_mixing.trials import comparison
from tfgpu.core.state import layer_state
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)
AS_IT_IS, PART, MEAN, UNKNOWN = "as it is", "part", "mean", "unknown"
"""The last is of a number that is 0 on all rows that are tried, which does not show whether it is a part or a mean."""


@dataclass(frozen=True)
class Scalar:
    """An update of a metric with one number.

    Attributes:
        name: of the metric (`_name_among`).
        value, weight: what it was given.
        is_sum: it is a `Sum`, which keeps no count.
    """

    name: str
    value: float
    weight: float
    is_sum: bool


def update(stock: Callable, metric: keras.metrics.Metric, values: tf.Tensor, sample_weight: object) -> None:
    """Updates a `Mean` or a `Sum` with one number, in a `strategy.run` by hand or its trial, or outside of replicas."""
    context = step_context.current()
    recorder, given = context.recorder, context.given_rows
    if recorder is not None and recorder.parts and not recorder.is_split:
        weight = 1.0 if sample_weight is None else float(tf.cast(sample_weight, tf.float64))
        value = float(tf.cast(values, tf.float64))
        name = _name_among(metric, recorder.scalar_names)
        recorder.scalars.append(Scalar(name, value, weight, isinstance(metric, keras.metrics.Sum)))
        recorder.scalar_states.update(map(id, metric.variables))
        return stock(metric, values, sample_weight)
    if recorder is not None or given is None or replication.replica_context() is None:
        return stock(metric, values, sample_weight)
    # What a function of labels and outputs gives is a mean over rows, or the whole batch's.
    is_of_function = isinstance(metric, keras.metrics.MeanMetricWrapper)
    name = _name_among(metric, given.counted)
    way = MEAN if is_of_function else _way_of(name, given)
    if way == UNKNOWN:
        way = _likely_way(metric, values)
    if way == AS_IT_IS:
        return stock(metric, values, sample_weight)
    values, share = tf.convert_to_tensor(values), batch_rows.known_share()
    if share is None:
        batch_rows.counts_alike(f"the metric {metric.name!r}")
    share = 1.0 / step_context.num_replicas(values.dtype) if share is None else tf.cast(share, values.dtype)
    values = tf.where(share > 0, values, tf.zeros_like(values))
    if way == PART:
        if isinstance(metric, keras.metrics.Sum):
            return stock(metric, values, sample_weight)
        values = tf.math.divide_no_nan(values, share)
    sample_weight = share if sample_weight is None else tf.cast(sample_weight, values.dtype) * share
    return stock(metric, values, sample_weight)


def _name_among(metric: keras.metrics.Metric, known: dict[int, str]) -> str:
    """The metric's name; a number is added if another one has it, as two `Mean()` do.

    Args:
        known: names by the metrics' `id`; this one's is added.
    """
    name, number = metric.name, 1
    while id(metric) not in known and name in known.values():
        number += 1
        name = f"{metric.name} ({number})"
    return known.setdefault(id(metric), name)


def _way_of(name: str, given: batch_rows.GivenRows) -> str:
    """The way of a metric, by the trial of its function.

    Functions with the same code are tried once: one with other metrics counts them by their places.
    """
    ways, place = given.scalar_ways, [*given.counted.values()].index(name)
    return ways.get(name) or dict(enumerate(ways.values())).get(place, AS_IT_IS)


def _likely_way(metric: keras.metrics.Metric, values: object) -> str:
    """The way of a number that no trial shows: one that is the same on all replicas counts as a mean does.

    Raises:
        InputError: it may differ, and `unproven` is "refuse".
    """
    is_variable = isinstance(values, (keras.Variable, tf.Variable))
    if is_variable or not tf.is_tensor(values) or layer_state.is_same_everywhere(values):
        return MEAN
    is_sum, told = isinstance(metric, keras.metrics.Sum), vars(slots.of(tf.distribute.get_strategy()))
    if metric.name not in told.setdefault("told_numbers", set()):
        told["told_numbers"].add(metric.name)
        said = (
            f"The metric {metric.name!r} gets one number in a function of `strategy.run`, which was 0 on all rows that "
            "were tried: it may be a sum over a replica's rows (a count) or a mean over them (a rate)."
        )
        if choices.unproven() == "refuse":
            raise InputError(f"{said} The strategy's `unproven` is 'refuse'. Give the metric one number per row.")
        kind = "sum" if is_sum else "mean"
        _log.warning("%s It counts as a %s. If that is wrong, give the metric one number per row.", said, kind)
    return AS_IT_IS if is_sum else MEAN


def ways(
    whole: Sequence[Scalar], parts: Sequence[Sequence[Scalar]], shares: Sequence[float], close: float
) -> dict[str, set[str]]:
    """For each metric, the ways to count replicas' numbers that give what one device counts; an empty set for none.

    Args:
        whole: updates on all rows.
        parts: updates on each replica's rows.
        shares: of all rows, those of each replica.
        close: by how much of the largest number two may differ that are as good as equal.
    """
    found: dict[str, set[str]] = {}
    for at, one in enumerate(whole):
        each = [part[at] for part in parts if at < len(part) and part[at].name == one.name]
        fitting = _fitting(one, each, shares, close) if len(each) == len(parts) else set()
        found[one.name] = found.get(one.name, {AS_IT_IS, PART, MEAN}) & fitting
    return found


def _fitting(whole: Scalar, parts: list[Scalar], shares: Sequence[float], close: float) -> set[str]:
    count = [1.0] * len(parts)
    by_way = {AS_IT_IS: (count, count), PART: (count, [1 / len(parts)] * len(parts)), MEAN: (shares, shares)}
    found = set()
    for way, (for_total, for_count) in by_way.items():
        total = sum(part.value * part.weight * factor for part, factor in zip(parts, for_total, strict=True))
        weight = sum(part.weight * factor for part, factor in zip(parts, for_count, strict=True))
        weighed = np.array([part.value * part.weight for part in parts])
        is_total = comparison.is_close(np.array(whole.value * whole.weight), np.array(total), close, weighed)
        if is_total and (whole.is_sum or comparison.is_close(np.array(whole.weight), np.array(weight), close)):
            found.add(way)
    return found


def chosen(fitting: dict[str, set[str]]) -> dict[str, str]:
    """The way of each metric, of those that fit: the one that sends nothing first; `UNKNOWN` if they are opposite."""

    def of(found: set[str]) -> str:
        return UNKNOWN if {PART, MEAN} <= found else next(way for way in (AS_IT_IS, MEAN, PART) if way in found)

    return {name: of(found) for name, found in fitting.items()}
