"""Checks of driver and GPUs against the environment and TensorFlow's build."""

import pytest

from tfgpu.doctor import Check
from tfgpu.doctor.facts.machine import pci_gpus

H100 = {"name": "NVIDIA H100", "uuid": "GPU-aaaa-1"}
ONLY = "export CUDA_VISIBLE_DEVICES"
T4 = {"name": "NVIDIA T4", "uuid": "GPU-bbbb-2"}


def test_no_gpu_is_ok(facts, by_name, with_gpus):
    facts["driver"] = {"error": "NVMLError_LibraryNotFound: NVML Shared Library Not Found"}
    facts["machine"]["pci_gpus"] = 0
    facts["tensorflow"]["gpus"] = []
    named = by_name(facts)
    assert named["GPUs"] == Check("GPUs", "ok", "no NVIDIA GPU: training runs on the CPU")
    assert named["NVIDIA driver"].status == named["CUDA libraries"].status == "ok"


def test_gpus_in_use_are_named(facts, by_name, with_gpus):
    named = by_name(with_gpus(H100, H100))
    assert (named["GPUs"].status, named["GPUs"].found) == (
        "ok",
        "2: NVIDIA H100 (compute capability 9.0), NVIDIA H100 (compute capability 9.0)",
    )
    assert named["NVIDIA driver"].found == "570.1, CUDA up to 12.8; NVIDIA H100, NVIDIA H100"


def test_a_gpu_that_tensorflow_cannot_use_is_a_problem_with_the_command(facts, by_name, with_gpus):
    facts = with_gpus(H100, seen=[])
    facts["tensorflow"]["build"] = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}
    named = by_name(facts)
    assert named["GPUs"].status == "problem"
    assert named["GPUs"].found == "the driver shows 1, TensorFlow uses 0: NVIDIA H100"
    facts["tensorflow"]["build"] = {"is_cuda_build": False}
    assert "this build is for CPUs" in by_name(facts)["GPUs"].found
    facts["tensorflow"] = {"error": "ImportError: libcudart.so.12"}
    assert "it cannot be imported" in by_name(facts)["GPUs"].found


def test_a_driver_older_than_the_build_is_a_problem(facts, by_name, with_gpus):
    facts["tensorflow"]["build"] = {"is_cuda_build": True, "cuda_version": "12.5.1"}
    named = by_name(with_gpus(T4, seen=[], cuda=(11, 4)))
    assert named["NVIDIA driver"].status == "problem"
    assert "too old for TensorFlow's CUDA 12" in named["NVIDIA driver"].found


def test_a_gpu_without_a_driver_is_a_problem(facts, by_name, with_gpus):
    facts["driver"] = {"error": "NVMLError_LibraryNotFound: NVML Shared Library Not Found"}
    facts["machine"]["pci_gpus"] = 1
    facts["tensorflow"]["gpus"] = []
    named = by_name(facts)
    assert (named["NVIDIA driver"].status, named["GPUs"].status) == ("problem", "problem")
    assert "--gpus all" in named["NVIDIA driver"].fix


def test_the_pci_bus_is_counted(tmp_path):
    devices = {
        "0000:01:00.0": ("0x10de", "0x030200"),  # an NVIDIA 3D controller
        "0000:01:00.1": ("0x10de", "0x040300"),  # its sound
        "0000:02:00.0": ("0x10de", "0x030000"),  # an NVIDIA display
        "0000:03:00.0": ("0x8086", "0x030000"),  # somebody else's display
    }
    for name, (vendor, kind) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    (tmp_path / "broken").mkdir()
    assert pci_gpus(tmp_path) == 2
    assert pci_gpus(tmp_path / "none") == 0


