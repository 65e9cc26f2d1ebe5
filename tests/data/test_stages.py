import pytest

from tfgpu.data.augmentation.stages import mixes, parse_stages
from tfgpu.errors import InputError


def test_stages_are_completed():
    assert parse_stages("flip") == (("flip", {"horizontal": True, "vertical": False}),)
    assert parse_stages([("rotate", {"degrees": 5})]) == (("rotate", {"degrees": 5, "fill": "constant"}),)
    assert parse_stages([{"shift": {"fraction": 0.2}}])[0][1]["fraction"] == 0.2
    assert parse_stages(()) == ()


@pytest.mark.parametrize(
    "stages, message",
    [
        (["flop"], "Did you mean 'flip'"),
        ([("rotate", {"degree": 5})], "Did you mean 'degrees'"),
        ([("rotate", {"degrees": 500})], "at most 180"),
        ([("rotate", {"degrees": "ten"})], "must be a number"),
        ([("shift", {"fill": "reflekt"})], "Did you mean 'reflect'"),
        ([("zoom", {"fraction": 1})], "between 0 and 1"),
        ([("crop", {"padding": 1.5})], "whole number of pixels"),
        ([("flip", {"vertical": 1})], "true or false"),
        ([("noise", {"stddev": 0})], "above 0"),
        ([("rotate", 5)], "pair"),
        ([5], "pair"),
        ([("mixup", {"alpha": 0})], "above 0"),
        ([("cutmix", {"probability": 2})], "at most 1"),
        ([("crop", {"padding": float("nan")})], "whole number"),
    ],
)
def test_a_wrong_stage_names_the_fix(stages, message):
    with pytest.raises(InputError, match=message):
        parse_stages(stages)


def test_which_stages_mix_labels():
    assert mixes(parse_stages(["flip", "cutmix"])) and not mixes(parse_stages(["flip", "noise"]))
