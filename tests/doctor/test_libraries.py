"""Missing, broken and old CUDA libraries, loaded by this process and by TensorFlow."""

import os
import stat

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.doctor import facts as asked
from tfgpu.doctor.checks import libraries as judging
from tfgpu.doctor.facts import asking, libraries

MODULE = "tfgpu.doctor.facts.libraries"

# As much of a driver as TensorFlow asks of it before it opens the other libraries: one GPU.
DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = 0; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA H100 80GB HBM3", size); return 0; }
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) { *bytes = 80ul << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : 1024;
  return 0;
}
int cuDeviceGetPCIBusId(char *name, int size, int device) { strncpy(name, "0000:01:00.0", size); return 0; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, 1, 16); return 0; }
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "error"; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)8; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)8; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuMemGetInfo_v2(unsigned long *left, unsigned long *all) { *left = 79ul << 30; *all = 80ul << 30; return 0; }
"""
MANAGEMENT = "int nvmlInit_v2(void) { return 0; } int nvmlInit(void) { return 0; } int nvmlShutdown(void) { return 0; }"


def version(function: str, number: int) -> str:
    """A library with CUDA's version functions: cuDNN's returns the version, the others write it to a pointer."""
    if function == "cudnnGetVersion":
        return f"unsigned long {function}(void) {{ return {number}; }}"
    return f"int {function}(int *version) {{ *version = {number}; return 0; }}"


@pytest.fixture(scope="module")
def broken(compiled):
    """A folder with a driver, a truncated cuDNN, and a cuFFT that needs a missing library."""
    folder = compiled("libcuda.so.1", DRIVER)
    compiled("libnvidia-ml.so.1", MANAGEMENT, folder)
    compiled("libneeded.so.3", "int needed(void) { return 0; }", folder)
    compiled("libcufft.so.11", "int needed(void); int f(void) { return needed(); }", folder, folder / "libneeded.so.3")
    (folder / "libneeded.so.3").unlink()
    (folder / "libcudnn.so.9").write_bytes(b"\x7fELF cut short")
    return folder


@pytest.mark.slow
def test_tensorflow_itself_names_what_it_cannot_load(broken, clean, facts, by_name, a_gpu):
    environ = asking.with_tfgpu(clean(LD_LIBRARY_PATH=str(broken)))
    found = asked.tensorflow(environ, 300)["tensorflow"]
    failed = found["loading"]["failed"]
    assert found["gpus"] == [] and "Cannot dlopen some GPU libraries" in found["loading"]["log"]
    assert failed["libcudnn.so.9"] == f"{broken}/libcudnn.so.9: file too short"
    assert failed["libcufft.so.11"] == "libneeded.so.3: cannot open shared object file: No such file or directory"
    assert failed["libcublas.so.12"] == "cannot open shared object file: No such file or directory"
    # And what the doctor makes of it.
    facts["tensorflow"] = found
    facts["driver"] = {"version": "570.1", "cuda": [12, 8], "gpus": [a_gpu()], "links": [], "lost": []}
    checks = [check for check in judging.cuda(facts) if check.status == "problem"]
    assert len(checks) == len(failed)
    cudnn = next(check for check in checks if "libcudnn" in check.found)
    assert cudnn.found.endswith(f"{broken}/libcudnn.so.9: file too short")
    assert cudnn.command == "pip install 'tensorflow[and-cuda]>=2.17,<2.23' --force-reinstall"
    assert next(check for check in checks if "libcublas.so.12" in check.found).command.endswith("<2.23'")


def opened(environ: dict, **options) -> dict:
    options = {"cuda_version": "12.5.1", "cudnn_version": "9", "tensorflow": None} | options
    return asking.ask(MODULE, ["libraries"], environ=asking.with_tfgpu(environ), seconds=60, **options)["libraries"]


def test_each_library_is_opened_and_tells_its_version(compiled, clean, tmp_path):
    folder = compiled("libcudart.so.12", version("cudaRuntimeGetVersion", 12050))
    compiled("libcudnn.so.9", version("cudnnGetVersion", 90300), folder)
    (folder / "libcublas.so.12").write_text("not a library" * 10)
    # A wheel's, beside TensorFlow, where the loader does not look by itself.
    wheel = tmp_path / "site/nvidia/nccl/lib"
    wheel.mkdir(parents=True)
    compiled("libnccl.so.2", version("ncclGetVersion", 22304), wheel)
    found = opened(clean(LD_LIBRARY_PATH=str(folder)), tensorflow=str(tmp_path / "site/tensorflow"))
    assert {name: each["version"] for name, each in found.items() if each["version"]} == {
        "cudart": "12.5",
        "cudnn": "9.3.0",
        "nccl": "2.23.4",
    }
    assert found["cudnn"]["path"] == str(folder / "libcudnn.so.9")
    assert found["nccl"]["path"] == str(wheel / "libnccl.so.2")
    assert found["cublas"]["error"] == f"{folder}/libcublas.so.12: invalid ELF header"
    assert "cannot open shared object file" in found["cufft"]["error"]


# What TensorFlow 2.21's package says of the wheels that it wants, and what it says besides.
ASKED = """Metadata-Version: 2.1
Name: tensorflow
Version: 2.21.0
Provides-Extra: and-cuda
Requires-Dist: numpy>=1.26.0
Requires-Dist: nvidia-cuda-runtime-cu12<13.0,>=12.5.82; extra == "and-cuda"
Requires-Dist: nvidia-cudnn-cu12<10.0,>=9.3.0.75; extra == "and-cuda"
Requires-Dist: nvidia-nccl-cu12<3.0,>=2.27.7; extra == "and-cuda"
Requires-Dist: a package that nobody can read
"""
RAISE = "pip install --upgrade 'nvidia-cudnn-cu12>=9.3.0.75,<10.0'"


@pytest.fixture
def site(tmp_path):
    """A folder of packages with TensorFlow's metadata, and helpers to add NVIDIA's wheels."""
    site = tmp_path / "site"
    (site / "tensorflow-2.21.0.dist-info").mkdir(parents=True)
    (site / "tensorflow-2.21.0.dist-info/METADATA").write_text(ASKED)
    return site


def lay(site, package: str, version: str, folder: str):
    """Writes a wheel's metadata, and returns the folder of its libraries."""
    (site / f"{package}-{version}.dist-info").mkdir()
    text = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n"
    (site / f"{package}-{version}.dist-info/METADATA").write_text(text)
    (site / "nvidia" / folder / "lib").mkdir(parents=True)
    return site / "nvidia" / folder / "lib"


