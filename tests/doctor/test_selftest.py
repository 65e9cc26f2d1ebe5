"""The self-test: hand-made results, real parts, and failing parts."""

import copy

import pytest

from tfgpu.doctor import selftest
from tfgpu.doctor.facts import asking
from tfgpu.doctor.selftest import judge
from tfgpu.errors import InputError

WEIGHTS = [0.5, -2.0, 10.0]


def rate(*values: float) -> dict:
    return {"values": list(values)}


@pytest.fixture
def judged(facts):
    return lambda found: {check.name: check for check in judge.judge(found, facts, ["a", "b"])}


def test_figures_of_a_machine_that_is_well(found, judged):
    named = judged(found)
    assert {check.status for check in named.values()} == {"ok"}
    assert named["Matrix products"].figures == {"rate": 8e10, "peak": 1e11, "ratio": 0.8}
    assert named["All-reduce between devices"].figures["ratio"] == pytest.approx(0.05)
    assert named["All-reduce between workers"].found.endswith("0.30 GB/s")


def test_figures_of_gpus_against_what_their_makers_say(found, judged, facts, with_gpus, a_gpu):
    name = "NVIDIA H100 80GB HBM3"
    with_gpus(a_gpu(name=name), a_gpu(name=name, uuid="GPU-2"))
    one = {"kind": "GPU", "float32": rate(4e14), "bfloat16": rate(7e14)}
    found["multiply"]["devices"] = [one, one | {"bfloat16": rate(1e14)}]
    found["sums"] = {"devices": 2, "kind": "GPU", "bytes": 2**26, "sum": rate(3.6e11)}
    checks = judge.judge(found, facts, ["a", "b"])
    assert [check.status for check in checks[:3]] == ["ok", "warning", "ok"]
    assert checks[0].figures["ratio"] == pytest.approx(700 / 989)
    assert checks[2].found.endswith("360.0 GB/s; 0.80 of NVLink")
    facts["driver"]["links"] = [{"gpus": [0, 1], "path": "SYS", "reads": True}]
    found["sums"]["sum"] = rate(1e10)  # 16 lanes of generation 5 carry 63 GB/s.
    assert judged(found)["All-reduce between devices"].found.startswith("2 devices: 10.0 GB/s; 0.16 of PCIe")
    assert judged(found)["All-reduce between devices"].status == "warning"


def test_a_gpu_before_ampere_is_judged_by_its_float32(found, judged, with_gpus, a_gpu):
    with_gpus(a_gpu(name="Tesla T4", capability=[7, 5]))
    t4 = {"kind": "GPU", "float32": rate(6e12), "bfloat16": rate(4e11)}  # it has no units for bfloat16
    found["multiply"]["devices"] = [t4]
    check = judged(found)["Matrix products"]
    assert check.status == "ok" and check.figures["ratio"] == pytest.approx(6 / 8.1)
    assert check.found == "GPU:0: 0.4 TFLOP/s in bfloat16, 6.0 in float32; 0.74 of t4's peak in float32"
    found["multiply"]["devices"] = [t4 | {"float32": rate(2e12)}]
    assert judged(found)["Matrix products"].status == "warning"


def test_a_bridge_between_cards_is_not_judged_by_their_slot(found, judged, with_gpus, a_gpu):
    name = "NVIDIA A100 80GB PCIe"
    with_gpus(a_gpu(name=name), a_gpu(name=name, uuid="GPU-2"))  # the pair's path is NVLink
    found["sums"] = {"devices": 2, "kind": "GPU", "bytes": 2**26, "sum": rate(2e11)}
    check = judged(found)["All-reduce between devices"]
    assert check.found.endswith("the bandwidth of the link is unknown") and "peak" not in check.figures


@pytest.mark.parametrize(
    ("change", "name", "status", "words"),
    [
        ({"training": {"mirrored": [0.5, -2.0, 10.5]}}, "Training mirrored", "problem", "one device: 5.0e-02"),
        ({"training": {"averaging": [0.5, float("nan"), 10.0]}}, "Training averaging", "problem", "nan"),
        ({"training": {"mirrored": None}}, "Training mirrored", "ok", "not tried"),
        ({"multi_worker": {"weights": [0.5, -2.0]}}, "Training multi_worker", "problem", "2 weights, but one"),
        ({"sums": {"error": "no answer within 5 s"}}, "All-reduce between devices", "problem", "no answer within 5 s"),
        ({"parameter_server": {"weights": None, "error": "gone"}}, "Training parameter_server", "problem", "gone"),
    ],
)
def test_a_figure_that_is_wrong(change, name, status, words, found, judged):
    for part, changes in change.items():
        found[part] |= changes
    check = judged(found)[name]
    assert check.status == status and words in check.found and bool(check.fix) == (status != "ok"), check


