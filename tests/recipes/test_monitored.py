import re

import pytest

from tfgpu.recipes.report import Report, limited, machines, monitored, render
from tfgpu.sensors.table import Table


@pytest.fixture
def folder(tmp_path):
    """Two workers with two GPUs each; the first ran its second epoch twice, as after a resume."""
    for worker, power in ((0, 300.0), (1, 100.0)):
        table = Table(tmp_path / f"monitor-epochs-worker{worker}.csv")
        for epoch, wait in ((1, 0.5), (2, 0.9), (2, 0.3)):
            row = {"epoch": epoch, "steps": 40, "examples": 640, "step_time_s": 0.02, "examples_per_s": 800.0}
            row |= {"input_wait": wait, "limit": "input", "why": f"the step waits for data {wait:.0%} of the time"}
            row |= {"energy_j": 600.0, "energy_per_example_j": 0.9375, "cpu_share_mean": 0.4, "memory_bytes_max": 2**30}
            for gpu in (0, 1):
                row |= {f"gpu{gpu}_utilization_mean": 0.4 + 0.2 * gpu, f"gpu{gpu}_power_w_mean": power}
                row |= {f"gpu{gpu}_memory_bytes_max": 5 * 2**30}
            table.append(row)
    (tmp_path / "monitor-epochs-workerX.csv").write_text("epoch\n1\n")
    (tmp_path / "monitor-epochs-worker7.csv").write_text("")
    return tmp_path


def test_workers_and_epochs(folder):
    found = monitored(folder)
    assert list(found) == [0, 1]
    assert [(row["epoch"], row["input_wait"]) for row in found[0]] == [(1.0, 0.5), (2.0, 0.3)]
    assert limited(found[0]) == "the input: the step waits for data 30% of the time"
    table = machines(found)["table"]
    assert dict(zip(table["head"], table["rows"][0], strict=True)) == {
        "": "worker 0",
        "step": "20.0 ms",
        "examples/s": "800",
        "waiting for data": "40%",
        "GPU": "50%",  # the mean over GPUs
        "CPU": "40%",
        "memory": "1.00 GiB",
        "GPU memory": "10.0 GiB",  # the sum over GPUs
        "power": "600 W",
        "energy": "1,200 J",
        "per example": "0.938 J",
        "limited by": "the input",
    }
    assert "power" in table["head"] and table["rows"][1][8] == "200 W"


def test_the_page_has_it(folder, tmp_path):
    rows = [{"loss": 1.0, "accuracy": 0.5, "step_time_s": 0.02}] * 2
    page = render(Report("cnn on digits", "", {"accuracy": 0.9}, rows=rows, monitor=monitored(folder)))
    for words in ("The machine", "GPU and CPU, busy", "Waiting for data", "Energy per example, J", "Power of the GPUs"):
        assert words in page
    assert "Limited by the input: the step waits for data 30% of the time. The curves are worker 0's." in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "The machine" not in render(Report("cnn on digits", "", {"accuracy": 0.9}, rows=rows))


def test_without_a_gpu_there_is_no_word_of_one(tmp_path):
    Table(tmp_path / "monitor-epochs-worker0.csv").append(
        {"epoch": 1, "cpu_share_mean": 0.5, "memory_bytes_max": 2**30, "gpu_energy_j": None, "limit": "CPU", "why": "x"}
    )
    page = render(Report("a", "", {"accuracy": 0.9}, rows=[{"loss": 1.0}], monitor=monitored(tmp_path)))
    section = page.partition("The machine")[2].partition("Recipe")[0]
    assert "CPU, busy (of its cores)" in section and "GPU" not in section


def test_no_table_is_no_section(tmp_path):
    assert monitored(tmp_path) is None and monitored(tmp_path / "none") is None
