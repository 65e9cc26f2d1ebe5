import numpy as np
import pytest
import tensorflow as tf

from tfgpu.data.augmentation import augment
from tfgpu.data.augmentation.stages import MIXING, STAGES, parse_stages
from tfgpu.data.position import Numbers
from tfgpu.errors import InputError


class Fixed:
    """Hand-chosen random numbers, the same for every stage."""

    def __init__(self, *rows):
        self._rows = np.array(rows, np.float32)

    def uniform(self, width, *, stream):
        return tf.constant(self._rows[:, :width])


IMAGE = np.arange(9, dtype=np.float32).reshape(1, 3, 3, 1)


def run(stage, numbers, image=IMAGE, **options):
    labels = tf.zeros([len(image)], tf.int64)
    return augment.apply(tf.constant(image), labels, parse_stages([(stage, options)]), numbers)[0].numpy()


def test_flip_by_hand():
    assert run("flip", Fixed([0.1, 0.1]))[0, ..., 0].tolist() == [[2, 1, 0], [5, 4, 3], [8, 7, 6]]
    assert run("flip", Fixed([0.9, 0.1]), vertical=True)[0, ..., 0].tolist() == [
        [6, 7, 8],
        [3, 4, 5],
        [0, 1, 2],
    ]
    assert np.array_equal(run("flip", Fixed([0.5, 0.5]), vertical=True), IMAGE)


def test_crop_by_hand():
    # Three offsets, -1 0 1: 0.99 is 1 pixel along x, 0.5 is none along y; the picture moves left.
    assert run("crop", Fixed([0.99, 0.5]), padding=1)[0, ..., 0].tolist() == [[1, 2, 0], [4, 5, 0], [7, 8, 0]]
    assert run("crop", Fixed([0.99, 0.5]), padding=1, fill="nearest")[0, ..., 0].tolist() == [
        [1, 2, 2],
        [4, 5, 5],
        [7, 8, 8],
    ]


def test_shift_by_half_a_pixel_by_hand():
    moved = run("shift", Fixed([1.0, 0.5]), fraction=1 / 6, fill="nearest")[0, ..., 0]  # 3 pixels / 6 = 0.5
    np.testing.assert_allclose(moved, [[0.5, 1.5, 2], [3.5, 4.5, 5], [6.5, 7.5, 8]], atol=1e-6)


def test_a_quarter_turn_by_hand():
    turned = run("rotate", Fixed([0.75, 0.0]), degrees=180)[0, ..., 0]  # (2 * 0.75 - 1) * 180 = 90 degrees
    np.testing.assert_allclose(turned, np.rot90(IMAGE[0, ..., 0]), atol=1e-5)


def test_zoom_keeps_the_center():
    zoomed = run("zoom", Fixed([1.0, 0.0]), fraction=0.999, fill="nearest")[0, ..., 0]  # about twice as large
    np.testing.assert_allclose(zoomed[1], [3.5, 4, 4.5], atol=1e-2)


def test_contrast_by_hand():
    np.testing.assert_allclose(run("contrast", Fixed([1.0])), 4 + (IMAGE - 4) * 1.2, atol=1e-6)


RED = np.array([[[[1.0, 0.0, 0.0], [0.5, 0.5, 0.5]]]], np.float32)  # one row: pure red, gray


def test_brightness_by_hand():
    np.testing.assert_allclose(run("brightness", Fixed([0.0])), IMAGE * 0.8, atol=1e-6)


def test_saturation_by_hand():
    # Red's gray is 0.299; at the full draw the distance to it is scaled by 1.5. Gray stays.
    expected = [[0.299 + 0.701 * 1.5, -0.299 * 0.5, -0.299 * 0.5], [0.5, 0.5, 0.5]]
    np.testing.assert_allclose(run("saturation", Fixed([1.0]), RED, fraction=0.5)[0, 0], expected, atol=1e-6)


def test_hue_by_hand():
    # A third of the circle takes red to green; gray has no hue.
    turned = run("hue", Fixed([1.0]), RED, fraction=1 / 3)[0, 0]
    np.testing.assert_allclose(turned, [[0, 1, 0], [0.5, 0.5, 0.5]], atol=1e-6)


