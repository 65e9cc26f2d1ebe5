"""The facts of this machine, collected once, and helpers to change them; libraries compiled for the tests."""

import copy
import os

import pytest

from tfgpu import doctor
from tfgpu.doctor.facts import asking

AWAY = ("TF_CONFIG", "KERAS_BACKEND", "TF_USE_LEGACY_KERAS", "TFGPU_REPAIR", "CUDA_VISIBLE_DEVICES")
AWAY += ("TFGPU_HEARTBEAT", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "SGE_TASK_ID")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def without(**changes) -> dict[str, str]:
    """This process's environment without variables that affect the doctor, and with `changes`."""
    return {key: value for key, value in os.environ.items() if key not in (*AWAY, *THREADS)} | changes


@pytest.fixture(scope="session")
def clean():
    return without


# The answers of a machine that is well and has no GPU; test_software.py asks this one.
WELL = {
    "python": {"version": "3.11.7", "executable": "/venv/bin/python"},
    "packages": {
        "tensorflow": "2.21.0",
        "keras": "3.15.1",
        "tf-keras": None,
        "tensorboard": "2.21.0",
        "tensorflows": ["tensorflow 2.21.0"],
    },
    "tensorflow": {
        "version": "2.21.0",
        "build": {
            "is_cuda_build": True,
            "cuda_version": "12.5.1",
            "cudnn_version": "9",
            "cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
        },
        "gpus": [],
        "folder": "/site/tensorflow",
        "loading": {"failed": {}, "log": ""},
    },
    "keras": {"version": "3.15.1", "backend": "tensorflow"},
    "repairs": {"local-losses": True, "own-means": True},
    "patches": {"in force": [["Trainer.compile", "tfgpu.repairs.trainer", "tried"]], "on use": []},
    "driver": {"error": "NVMLError_LibraryNotFound: NVML Shared Library Not Found"},
    "libraries": {"cudart": {"file": "libcudart.so.12", "version": None, "error": "cannot open shared object file"}},
    "tools": {"ptxas": None, "version": None, "libdevice": None, "looked": ["/usr/local/cuda/bin", "PATH"]},
    "machine": {
        "cores": 16,
        "all_cores": 16,
        "quota": None,
        "threads": {},
        "memory_bytes": 64 * 2**30,
        "free_bytes": 60 * 2**30,
        "memory_limit_bytes": None,
        "pci_gpus": 0,
        "container": "",
        "devices": {"gpus": 0, "closed": []},
        "kernel_driver": None,
        "shared_memory": {"bytes": 32 * 2**30, "free_bytes": 32 * 2**30},
        "infiniband": 0,
        "limits": {
            "files": 65536,
            "most_files": 65536,
            "processes": -1,
            "most_processes": -1,
            "locked": -1,
            "most_locked": -1,
            "addresses": -1,
            "most_addresses": -1,
        },
        "disk": {"folder": "/work", "free_bytes": 200 * 2**30, "is_writable": True},
    },
    "xid": {"lines": [], "unread": ""},
}


@pytest.fixture
def facts() -> dict[str, dict]:
    return copy.deepcopy(WELL)


WEIGHTS = [0.5, -2.0, 10.0]


def rate(*values: float) -> dict:
    return {"values": list(values)}


# What the parts of a self-test answer on a machine that is well.
FOUND = {
    "multiply": {
        "devices": [{"device": "CPU:0", "kind": "CPU", "float32": rate(8e10, 9e10, 1e10), "numpy": rate(1e11)}],
        "tf32": True,
    },
    "sums": {"devices": 2, "kind": "CPU", "bytes": 2**26, "sum": rate(4e8), "copy": rate(8e9)},
    "training": {"devices": 2, "kind": "CPU", "one_device": WEIGHTS, "mirrored": WEIGHTS, "averaging": WEIGHTS},
    "multi_worker": {
        "workers": 2,
        "sum": rate(3e8),
        "weights": WEIGHTS,
    },
    "parameter_server": {"workers": 1, "weights": WEIGHTS},
}


@pytest.fixture
def found() -> dict[str, dict]:
    return copy.deepcopy(FOUND)


@pytest.fixture
def by_name():
    """The checks of facts by name; the last one of each name."""
    return lambda facts, **environ: {check.name: check for check in doctor.judge(facts, without(**environ))}


def gpu(name: str = "NVIDIA H100", uuid: str = "GPU-aaaa-1", **changes) -> dict:
    """A healthy GPU, as the driver describes it."""
    return {
        "name": name,
        "uuid": uuid,
        "capability": [9, 0],
        "memory_bytes": 80 * 2**30,
        "used_bytes": 2**29,
        "processes": [],
        "persistence": 1,
        "temperature_c": 41,
        "power_limit_w": 700.0,
        "default_power_limit_w": 700.0,
        "slowed_by": [],
        "ecc": {"enabled": True, "corrected": 0, "uncorrected": 0, "pending": False, "failed": False},
        "mig": {"enabled": False, "pending": False, "slices": []},
        "pcie": {"width": 16, "most_width": 16, "generation": 5},
        "nvlinks": {"up": 18, "of": 18, "fabric": "done"},
    } | changes


@pytest.fixture
def with_gpus(facts):
    """The facts of a machine with these GPUs, of which TensorFlow uses `seen`."""

    def change(*gpus, seen=None, cuda=(12, 8), **more):
        seen = gpus if seen is None else seen
        gpus = [{"index": index, **each} for index, each in enumerate(gpus)]
        links = [{"gpus": [0, 1], "path": "NVLink", "reads": True}] if len(gpus) > 1 else []
        driver = {"version": "570.1", "cuda": list(cuda), "gpus": gpus, "links": links, "lost": []}
        facts["driver"] = driver | more
        capabilities = [".".join(map(str, each.get("capability", (9, 0)))) for each in seen]
        named = zip(seen, capabilities, strict=True)
        facts["tensorflow"]["gpus"] = [{"name": each["name"], "capability": own} for each, own in named]
        return facts

    return change


@pytest.fixture(scope="session")
def a_gpu():
    return gpu


@pytest.fixture
def told(nvml, clean, tmp_path):
    """The driver's facts from the fake NVML, configured by variables."""
    (tmp_path / "proc/4711").mkdir(parents=True)
    (tmp_path / "proc/4711/comm").write_text("python3\n")

    def ask(**fault):
        environ = asking.with_tfgpu(clean(LD_LIBRARY_PATH=str(nvml), **fault))
        return asking.ask("tfgpu.doctor.facts.machine", ["driver"], environ=environ, seconds=60, root=str(tmp_path))

    return ask
