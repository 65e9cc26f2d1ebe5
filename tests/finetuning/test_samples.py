"""The texts of the report, without a model."""

from tfgpu.finetuning import samples


class Tokenizer:
    start, asked = 1, 0

    def stops(self):
        self.asked += 1
        return {2}


def test_marks_are_left_out_and_the_vocabulary_is_read_once():
    tokenizer = Tokenizer()
    assert samples._text([1, 5, 6, 2, 7], tokenizer) == [5, 6, 7]
    assert tokenizer.asked == 1
