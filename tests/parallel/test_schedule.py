"""Schedules: complete, feasible, as idle as the bound, and with as little memory as promised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.errors import InputError
from tfgpu.parallel.pipeline.schedule import Cell, bound, forward, live, needs, timed, training

STAGES, MICROBATCHES = st.integers(1, 6), st.integers(1, 12)


def cost(cell):
    return 2.0 if cell.backward else 1.0


def idle_share(cells, devices):
    """The share of the devices' time in which they wait."""
    span = max(one.end for one in cells) - min(one.start for one in cells)
    return 1 - sum(one.end - one.start for one in cells) / (span * devices)


def check(rows, stages, microbatches, devices, kinds=(False, True)):
    """Each cell once, on its device, after what it needs; returns when each runs."""
    cells = [cell for row in rows for cell in row]
    expected = {Cell(s, m, back) for s in range(stages) for m in range(microbatches) for back in kinds}
    assert len(cells) == len(expected) and set(cells) == expected
    assert all(cell.stage % devices == device for device, row in enumerate(rows) for cell in row)
    found = timed(rows, cost)
    ends = {one.cell: one.end for one in found}
    assert all(ends[need] <= one.start for one in found for need in needs(one.cell, stages))
    return found


@given(STAGES, MICROBATCHES)
def test_forward_alone(stages, microbatches):
    found = check(forward(stages, microbatches), stages, microbatches, stages, kinds=(False,))
    assert idle_share(found, stages) == pytest.approx(bound(stages, microbatches))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@given(stages=STAGES, microbatches=MICROBATCHES)
def test_idle_share_is_the_bound(kind, stages, microbatches):
    rows = training(kind, stages, microbatches)
    found = check(rows, stages, microbatches, stages)
    assert idle_share(found, stages) == pytest.approx(bound(stages, microbatches))
    kept = [microbatches] * stages if kind == "gpipe" else [min(stages - at, microbatches) for at in range(stages)]
    assert live(rows) == kept


@given(st.integers(2, 4), st.integers(2, 3), st.integers(1, 3))
def test_interleaved_waits_less(devices, chunks, groups):
    stages, microbatches = devices * chunks, devices * groups
    rows = training("interleaved", stages, microbatches, devices)
    found = check(rows, stages, microbatches, devices)
    assert idle_share(found, devices) == pytest.approx((devices - 1) / (chunks * microbatches + devices - 1))


def test_by_hand():
    first, second = training("1f1b", 2, 3)
    names = [[f"{'B' if cell.backward else 'F'}{cell.micro}" for cell in row] for row in (first, second)]
    assert names == [["F0", "F1", "B0", "F2", "B1", "B2"], ["F0", "B0", "F1", "B1", "F2", "B2"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 2, 2), "1f1b"),
        (("1f1b", 4, 4, 2), "`interleaved` needs several stages per device"),
        (("interleaved", 4, 3, 2), "Use 4 micro-batches"),
        (("interleaved", 3, 4, 2), "multiples of 2, the number of devices"),
        (("interleaved", 2, 2, 2), "`interleaved` needs several stages"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(InputError, match=message):
        training(*arguments)


def test_rows_that_wait_for_each_other_are_reported():
    with pytest.raises(InputError, match="wait for each other"):
        timed([[Cell(0, 0), Cell(0, 0, True)], [Cell(1, 0, True), Cell(1, 0)]])
