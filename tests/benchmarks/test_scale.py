"""docs/measured/scale.md says what the command computes from the figures at hand."""

import json

import pytest

from benchmarks import scale
from benchmarks.scaling_model import Link


def results() -> dict:
    return json.loads(scale.RESULTS.read_text())


def test_the_page_is_what_the_command_writes():
    text = scale.PAGE.read_text()
    assert scale.page(results(), scale.Run(), text) == text, "run `python -m benchmarks.scale`"


def test_the_picture_is_what_the_command_draws(tmp_path):
    scale.draw(scale.Run(), tmp_path / "one.svg")
    scale.draw(scale.Run(), tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert scale.PICTURE.exists()


def test_every_model_of_two_workers_is_checked():
    rows = scale.measured(results())
    assert {row.work for row in rows} == {"mlp", "cnn", "resnet18", "transformer"}
    assert all(row.network_s > 0 and row.collectives >= 1 for row in rows)


def test_a_model_is_predicted_from_the_others():
    link = Link(bandwidth_bytes_s=1e9, latency_s=1e-4)
    rows = [
        scale.Measured(name, size, count, count * scale.ring_s(size / count, 2, link))
        for name, size, count in (("a", 1e4, 1), ("b", 1e6, 2), ("c", 1e8, 30))
    ]
    assert [line.split("|")[-2].strip() for line in scale.check_table(rows)[2:5]] == ["1.00"] * 3
    assert scale.check_table(rows)[-1] == "All of them together: 1000 MB/s and 100 us a message."


def test_a_point_by_hand():
    quick = Link(bandwidth_bytes_s=1e9, latency_s=0)
    run = scale.Run(
        parameters=1e6,
        compute_s=1.0,
        deviation=0.0,
        within=quick,
        across=quick,
        save_s=2.0,
        storage_bytes_s=1e9,
        gpu_mtbf_s=1600.0,
        detect_s=1.0,
        start_s=2.0,
    )
    row = scale.point(run, 16)
    # 8 in a node: 2 * 7/8 * 4 ms. 2 nodes: 2 * 1/2 * 0.5 ms.
    assert row.hierarchical_s == pytest.approx(7.5e-3)
    assert row.ring_s == pytest.approx(2 * 15 / 16 * 4e-3)
    assert row.mtbf_s == 100
    assert row.restart_s == pytest.approx(3 + 16 * 12e6 / 1e9)
    assert row.interval_s == pytest.approx(20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)
    assert row.step == pytest.approx(1 / 1.0075)
    assert row.useful == pytest.approx(row.step * (1 - row.lost))


@pytest.mark.parametrize(
    "seconds, words", [(5e-6, "5 us"), (0.0123, "12.3 ms"), (59, "59 s"), (90, "1.5 min"), (86_400 * 400, "400 days")]
)
def test_times_in_words(seconds, words):
    assert scale._time(seconds) == words
