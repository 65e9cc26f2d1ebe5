"""What training keeps in host memory with each step."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import memory_slope  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_100_000_steps_with_batch_normalization_keep_less_than_100_mib():
    """20 layers meet in 42 collectives; a call of one step leaves some 70 KB of records, which is 6.6 GiB."""
    found = memory_slope.measured("resnet18", 0, steps=800, chunks=5)
    assert found["bytes a step"] * memory_slope.STEPS < 100 * 2**20, found