def test_each_other_machine_is_judged_by_its_own_facts(found, facts):
    there = {name: copy.deepcopy(found[name]) for name in ("multiply", "sums", "training")}
    there["multiply"]["devices"][0]["float32"] = rate(1e10)
    there["training"]["one_device"] = there["training"]["mirrored"] = there["training"]["averaging"] = [0.5, -2.0, 10.5]
    machines = {"b": {**there, "facts": {"tensorflow": {"gpus": []}, "driver": {}}}, "c": {"error": "no route"}}
    named = {check.name: check for check in judge.judge(found, facts, ["a", "b", "c"], machines)}
    assert named["Matrix products"].status == "ok" and named["Matrix products on b"].status == "warning"
    assert named["Matrix products on b"].fix.startswith("On b: Check for other programs")
    assert named["Matrix products on b"].figures == {"rate": 1e10, "peak": 1e11, "ratio": 0.1}
    # It agrees with itself, and not with this machine.
    assert named["Training mirrored on b"].status == "ok" and named["Training one_device on b"].status == "problem"
    assert named["Machine c"].status == "problem" and "no route" in named["Machine c"].found


def test_a_part_that_fails_hides_no_other(found, judged):
    broken = {name: {"error": "no answer within 5 s"} for name in found}
    assert {check.status for check in judged(broken).values()} == {"problem"}
    named = judged(found | {"multi_worker": broken["multi_worker"]})
    assert named["All-reduce between workers"].status == named["Training multi_worker"].status == "problem"
    assert named["Training mirrored"].status == "ok"


@pytest.mark.parametrize("workers", [["one"], ["one", ""], [""]])
def test_fewer_than_two_workers(workers):
    with pytest.raises(InputError, match="must list two or more machines"):
        selftest.checked(workers)
    assert selftest.checked([]) == ["localhost", "localhost"]


def test_a_worker_that_does_not_start_is_reported_by_the_launcher(clean):
    environ = asking.with_tfgpu(clean(TFGPU_REPAIR="0", PYTHONHASHSEED="oops"))
    found = selftest.launched(
        "multi_worker", ["-n", "2"], ["localhost"] * 2, environ=environ, gpus=0, ssh=None, seconds=60
    )
    assert "error" in found and found["error"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1500)
def test_this_machine_passes(facts, clean):
    checks = selftest.examine(facts, clean(), workers=["localhost", "localhost"])
    named = {check.name: check for check in checks}
    names = ("one_device", "mirrored", "averaging", "multi_worker", "parameter_server")
    for name in names:
        assert named[f"Training {name}"].status == "ok", named[f"Training {name}"]
    for name in ("Matrix products", "All-reduce between devices", "All-reduce between workers"):
        assert named[name].figures["rate"] > 0, named[name]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1500)
def test_every_machine_is_measured(facts, clean, ssh_server):
    hosts = ["localhost", "node1", "nowhere"]
    checks = selftest.examine(facts, clean(), workers=hosts, ssh=ssh_server)
    named = {check.name: check for check in checks}
    for name in ("one_device", "mirrored", "averaging"):
        assert named[f"Training {name} on node1"].status == "ok", named[f"Training {name} on node1"]
    for name in ("Matrix products", "All-reduce between devices"):
        assert named[f"{name} on node1"].figures["rate"] > 0, named[f"{name} on node1"]
    # One that is not reached is named, and hides nothing of the other.
    assert named["Machine nowhere"].status == named["Training multi_worker"].status == "problem"
    assert "nowhere" in named["Training parameter_server"].found


@pytest.mark.slow
@pytest.mark.processes
def test_workers_are_reached_by_ssh(ssh_server, clean):
    environ = asking.with_tfgpu(clean())
    found = selftest.launched(
        "multi_worker", ["-n", "2"], ["node1", "node2"], environ=environ, gpus=0, ssh=ssh_server, seconds=300
    )
    assert found["workers"] == 2 and min(found["sum"]["values"]) > 0, found
    servers = selftest.launched(
        "parameter_server",
        ["-n", "1", "--ps", "1"],
        ["node1", "node2"],
        environ=environ,
        gpus=0,
        ssh=ssh_server,
        seconds=300,
    )
    assert servers["weights"] == pytest.approx(found["weights"], abs=1e-5)
    alone = selftest.launched(
        "multi_worker", ["-n", "2"], ["node1", "nowhere"], environ=environ, gpus=0, ssh=ssh_server, seconds=300
    )
    assert "nowhere" in alone["error"]
