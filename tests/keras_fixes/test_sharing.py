"""Bytes as whole numbers, which a sum over workers leaves as they are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.keras_fixes import sharing


@given(st.binary(max_size=50))
def test_bytes_come_back_from_words(content):
    words = sharing.as_words(content)
    assert words.dtype == np.int64 and (words >= 0).all() and len(words) == -(-len(content) // 4)
    assert sharing.from_words(words + np.zeros_like(words), len(content)) == content