@pytest.mark.parametrize(
    ("own", "wheel", "status", "found", "command"),
    [
        (90300, "9.3.0.75", "ok", "9.3.0.75", ""),
        (91002, "9.10.2.21", "ok", "9.10.2.21", ""),
        (90100, "9.1.0.70", "problem", "9.1.0.70", RAISE),
        (90300, "9.3.0.70", "warning", "9.3.0.70", RAISE),  # TensorFlow itself looks at two numbers alone
        (100000, "10.0.0.1", "problem", "10.0.0.1", RAISE),
        (90100, "9.3.0.75", "problem", "9.1.0", RAISE),  # the file is not the wheel's any more
        (None, "9.1.0.70", "problem", "9.1.0.70", RAISE),  # a file that does not tell its version
    ],
)
def test_cudnn_against_what_tensorflows_package_asks_for(
    own, wheel, status, found, command, site, compiled, clean, gpu_facts, by_name
):
    folder = lay(site, "nvidia_cudnn_cu12", wheel, "cudnn")
    code = version("cudnnGetVersion", own) if own else "int nothing(void) { return 0; }"
    compiled("libcudnn.so.9", code, folder)
    gpu_facts["libraries"] = opened(clean(), tensorflow=str(site / "tensorflow"))
    check = by_name(gpu_facts)["cuDNN"]
    assert (check.status, check.command) == (status, command), check
    words = f"{found} ({folder}/libcudnn.so.9); TensorFlow requires nvidia-cudnn-cu12>=9.3.0.75,<10.0"
    assert check.found == words


@pytest.mark.parametrize(("name", "status"), [("libcudnn.so.9.2.1", "problem"), ("libcudnn.so.9.4.0", "ok")])
def test_a_cudnn_of_the_system_is_known_by_its_files_name(name, status, site, compiled, clean, gpu_facts, by_name):
    system = compiled(name, "int nothing(void) { return 0; }")
    (system / "libcudnn.so.9").symlink_to(system / name)
    lay(site, "nvidia_cudnn_cu12", "9.3.0.75", "cudnn")  # whose folder the loader does not come to
    environ = clean(LD_LIBRARY_PATH=str(system))
    gpu_facts["libraries"] = opened(environ, tensorflow=str(site / "tensorflow"))
    check = by_name(gpu_facts)["cuDNN"]
    assert check.status == status and check.found.startswith(name.removeprefix("libcudnn.so.")), check
    if status == "problem":
        assert "takes precedence over the wheel's" in check.found and check.command == f"unset LD_LIBRARY_PATH\n{RAISE}"