# Health, of a machine that is otherwise well: what changes on the GPU, and the check, its status, words and command.
FAULTS = {
    "memory in use": (
        {"used_bytes": 60 * 2**30, "processes": [{"pid": 77, "name": "python", "bytes": 59 * 2**30}]},
        ("GPU memory", "warning", "60.0 of 80.0 GiB of GPU 0 are in use by python 77", f"{ONLY}=GPU-2"),
    ),
    "memory in use by another container": (
        {"used_bytes": 60 * 2**30},
        ("GPU memory", "warning", "cannot see (another container", f"{ONLY}=GPU-2"),
    ),
    "no persistence": ({"persistence": 0}, ("Persistence mode", "warning", "off on GPU 0", "sudo nvidia-smi -pm 1")),
    "memory errors": (
        {"ecc": {"enabled": True, "corrected": 3, "uncorrected": 2, "pending": True, "failed": False}},
        ("ECC errors", "problem", "2 uncorrected error(s)", "sudo nvidia-smi -i GPU-aaaa-1 --gpu-reset"),
    ),
    "memory waits for a reset": (
        {"ecc": {"enabled": True, "corrected": 3, "uncorrected": 0, "pending": True, "failed": False}},
        ("ECC errors", "warning", "at the next reset", "sudo nvidia-smi -i GPU-aaaa-1 --gpu-reset"),
    ),
    "memory that cannot be replaced": (
        {"ecc": {"enabled": True, "corrected": 0, "uncorrected": 1, "pending": False, "failed": True}},
        ("ECC errors", "problem", "can no longer be replaced", ""),
    ),
    "heat": (
        {"slowed_by": ["heat (hardware)"], "temperature_c": 91},
        ("GPU clocks", "warning", "throttled by heat (hardware), at 91 °C", ""),
    ),
    "a low power limit": (
        {"power_limit_w": 400.0},
        ("GPU clocks", "warning", "limited to 400 W, of 700 W", "sudo nvidia-smi -i GPU-aaaa-1 -pl 700"),
    ),
    "MIG without slices": (
        {"mig": {"enabled": True, "pending": True, "slices": []}},
        ("MIG", "problem", "without slices", "sudo nvidia-smi -i GPU-aaaa-1 -mig 0"),
    ),
    "MIG": (
        {"mig": {"enabled": True, "pending": True, "slices": ["MIG-1", "MIG-2"]}},
        ("MIG", "warning", "has 2 slices", "export CUDA_VISIBLE_DEVICES=MIG-1"),
    ),
    "MIG waits for a reset": (
        {"mig": {"enabled": False, "pending": True, "slices": []}},
        ("MIG", "warning", "turning MIG on needs a reset", "sudo nvidia-smi -i GPU-aaaa-1 --gpu-reset"),
    ),
    "links down": (
        {"nvlinks": {"up": 16, "of": 18, "fabric": "done"}},
        ("GPU links", "warning", "2 of 18 NVLinks are down", ""),
    ),
    "no fabric manager": (
        {"nvlinks": {"up": 18, "of": 18, "fabric": "under way"}},
        ("GPU links", "problem", "fabric is under way", "sudo systemctl restart nvidia-fabricmanager"),
    ),
    "few lanes": (
        {"pcie": {"width": 4, "most_width": 16, "generation": 4}},
        ("GPU links", "warning", "4 of 16 possible PCIe lanes", ""),
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_the_state_of_a_gpu(case, by_name, with_gpus, a_gpu):
    change, (name, status, words, command) = FAULTS[case]
    well = by_name(with_gpus(a_gpu(), a_gpu(uuid="GPU-2")))
    assert well[name].status == "ok", well[name]
    check = by_name(with_gpus(a_gpu(**change), a_gpu(uuid="GPU-2")))[name]
    assert (check.status, check.command) == (status, command) and words in check.found, check
    assert check.fix


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("fault", "name", "status", "words"),
    [
        ({}, "GPU memory", "ok", "0.0 GiB in use in total"),
        ({"USED_MIB": "70000"}, "GPU memory", "warning", "68.4 of 79.6 GiB of GPU 0 are in use by processes that"),
        ({"USED_MIB": "70000", "PID": "4711"}, "GPU memory", "warning", "in use by python3 4711"),
        ({"PERSISTENCE": "0"}, "Persistence mode", "warning", "off on GPU 0"),
        ({"CELSIUS": "92", "REASONS": "72"}, "GPU clocks", "warning", "hardware slowdown, heat (hardware), at 92 °C"),
        ({"LIMIT_MW": "350000"}, "GPU clocks", "warning", "is limited to 350 W, of 700 W"),
        ({"UNCORRECTED": "3"}, "ECC errors", "problem", "GPU 0 (GPU-1f0c5a92): 3 uncorrected error(s)"),
        ({"PENDING": "1"}, "ECC errors", "warning", "GPU 0 (GPU-1f0c5a92): bad memory will be replaced"),
        ({"FAILED": "1"}, "ECC errors", "problem", "can no longer be replaced"),
        ({"MIG": "1"}, "MIG", "problem", "GPU 0 is in MIG mode without slices"),
        ({"LANES": "4"}, "GPU links", "warning", "4 of 16 possible PCIe lanes"),
        ({"DOWN": "2"}, "GPU links", "warning", "GPU 0: 2 of 18 NVLinks are down"),
        ({"FABRIC": "2"}, "GPU links", "problem", "GPU 0: the NVLink fabric is under way"),
        ({"P2P": "1"}, "GPU links", "warning", "1 of 1 pairs (0-1) cannot read"),
        ({}, "GPU links", "ok", "pairs: 1 by NVLink"),
        ({"LOST": "1"}, "Lost GPU", "problem", "GPU 1 does not answer: GPU is lost"),
        ({"LOST": "1"}, "NVIDIA driver", "ok", "550.127.05, CUDA up to 12.4"),
        ({"LOST_UNDER_WAY": "1"}, "Lost GPU", "problem", "GPU 1 does not answer: GPU is lost"),
        ({"GPUS": "1", "LOST": "0"}, "GPUs", "problem", "the driver has lost all its GPUs"),
        ({"INIT": "9"}, "NVIDIA driver", "problem", "module is not loaded"),
        ({"INIT": "18"}, "NVIDIA driver", "problem", "have different versions"),
    ],
)
def test_a_fault_that_nvml_tells(fault, name, status, words, told, facts, by_name):
    facts |= told(**fault)
    facts["machine"]["pci_gpus"] = 2
    check = by_name(facts)[name]
    assert check.status == status and words in check.found, check


# Faults of GPU 2 of four, of which GPU 1 is lost: what a check says of it, and its command.
BESIDE_A_LOST_ONE = {
    "memory errors": (
        {"UNCORRECTED": "3"},
        ("ECC errors", "GPU 2 (GPU-3b6a90c1): 3 uncorrected error(s)", "sudo nvidia-smi -i GPU-3b6a90c1 --gpu-reset"),
    ),
    "memory in use": (
        {"USED_MIB": "70000"},
        ("GPU memory", "GiB of GPU 2 are in use", "export CUDA_VISIBLE_DEVICES=GPU-1f0c5a92,GPU-4c51d7e8"),
    ),
    "MIG": (
        {"MIG": "1"},
        ("MIG", "GPU 2 is in MIG mode", "sudo nvidia-smi -i GPU-3b6a90c1 -mig 0"),
    ),
    "no persistence": ({"PERSISTENCE": "0"}, ("Persistence mode", "off on GPU 2", "sudo nvidia-smi -pm 1")),
    "heat": ({"REASONS": "72"}, ("GPU clocks", "GPU 2 is throttled", "")),
    "links": ({"DOWN": "2"}, ("GPU links", "GPU 2: 2 of 18 NVLinks are down", "")),
    "pairs": ({"P2P": "1"}, ("GPU links", "3 of 3 pairs (0-2, 0-3, 2-3) cannot read", "")),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", BESIDE_A_LOST_ONE)
def test_a_lost_gpu_leaves_the_others_their_numbers(case, told, facts, by_name):
    fault, (name, words, command) = BESIDE_A_LOST_ONE[case]
    facts |= told(GPUS="4", AT="2", LOST="1", **fault)
    named = by_name(facts)
    assert words in named[name].found and named[name].command == command, named[name]
    assert (named["Lost GPU"].status, named["Lost GPU"].command) == ("problem", "sudo nvidia-smi -i 1 --gpu-reset")
    assert "export CUDA_VISIBLE_DEVICES=GPU-1f0c5a92,GPU-3b6a90c1,GPU-4c51d7e8" in named["Lost GPU"].fix


def test_a_machine_whose_gpus_are_well(by_name, with_gpus, a_gpu):
    named = by_name(with_gpus(a_gpu(), a_gpu(uuid="GPU-2")))
    names = ("GPU memory", "MIG", "Persistence mode", "ECC errors", "GPU clocks", "GPU links", "GPU errors (Xid)")
    assert {named[name].status for name in names} == {"ok"}
    assert named["GPU links"].found == "pairs: 1 by NVLink"
    busy = by_name(with_gpus(a_gpu(slowed_by=["power cap"])))["GPU clocks"]
    assert (busy.status, busy.found) == ("ok", "GPU 0 at its power limit, as under full load")


def test_gpus_that_cannot_read_each_other(by_name, with_gpus, a_gpu):
    links = [{"gpus": [0, 1], "path": "SYS", "reads": False}]
    named = by_name(with_gpus(a_gpu(), a_gpu(uuid="GPU-2"), links=links))
    assert named["GPU links"].status == "warning" and "1 of 1 pairs (0-1)" in named["GPU links"].found
    named = by_name(with_gpus(a_gpu(), a_gpu(uuid="GPU-2")), NCCL_P2P_DISABLE="1")
    assert named["GPU links"].command == "unset NCCL_P2P_DISABLE"


def test_all_gpus_full_names_whose_they_are(by_name, with_gpus, a_gpu):
    full = {"used_bytes": 70 * 2**30, "processes": [{"pid": 5, "name": "jupyter", "bytes": 70 * 2**30}]}
    check = by_name(with_gpus(a_gpu(**full)))["GPU memory"]
    assert check.command == "" and "ps -o user,etime,args -p 5" in check.fix


@pytest.mark.parametrize(
    ("own", "status", "words"),
    [
        ([9, 0], "ok", "9.0: TensorFlow has code for it"),
        ([8, 6], "ok", "8.6"),
        ([12, 0], "warning", "the first start compiles its kernels"),
        ([5, 2], "problem", "5.2; TensorFlow was built for sm_60"),
    ],
)
def test_a_gpu_against_what_tensorflow_was_built_for(own, status, words, by_name, with_gpus, a_gpu):
    facts = with_gpus(a_gpu(capability=own))
    built = ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]
    facts["tensorflow"]["build"] = {"is_cuda_build": True, "cuda_compute_capabilities": built}
    check = by_name(facts)["Compute capability"]
    assert check.status == status and words in check.found


def test_errors_in_the_kernels_log(by_name, with_gpus, a_gpu):
    facts = with_gpus(a_gpu())
    program = {"gpu": "PCI:0000:3b:00", "number": 31, "text": "pid=5, MMU Fault"}
    lost = {"gpu": "PCI:0000:3b:00", "number": 79, "text": "GPU has fallen off the bus."}
    facts["xid"] = {"lines": [lost, program], "unread": ""}
    check = by_name(facts)["GPU errors (Xid)"]
    assert check.status == "problem" and "Xid 79 (the GPU has fallen off the bus) of PCI:0000:3b:00" in check.found
    facts["xid"] = {"lines": [program], "unread": ""}
    assert by_name(facts)["GPU errors (Xid)"].status == "warning"
    facts["xid"] = {"lines": [], "unread": "Operation not permitted"}
    assert by_name(facts)["GPU errors (Xid)"].found == "not read: Operation not permitted"


@pytest.mark.parametrize(
    ("error", "words", "command"),
    [
        ("NVMLError_DriverNotLoaded: Driver Not Loaded", "module is not loaded", "sudo modprobe nvidia"),
        (
            "NVMLError_LibRmVersionMismatch: RM has detected an NVML/RM version mismatch.",
            "have different versions",
            "sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia",
        ),
        ("no answer within 60 s", "hangs", ""),
    ],
)
def test_a_driver_that_does_not_answer(error, words, command, facts, by_name):
    facts["driver"] = {"error": error}
    check = by_name(facts)["NVIDIA driver"]
    assert (check.status, check.command) == ("problem", command) and words in check.found


def test_a_gpu_that_is_lost_hides_no_other(by_name, with_gpus, a_gpu):
    lost = [{"index": 1, "error": "GPU is lost"}]
    named = by_name(with_gpus(a_gpu(), lost=lost))
    assert named["Lost GPU"].status == "problem" and "GPU 1 does not answer: GPU is lost" in named["Lost GPU"].found
    assert named["NVIDIA driver"].status == named["GPUs"].status == "ok"


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({"SLURM_GPUS_ON_NODE": "2"}, "problem"),
        ({"SLURM_GPUS_PER_TASK": "h100:1"}, "ok"),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, "problem"),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, None),
    ],
)
def test_gpus_promised_by_a_scheduler(variables, status, by_name, with_gpus, a_gpu):
    check = by_name(with_gpus(a_gpu()), **variables).get("GPUs allocated")
    assert (check and check.status) == status
