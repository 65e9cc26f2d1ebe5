"""The report from known numbers, a resumed cell, and one real cell of TensorFlow's peers."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import gpu_report, plots, report, runner  # noqa: E402
from benchmarks.children import Failed, Machine  # noqa: E402
from benchmarks.figures import Cell, Spread  # noqa: E402
from benchmarks.peers.table import TOPOLOGIES  # noqa: E402

# Rounds of the MLP have 2048 steps. The machine is half as fast in the last round; the ratios do not see it.
HAND, FIT, TORCH = [0.2048, 0.2048, 0.4096], [0.22528, 0.22528, 0.45056], [0.1536, 0.1536, 0.3072]


def row(seconds, **facts):
    return {"status": "measured", "parameters": 10, "losses": [2.0], "seconds": seconds, **facts}


def cell(peers, topology="one"):
    return {"work": "mlp", "topology": topology, "settings": {"tiny": False}, "load": [0.5], "peers": peers}


def test_a_ratio_is_taken_within_a_round():
    found = Cell(cell({"hand": row(HAND), "tfgpu-fit": row(FIT), "torch-compiled": row(TORCH)}))
    assert found.step_us("hand").median == pytest.approx(100)
    ratio = found.ratio("tfgpu-fit")
    assert (ratio.lower, ratio.median, ratio.upper) == pytest.approx((1.1, 1.1, 1.1))
    faster = {name: ratio.median for name, ratio in found.faster().items()}
    assert faster == pytest.approx({"hand": 1.1, "torch-compiled": 1.1 / 0.75})


def test_faster_in_only_some_rounds_is_not_faster():
    found = Cell(cell({"hand": row([1, 1, 1, 1]), "tfgpu-fit": row([1.2, 1.2, 0.9, 0.9])}))
    assert found.ratio("tfgpu-fit") == Spread(pytest.approx(1.05), pytest.approx(0.9), pytest.approx(1.2))
    assert found.faster() == {}


def test_network_time_is_the_difference_to_training_alone():
    facts = {"hand": row([4, 8], network_bytes=[2048 * 50, 2048 * 70]), "no-network": {"seconds": [3, 4]}}
    found = Cell(cell(facts, "workers-2"))
    assert found.network_share("hand") == pytest.approx((0.25 + 0.5) / 2)
    assert found.network_bytes("hand") == 60


def test_peers_with_another_loss_or_another_model_are_not_compared():
    peers = {"hand": row([1], losses=[2.0, 1.0]), "tfgpu-fit": row([1], losses=[2.0, 1.0009])}
    peers |= {"jax-fit": row([1], losses=[2.0, 1.0011]), "torch-eager": row([1], losses=[2.0, 1.0], parameters=11)}
    peers |= {"stock-fit": row([1], losses=[2.0, float("nan")]), "torch-ddp": {"status": "failed"}}
    runner.compare(peers)
    assert [name for name, each in peers.items() if each["status"] == "measured"] == ["hand", "tfgpu-fit"]
    assert peers["jax-fit"]["message"] == "loss 1.1e-03 off"
    assert peers["torch-eager"]["message"] == "11 parameters"
    assert Cell(cell(peers)).ratio("jax-fit") is None


def test_the_page_names_faster_and_missing_peers():
    peers = {"hand": row(HAND), "tfgpu-fit": row(FIT, peak_rss_bytes=[3 << 20]), "torch-compiled": row(TORCH)}
    peers |= {"jax-fit": {"status": "not installed", "message": "jax"}}
    peers |= {"stock-many": {"status": "failed", "message": "ValueError: a | b"}}
    page = report.document({"facts": {"device": "Some CPU", "rounds": 3}, "cells": [cell(peers)]})
    line = next(line for line in page.splitlines() if line.startswith("| mlp | 100 |"))
    assert "| 1.10 [1.10, 1.10] |" in line and "| 0.75 [0.75, 0.75] |" in line
    assert "| fails |" in line and "| not installed |" in line
    assert "PyTorch compiled (1.47x)" in line and "no reason is known" in line
    assert "hand-written TensorFlow (1.10x)" in line and "the floor: no epochs" in line
    assert "Some CPU" in page and "ValueError: a / b" in page and "## Two workers" not in page


def test_the_page_and_plots_work_for_a_run_that_has_just_begun(tmp_path):
    assert "Nothing has been measured yet" in report.document({})
    assert "No figure comes from a GPU" in report.document({})
    assert plots.draw({}, tmp_path) == []
    only = {"cells": [cell({"tfgpu-fit": row([])}), cell({"hand": row(HAND)}, "workers-2")]}
    assert "Two workers" in report.document(only)
    some = {"cells": [cell({"hand": row(HAND), "tfgpu-fit": row(FIT)})]}
    assert [path.name for path in plots.draw(some, tmp_path)] == ["one.svg"]
    assert (tmp_path / "one.svg").read_text().count("tfgpu fit") == 1


def test_the_gpu_table_compares_with_what_is_published():
    names = ("fit mixed_float16 xla synthetic gpu", "hand mixed_float16 xla synthetic gpu")
    found = {"facts": {"device": "Some GPU"}, "cells": {names[0]: {"images_per_s": [950.0]}}}
    found["cells"][names[1]] = {"images_per_s": [1000.0, 1000.0], "batch": 128}
    text = "\n".join(gpu_report.section(found))
    assert "- `fit` over the hand-written loop: 0.95" in text
    assert "one A100, mixed precision and XLA: 2,375 images/s; `fit` here with the same settings: 950 (0.40" in text
    assert text.index("| hand |") < text.index("| fit |")


def test_each_worker_has_its_own_cores():
    machine = Machine((2, 3, 5, 7))
    assert [machine.part(TOPOLOGIES["workers-2"], rank) for rank in (0, 1)] == [(2, 3), (5, 7)]
    assert machine.part(TOPOLOGIES["one"], 0) == (2, 3, 5, 7)
    assert Machine((4,)).part(TOPOLOGIES["workers-2"], 1) == (4,)


class Cut:
    """Stands for the processes of a peer; the machine is lost before a round of one of them."""

    rounds_left = 0

    def __init__(self, peer, *_, **__):
        self.asked = 0

    def hear(self):
        return [{"parameters": 10, "losses": [2.0], "first_step_s": 1.0}]

    def round(self):
        if not Cut.rounds_left:
            raise KeyboardInterrupt
        Cut.rounds_left -= 1
        return float(Cut.rounds_left)

    def last_word(self):
        return [{"peak_rss_bytes": 1}]

    def end(self):
        pass


def test_an_interrupted_run_continues_with_its_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "Training", Cut)
    run = runner.RunSettings(Machine((0,)), tmp_path, rounds=3, warmup=0, only=("hand", "tfgpu-fit"))
    Cut.rounds_left = 5  # two rounds of both peers, and half a round
    with pytest.raises(KeyboardInterrupt):
        runner.measure("mlp", "one", run)
    kept = json.loads((tmp_path / "mlp-one.json").read_text())
    assert not kept["is_complete"]
    # The second round goes the other way; of the third, which one peer ran alone, nothing is kept.
    assert {name: each["seconds"] for name, each in kept["peers"].items()} == {"hand": [4, 1], "tfgpu-fit": [3, 2]}
    Cut.rounds_left = 2
    whole = runner.measure("mlp", "one", run)
    assert whole["is_complete"] and whole["peers"]["hand"]["seconds"] == [4, 1, 1]
    assert whole["peers"]["tfgpu-fit"]["seconds"] == [3, 2, 0]
    assert runner.measure("mlp", "one", run) == whole  # starts nothing


def test_a_crashed_peer_does_not_stop_the_others(tmp_path, monkeypatch):
    class Dies(Cut):
        def __init__(self, peer, *_, **__):
            self.peer = peer

        def round(self):
            if self.peer.name == "tfgpu-fit":
                raise Failed("ended with exit code -9")
            return 1.0

    monkeypatch.setattr(runner, "Training", Dies)
    run = runner.RunSettings(Machine((0,)), tmp_path, rounds=2, warmup=0, only=("hand", "tfgpu-fit"))
    peers = runner.measure("mlp", "one", run)["peers"]
    assert peers["tfgpu-fit"]["status"] == "failed" and peers["hand"]["seconds"] == [1.0, 1.0]
    monkeypatch.delattr(runner, "Training")
    assert runner.measure("mlp", "one", run)["peers"] == peers  # it is not tried again


@pytest.mark.slow
@pytest.mark.processes
def test_real_peers_do_the_same_work(tmp_path):
    python = None if importlib.util.find_spec("torch") else Path(sys.executable)
    only, core = ("hand", "tfgpu-fit", "torch-eager"), min(os.sched_getaffinity(0))
    run = runner.RunSettings(
        Machine((core,), python), tmp_path, rounds=1, warmup=0, only=only, tiny=True, timeout_s=200
    )
    peers = runner.measure("mlp", "one", run)["peers"]
    assert peers["torch-eager"] == {"status": "not installed", "message": "torch"} | peers["torch-eager"]
    assert peers["tfgpu-fit"]["status"] == "measured" and peers["tfgpu-fit"]["loss_difference"] < 1e-5
    assert peers["hand"]["parameters"] == peers["tfgpu-fit"]["parameters"] == 64 * 64 + 64 + 64 * 10 + 10
    for name in ("hand", "tfgpu-fit"):
        assert peers[name]["seconds"][0] > 0 and peers[name]["peak_rss_bytes"][0] > 100 << 20