@pytest.mark.parametrize(
    ("built", "own", "status", "words"),
    [
        ("8", 8907, "ok", "TensorFlow requires nvidia-cudnn-cu12==8.9.7.29"),
        ("8", 8905, "warning", "TensorFlow requires nvidia-cudnn-cu12==8.9.7.29"),
        ("9", 90701, "ok", "TensorFlow was built for 9"),  # NVIDIA's own build, by PyPI's metadata
    ],
)
def test_cudnn_of_a_tensorflow_that_asks_for_one_version(
    built, own, status, words, site, compiled, clean, gpu_facts, by_name
):
    metadata = site / "tensorflow-2.21.0.dist-info/METADATA"
    metadata.write_text(ASKED.replace("nvidia-cudnn-cu12<10.0,>=9.3.0.75", "nvidia-cudnn-cu12 ==8.9.7.29"))
    folder = compiled(f"libcudnn.so.{built}", version("cudnnGetVersion", own))
    found = opened(clean(LD_LIBRARY_PATH=str(folder)), tensorflow=str(site / "tensorflow"), cudnn_version=built)
    gpu_facts["libraries"], gpu_facts["tensorflow"]["build"]["cudnn_version"] = found, built
    check = by_name(gpu_facts)["cuDNN"]
    assert check.status == status and words in check.found, check


def test_run_time_and_nccl_older_than_tensorflows_package_asks_for(site, compiled, clean, gpu_facts, by_name):
    folder = lay(site, "nvidia_cuda_runtime_cu12", "12.4.127", "cuda_runtime")
    compiled("libcudart.so.12", version("cudaRuntimeGetVersion", 12040), folder)
    folder = lay(site, "nvidia_nccl_cu12", "2.23.4", "nccl")
    compiled("libnccl.so.2", version("ncclGetVersion", 22304), folder)
    gpu_facts["libraries"] = opened(clean(), tensorflow=str(site / "tensorflow"))
    named = by_name(gpu_facts)
    assert {named[name].status for name in ("CUDA runtime", "NCCL")} == {"warning"}
    assert named["CUDA runtime"].command == "pip install --upgrade 'nvidia-cuda-runtime-cu12>=12.5.82,<13.0'"
    assert named["NCCL"].command == "pip install --upgrade 'nvidia-nccl-cu12>=2.27.7,<3.0'"
    # Of the same minor version, and one that is told by two numbers alone.
    gpu_facts["libraries"]["cudart"] |= {"version": "12.5", "wheel": None}
    gpu_facts["libraries"]["nccl"] |= {"version": "2.27.7", "wheel": "2.27.7"}
    named = by_name(gpu_facts)
    assert {named[name].status for name in ("CUDA runtime", "NCCL")} == {"ok"}


def test_the_installed_tensorflow_says_what_it_asks_for():
    """The messages of the installed TensorFlow, to notice releases that change them."""
    asked = {each["package"]: each["versions"] for each in libraries.requirements(tf.sysconfig.get_lib())}
    built = tf.sysconfig.get_build_info()["cudnn_version"]
    assert judging.fits(built, asked["nvidia-cudnn-cu12"]) and judging.fits("2", asked["nvidia-nccl-cu12"])
    assert libraries.sonames("12.3", built)["cudnn"] == f"libcudnn.so.{built}"
    assert "numpy" not in asked and libraries.requirements(None) == libraries.requirements("/nowhere/tensorflow") == []


@pytest.fixture
def gpu_facts(with_gpus, a_gpu):
    facts = with_gpus(a_gpu(), a_gpu(uuid="GPU-2"))
    facts["tensorflow"]["build"] = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}
    paths = {"cudart": "12.5", "cudnn": "9.3.0", "nccl": "2.23.4"}
    facts["libraries"] = {
        name: {"file": f"lib{name}.so", "path": f"/site/nvidia/{name}/lib{name}.so", "version": number, "error": ""}
        for name, number in paths.items()
    }
    facts["tools"] = {
        "ptxas": "/cuda/bin/ptxas",
        "version": "12.5",
        "libdevice": "/cuda/libdevice",
        "looked": ["/cuda"],
    }
    return facts


def test_libraries_that_fit(gpu_facts, by_name):
    named = by_name(gpu_facts)
    assert named["CUDA libraries"].found == "cudart 12.5, cudnn 9.3.0, nccl 2.23.4"
    names = ("CUDA libraries", "CUDA runtime", "cuDNN", "NCCL", "ptxas")
    assert {named[name].status for name in names} == {"ok"}