def test_cutout_by_hand():
    # A third of three pixels is one; 0.5 * 3 = 1.5 is pixel 1.
    expected = IMAGE.copy()
    expected[0, 1, 1, 0] = 0
    assert np.array_equal(run("cutout", Fixed([0.5, 0.5]), fraction=1 / 3), expected)


@pytest.mark.parametrize("stage", sorted(set(STAGES) - set(MIXING)))
def test_each_place_gets_its_own_change_however_the_epoch_is_cut(stage):
    images = tf.random.stateless_uniform([12, 8, 8, 3], seed=[1, 2])
    stages = parse_stages([stage])

    def change(start, stop, epoch=3, seed=5):
        numbers = Numbers(
            seed=seed,
            epoch=tf.constant(epoch, tf.int64),
            start=tf.constant(start, tf.int64),
            count=stop - start,
        )
        return augment.apply(images[start:stop], tf.zeros([stop - start]), stages, numbers)[0].numpy()

    whole = change(0, 12)
    assert whole.shape == (12, 8, 8, 3) and whole.dtype == np.float32
    np.testing.assert_array_equal(whole, np.concatenate([change(0, 5), change(5, 6), change(6, 12)]))
    assert not np.array_equal(whole, change(0, 12, epoch=4))
    assert not np.array_equal(whole, change(0, 12, seed=6))


def test_adjacent_geometric_stages_are_one_resampling():
    stages = parse_stages(["shift", "rotate", "flip", "zoom", "noise", "crop", ("shift", {"fill": "reflect"})])
    blocks = [[name for name, _ in block] for block in augment._blocks(stages)]
    assert blocks == [["shift", "rotate", "flip", "zoom"], ["noise"], ["crop"], ["shift"]]


def test_numbers_are_spread_evenly():
    zero = tf.constant(0, tf.int64)
    numbers = Numbers(seed=0, epoch=zero, start=zero, count=4000)
    drawn = numbers.uniform(3, stream=0).numpy()
    assert drawn.min() >= 0 and drawn.max() < 1
    np.testing.assert_allclose(drawn.mean(0), 0.5, atol=0.02)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.05
    assert not np.array_equal(drawn, numbers.uniform(3, stream=1).numpy())
    normal = numbers.normal(2, stream=0).numpy()
    np.testing.assert_allclose([normal.mean(), normal.std()], [0, 1], atol=0.05)


def test_automatic_never_flips():
    for name, shape in (("digits", (8, 8, 1)), ("tfds:mnist", (28, 28, 1)), ("photos", (32, 32, 3))):
        assert "flip" not in [stage for stage, _ in augment.automatic(name, shape)]
        parse_stages(augment.automatic(name, shape))
    assert augment.automatic("arrays", (64,)) == ()


def test_the_same_numbers_one_by_one_when_examples_overtake_each_other():
    zero = tf.constant(0, tf.int64)
    whole = Numbers(seed=3, epoch=zero, start=zero, count=9)
    places = np.array([7, 0, 4])
    some = Numbers(seed=3, epoch=zero, start=tf.constant(places), count=3)
    for draw in ("uniform", "normal"):
        expected = getattr(whole, draw)(6, stream=2).numpy()[places]
        np.testing.assert_array_equal(getattr(some, draw)(6, stream=2).numpy(), expected)


@pytest.mark.parametrize(
    "stage, shape, rank, message",
    [
        ("flip", (64,), 1, "images of one size"),
        ("hue", (8, 8, 1), 1, "three channels"),
        ("mixup", (8, 8, 1), 2, "one class label per example"),
    ],
)
def test_a_stage_that_the_examples_cannot_go_through_is_refused(stage, shape, rank, message):
    with pytest.raises(InputError, match=message):
        augment.check(parse_stages(stage), name="pets", shape=shape, labels_rank=rank)


def test_none_is_no_stage():
    assert parse_stages("none") == parse_stages(["none"]) == parse_stages(()) == ()
    with pytest.raises(InputError, match="none"):
        parse_stages(["flip", "none"])
