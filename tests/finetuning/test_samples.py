"""The texts of the report, without a model."""

import numpy as np
import pytest

from tfgpu.data.text.sequences import IGNORED
from tfgpu.finetuning import samples
from tfgpu.finetuning.tokens import Example


class Tokenizer:
    start, asked = 1, 0

    def stops(self):
        self.asked += 1
        return {2}


def test_marks_are_left_out_and_the_vocabulary_is_read_once():
    tokenizer = Tokenizer()
    assert samples._text([1, 5, 6, 2, 7], tokenizer) == [5, 6, 7]
    assert tokenizer.asked == 1


@pytest.mark.parametrize(("given", "expected"), [(2, [7, 8]), (1, [6, 7, 8, 9, 10, 11])])
def test_what_follows_in_the_data_is_the_answer_and_not_the_next_question(given, expected):
    """5 and 6 ask, 7 and 8 answer, 9 and 10 ask again; a prompt of one token is cut within the question."""
    targets = [IGNORED, 7, 8, IGNORED, IGNORED, 11]
    example = Example(np.array([5, 6, 7, 8, 9, 10]), np.array(targets), prompt=2, line=1)
    assert samples._following(example, given) == expected


def test_of_a_plain_text_the_rest_follows():
    example = Example(np.array([5, 6, 7]), np.array([6, 7, 8]), prompt=1, line=1)
    assert samples._following(example, 2) == [7, 8]