@pytest.mark.parametrize(
    ("library", "change", "name", "words", "command"),
    [
        ("cudart", {"version": "13.0"}, "CUDA runtime", "the driver is too old", ""),
        # Of a TensorFlow whose package asks for nothing: its build tells no more than "9".
        ("cudnn", {"version": "8.9.7"}, "cuDNN", "was built for 9", "pip install --upgrade 'nvidia-cudnn-cu12>=9,<10'"),
        ("cudnn", {"version": "8.9.7", "path": "/usr/lib/x"}, "cuDNN", "precedence", "unset LD_LIBRARY_PATH\npip"),
        ("nccl", {"path": None, "error": "gone"}, "NCCL", "libnccl.so.2 cannot be loaded: gone", "pip install"),
    ],
)
def test_a_library_that_does_not_fit(library, change, name, words, command, gpu_facts, by_name):
    gpu_facts["libraries"][library] |= change
    check = by_name(gpu_facts)[name]
    assert check.status == "problem" and words in check.found and check.command.startswith(command), check


def test_a_library_that_lies_where_tensorflow_does_not_look(gpu_facts):
    gpu_facts["tensorflow"]["gpus"] = []
    loading = {"failed": {"libcudnn.so": "not found"}, "log": ""}
    gpu_facts["tensorflow"]["loading"] = loading
    check = judging.cuda(gpu_facts)[0]
    assert check.found.endswith("not found; it is in /site/nvidia/cudnn")
    assert check.command == "export LD_LIBRARY_PATH=/site/nvidia/cudnn${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"


PTXAS = """#!/bin/sh
echo 'ptxas: NVIDIA (R) Ptx optimizing assembler'
echo 'Cuda compilation tools, release 12.5, V12.5.82'
"""


@pytest.mark.parametrize(
    ("text", "mode", "found"),
    [
        (PTXAS, 0o755, {"version": "12.5"}),
        ("#!/bin/sh\nexit 3\n", 0o755, {"version": None, "error": "ended with code 3, without a version"}),
        (PTXAS, 0o644, {"version": None, "error": "does not run: Permission denied"}),
        (None, 0, {"ptxas": None}),
    ],
)
def test_ptxas_is_found_and_asked(text, mode, found, tmp_path, clean):
    cuda = tmp_path / "cuda"
    if text:
        (cuda / "bin").mkdir(parents=True)
        (cuda / "bin/ptxas").write_text(text)
        (cuda / "bin/ptxas").chmod(mode)
    environ = asking.with_tfgpu(clean(CUDA_HOME=str(cuda), PATH="/nowhere"))
    options = {"tensorflow": None, "root": str(tmp_path)}
    answer = asking.ask(MODULE, ["tools"], environ=environ, seconds=60, **options)["tools"]
    error = found.pop("error", "")
    assert {name: answer[name] for name in found} == found
    assert error in answer.get("error", "") and str(cuda / "bin") in answer["looked"]
    assert stat.S_IMODE(os.stat(cuda / "bin/ptxas").st_mode) == mode if text else answer["libdevice"] is None


def test_ptxas_that_is_missing_or_too_old_for_the_gpu(gpu_facts, by_name):
    gpu_facts["tools"] |= {"libdevice": None}
    assert "libdevice.10.bc was not found in /cuda" in by_name(gpu_facts)["ptxas"].found
    gpu_facts["driver"]["gpus"][0]["capability"] = [12, 0]
    check = by_name(gpu_facts)["ptxas"]
    assert "these GPUs need 12.8 or newer" in check.found
    assert check.command == "pip install --upgrade 'nvidia-cuda-nvcc-cu12>=12.8'"
    gpu_facts["tools"] = {"ptxas": None, "version": None, "libdevice": None, "looked": ["/cuda", "PATH"]}
    assert by_name(gpu_facts)["ptxas"].status == "warning"


words = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=30)


@given(st.lists(words), st.from_regex(r"lib[a-z]{1,8}\.so\.[0-9]{1,2}", fullmatch=True), words.filter(str.strip))
def test_failures_are_found_among_any_lines(lines, library, why):
    why = " ".join(why.replace(";", ",").split())
    line = f"I0000 dso_loader.cc:144] Could not load dynamic library '{library}'; dlerror: {library}: {why}"
    line += "; LD_LIBRARY_PATH: /x"
    assert asked.failures("\n".join([*lines, line, *lines])) == {library: why}
