import copy
import dataclasses
import json
import os
import subprocess
import sys

import keras
import pytest

from tfgpu import doctor
from tfgpu.doctor import facts as asking
from tfgpu.doctor.checks import Check, visible_gpus
from tfgpu.errors import InputError

H100 = {"name": "NVIDIA H100", "uuid": "GPU-aaaa-1"}
T4 = {"name": "NVIDIA T4", "uuid": "GPU-bbbb-2"}


def clean(**changes) -> dict[str, str]:
    """This process's environment without what changes the doctor's mind, and with `changes`."""
    away = ("TF_CONFIG", "KERAS_BACKEND", "TF_USE_LEGACY_KERAS", "TFGPU_REPAIR", "CUDA_VISIBLE_DEVICES")
    return {key: value for key, value in os.environ.items() if key not in away} | changes


@pytest.fixture(scope="module")
def here() -> dict[str, dict]:
    """What this machine really answers, asked once."""
    return doctor.gather(clean())


@pytest.fixture
def facts(here):
    return copy.deepcopy(here)


def by_name(facts, **environ) -> dict[str, Check]:
    return {check.name: check for check in doctor.judge(facts, clean(**environ))}


def with_gpus(facts, gpus, *, seen=None, cuda=(12, 8)):
    """The facts of a machine whose driver has `gpus`, of which TensorFlow uses `seen`."""
    facts["driver"] = {"version": "570.1", "cuda": list(cuda), "gpus": gpus}
    facts["tensorflow"]["gpus"] = [{"name": gpu["name"], "capability": "9.0"} for gpu in seen or []]
    return facts


@pytest.mark.timeout(600)
def test_this_machine_can_train(here):
    checks = doctor.judge(here, clean())
    assert not doctor.stops_training(checks), [check for check in checks if check.status == "problem"]
    assert all(bool(check.fix) == (check.status != "ok") for check in checks)
    assert all(check.found and "\n" not in check.found for check in checks)
    named = {check.name: check for check in checks}
    assert named["TensorFlow"].found == here["packages"]["tensorflow"]
    assert named["Keras"].found == keras.__version__
    assert "CUDA" in named["TensorFlow build"].found or "CPU" in named["TensorFlow build"].found
    repairs = [check for check in checks if check.name.startswith("Keras repair ")]
    from tfgpu import keras_fixes

    assert [check.name.removeprefix("Keras repair ") for check in repairs] == [f.name for f in keras_fixes.fixes()]
    gone = {name for name, is_there in here["repairs"].items() if not is_there}
    # Empty batches fail in oneDNN's kernels, which TensorFlow leaves out on some processors.
    assert gone <= {"no-rows"}, "delete them: Keras has them"


def test_the_checks_are_json(here):
    checks = doctor.judge(here, clean())
    assert json.loads(doctor.to_json(checks)) == [dataclasses.asdict(check) for check in checks]


def test_no_gpu_is_ok(facts):
    facts["driver"] = {"error": "NVMLError_LibraryNotFound: NVML Shared Library Not Found"}
    facts["machine"]["pci_gpus"] = 0
    facts["tensorflow"]["gpus"] = []
    named = by_name(facts)
    assert named["GPUs"] == Check("GPUs", "ok", "no NVIDIA GPU: training runs on the CPU")
    assert named["NVIDIA driver"].status == named["CUDA libraries"].status == "ok"


def test_gpus_in_use_are_named(facts):
    named = by_name(with_gpus(facts, [H100, H100], seen=[H100, H100]))
    assert (named["GPUs"].status, named["GPUs"].found) == (
        "ok",
        "2: NVIDIA H100 (compute capability 9.0), NVIDIA H100 (compute capability 9.0)",
    )
    assert named["NVIDIA driver"].found == "570.1, CUDA up to 12.8; NVIDIA H100, NVIDIA H100"


def test_a_gpu_that_tensorflow_cannot_use_is_a_problem_with_the_command(facts):
    facts = with_gpus(facts, [H100])
    facts["tensorflow"]["build"] = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}
    facts["libraries"] = {"cudart": "12.5.82", "cudnn": None}
    named = by_name(facts)
    assert (named["GPUs"].status, named["CUDA libraries"].status) == ("problem", "problem")
    assert named["GPUs"].found == "the driver shows 1, TensorFlow uses 0: NVIDIA H100"
    assert named["CUDA libraries"].found == "missing: cudnn; found: cudart 12.5.82"
    assert named["CUDA libraries"].fix == "pip install 'tensorflow[and-cuda]~=2.21'"
    facts["tensorflow"]["build"] = {"is_cuda_build": False}
    assert "this build is for CPUs" in by_name(facts)["GPUs"].found
    facts["tensorflow"] = {"error": "ImportError: libcudart.so.12"}
    assert "it cannot be imported" in by_name(facts)["GPUs"].found


def test_a_driver_older_than_the_build_is_a_problem(facts):
    facts["tensorflow"]["build"] = {"is_cuda_build": True, "cuda_version": "12.5.1"}
    named = by_name(with_gpus(facts, [T4], cuda=(11, 4)))
    assert named["NVIDIA driver"].status == "problem"
    assert "too old for TensorFlow's CUDA 12" in named["NVIDIA driver"].found


def test_a_gpu_without_a_driver_is_a_problem(facts):
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
    assert asking.pci_gpus(tmp_path) == 2
    assert asking.pci_gpus(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("value", "shown", "stray"),
    [
        ("0", [0], None),
        ("1,0", [1, 0], None),
        (" 0 , 1 ", [0, 1], None),
        ("", [], None),
        ("-1", [], None),
        ("0,-1,1", [0], None),
        ("2", [], "2"),
        ("0,2,1", [0], "2"),
        ("0;1", [], "0;1"),
        ("gpu0", [], "gpu0"),
        ("0,0", [], "0"),
        ("GPU-bbbb", [1], None),
        ("GPU-aaaa-1,GPU-bbbb-2", [0, 1], None),
        ("GPU-cccc", [], "GPU-cccc"),
        ("GPU-", [], "GPU-"),
        ("0,", [0], ""),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(value, shown, stray):
    assert visible_gpus(value, [H100, T4]) == (shown, stray)


@pytest.mark.parametrize(
    ("value", "status", "fix"),
    [
        ("0,1", "ok", ""),
        ("1", "ok", ""),
        ("", "warning", "unset CUDA_VISIBLE_DEVICES"),
        ("-1", "warning", "unset CUDA_VISIBLE_DEVICES"),
        ("5", "problem", "export CUDA_VISIBLE_DEVICES=0,1"),
        ("0,7", "problem", "export CUDA_VISIBLE_DEVICES=0,1"),
    ],
)
def test_hidden_gpus_are_told(facts, value, status, fix):
    named = by_name(with_gpus(facts, [H100, T4], seen=[H100, T4]), CUDA_VISIBLE_DEVICES=value)
    assert (named["CUDA_VISIBLE_DEVICES"].status, named["CUDA_VISIBLE_DEVICES"].fix) == (status, fix)


def test_hidden_gpus_are_no_fault_of_tensorflow(facts):
    named = by_name(with_gpus(facts, [H100, T4]), CUDA_VISIBLE_DEVICES="")
    assert named["GPUs"] == Check("GPUs", "ok", "CUDA_VISIBLE_DEVICES shows none: training runs on the CPU")


def test_settings_in_the_environment_that_stop_training(facts):
    named = by_name(facts, TF_CONFIG="{", TF_USE_LEGACY_KERAS="1")
    assert named["Cluster"].status == "problem" and "Expected a value such as" in named["Cluster"].found
    assert named["Legacy Keras"] == dataclasses.replace(
        named["Legacy Keras"], status="problem", fix="unset TF_USE_LEGACY_KERAS"
    )
    task = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    assert by_name(facts, TF_CONFIG=task)["Cluster"].found == "TF_CONFIG: worker 1 of 2 worker"


def test_packages_that_are_missing_or_old_or_in_the_way(facts):
    facts["packages"] |= {"tensorboard": None, "tf-keras": "2.20.1"}
    facts["tensorflow"]["version"], facts["keras"]["version"] = "2.15.0", "2.15.0"
    named = by_name(facts)
    assert named["TensorBoard"].status == "problem" and "pip install" in named["TensorBoard"].fix
    assert named["Legacy Keras"].status == "warning"
    assert named["TensorFlow"].status == named["Keras"].status == "warning"
    assert named["Keras"].found == "2.15.0; tests ran on 3.15"
    facts["tensorflow"]["version"], facts["keras"]["version"] = "2.22.0-rc1", "3.16.2"
    named = by_name(facts)
    assert named["TensorFlow"].status == named["Keras"].status == "ok"


def test_the_state_of_each_repair(facts):
    facts["repairs"] = {"a": True, "b": False}
    named = by_name(facts)
    assert named["Keras repair a"].status == named["Keras repair b"].status == "ok"
    assert "needed here" in named["Keras repair a"].found and "fixed upstream" in named["Keras repair b"].found
    named = by_name(facts, TFGPU_REPAIR="0")
    assert (named["Keras repair a"].fix, named["Keras repair b"].fix) == ("unset TFGPU_REPAIR", "")
    facts["repairs"] = {"error": "MachineError: Keras 4.0 has no `Loss.__call__`"}
    assert by_name(facts)["Keras repairs"].status == "problem"


def test_little_memory_is_a_warning(facts):
    facts["machine"]["free_bytes"] = 2**29
    assert by_name(facts)["Memory"].found.startswith("0.5 GiB free of")
    assert by_name(facts)["Memory"].status == "warning"


BROKEN = {
    "missing library": (
        {"tensorflow/__init__.py": "raise ImportError('libcudart.so.12: cannot open shared object file')"},
        "TensorFlow",
        "cannot be imported: ImportError: libcudart.so.12: cannot open shared object file",
    ),
    "dies on import": (
        {"tensorflow/__init__.py": "import os, signal; os.kill(os.getpid(), signal.SIGILL)"},
        "TensorFlow",
        "cannot be imported: the process died of SIGILL",
    ),
    "leaves on import": (
        {"tensorflow/__init__.py": "raise SystemExit(3)"},
        "TensorFlow",
        "cannot be imported: SystemExit: 3",
    ),
    "empty folder in the way": (
        {"tensorflow/__init__.py": ""},
        "TensorFlow",
        "cannot be imported: AttributeError",
    ),
    "no tensorflow": (
        {"tensorflow/__init__.py": "raise ModuleNotFoundError(\"No module named 'tensorflow'\")"},
        "TensorFlow",
        "not installed",
    ),
    "no keras": (
        {
            "tensorflow/__init__.py": "raise ImportError('so that this test is quick')",
            "keras/__init__.py": "raise ModuleNotFoundError(\"No module named 'keras'\")",
        },
        "Keras",
        "not installed",
    ),
    "no psutil": (
        {
            "tensorflow/__init__.py": "raise ImportError('so that this test is quick')",
            "psutil.py": "raise ModuleNotFoundError(\"No module named 'psutil'\")",
        },
        "Memory",
        "No module named 'psutil'",
    ),
    "no nvml": (
        {
            "tensorflow/__init__.py": "raise ImportError('so that this test is quick')",
            "pynvml.py": "raise ModuleNotFoundError(\"No module named 'pynvml'\")",
        },
        "NVIDIA driver",
        "nvidia-ml-py is not installed",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_a_finding_with_a_fix(case, tmp_path):
    files, name, words = BROKEN[case]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    checks = doctor.examine(environ=clean(PYTHONPATH=str(tmp_path)), model="mlp")
    named = {check.name: check for check in checks}
    assert words in named[name].found
    assert named[name].status in ("warning", "problem") and "pip install" in named[name].fix
    assert doctor.stops_training(checks)
    assert named["Python"].status == "ok" and named["CPU"].found
    assert named["Keras repairs"].fix == "Mend TensorFlow and Keras first."
    assert all(check.fix for check in checks if check.status != "ok")


def test_another_backend_is_a_problem(tmp_path):
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError(\"No module named 'jax'\")")
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow/__init__.py").write_text("raise ImportError('so that this test is quick')")
    checks = doctor.examine(environ=clean(PYTHONPATH=str(tmp_path), KERAS_BACKEND="jax"))
    named = {check.name: check for check in checks}
    assert named["Keras"] == Check(
        "Keras", "problem", "its backend is jax, not TensorFlow", "export KERAS_BACKEND=tensorflow"
    )


def test_tensor_core_advice_for_a_model_and_for_a_name():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(100, name="wide"), keras.layers.Dense(10)])
    check = doctor.tensor_cores(model)
    assert (check.status, check.found) == ("warning", "wide: units=100")
    assert check.fix == "wide: Use 96 or 104: Tensor Cores work best on multiples of 8."
    assert doctor.tensor_cores("mlp").status == "ok"
    assert doctor.tensor_cores("transformer").status == "ok"
    with pytest.raises(InputError, match="Did you mean 'resnet'"):
        doctor.tensor_cores("resnt")


def test_the_doctor_itself_starts_no_tensorflow():
    code = "import sys, tfgpu.doctor; print('tensorflow' in sys.modules or 'keras' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
