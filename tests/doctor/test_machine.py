"""Cores, memory, limits, devices and container, read from fake /proc, /sys and /dev."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tfgpu.doctor.check import script
from tfgpu.doctor.facts import asking, machine

MODULE = "tfgpu.doctor.facts.machine"


def ask(environ: dict, root: Path | str = "/", **options) -> dict:
    found = asking.ask(MODULE, ["machine"], environ=asking.with_tfgpu(environ), seconds=60, root=str(root), **options)
    return found["machine"]


@pytest.fixture
def root(tmp_path):
    """An empty fake machine."""
    for name in ("proc/self", "sys/fs/cgroup", "dev/shm", "run"):
        (tmp_path / "root" / name).mkdir(parents=True)
    return tmp_path / "root"


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GROUPS = {
    "version 2": ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 1.5),
    "version 2, the limit is above": (
        {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "2 1"},
        2.0,
    ),
    "version 2, in a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4.0),
    "version 1": (
        {
            "proc/self/cgroup": "7:memory:/x\n4:cpu,cpuacct:/docker/1\n",
            "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000\n",
        },
        0.5,
    ),
    "version 1, no limit": (
        {
            "proc/self/cgroup": "4:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "none": ({}, None),
    "garbage": ({"proc/self/cgroup": "x\n0::/\n", "sys/fs/cgroup/cpu.max": "many\n"}, None),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_share_of_the_processor_that_a_control_group_gives(case, root):
    contents, share = GROUPS[case]
    assert machine.cpu_quota(files(root, contents)) == share


@pytest.mark.parametrize(("text", "limit"), [("1073741824\n", 2**30), ("max\n", None), ("9223372036854771712\n", None)])
def test_the_memory_that_a_control_group_gives(text, limit, root):
    assert machine.memory_limit(files(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": text})) == limit


@pytest.mark.parametrize(
    ("contents", "environ", "kind"),
    [
        ({}, {}, ""),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({"proc/1/cgroup": "1:cpu:/kubepods/pod1"}, {}, "kubepods"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"APPTAINER_NAME": "x.sif"}, "apptainer"),
    ],
)
def test_the_kind_of_container(contents, environ, kind, root):
    assert machine.container(files(root, contents), environ) == kind


VERSION = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.127.05  Tue Oct  8 03:22:07 UTC 2024
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U22)\n"


@pytest.mark.parametrize(("text", "version"), [(VERSION, "550.127.05"), (OPEN, "570.86.15"), ("", None), ("x", None)])
def test_the_version_of_the_kernels_module(text, version, root):
    assert machine.kernel_driver(files(root, {"proc/driver/nvidia/version": text})) == version


def test_a_container_that_was_started_without_its_hosts_gpus(root, facts, by_name, clean):
    contents = {".dockerenv": "", "proc/driver/nvidia/version": VERSION}
    contents |= {"sys/bus/pci/devices/0/vendor": "0x10de\n", "sys/bus/pci/devices/0/class": "0x030200\n"}
    facts["machine"] = ask(clean(), files(root, contents))
    check = by_name(facts)["Container"]
    assert check.status == "problem" and "--gpus all" in check.fix
    files(root, {"dev/nvidia0": "", "dev/nvidiactl": "", "dev/nvidia-uvm": "", "dev/nvidia-caps": ""})
    facts["machine"] = ask(clean(), root)
    assert by_name(facts)["Container"].found == "docker, with 1 NVIDIA GPU(s)"


def test_devices_that_this_user_may_not_open(root, facts, by_name):
    facts["machine"]["devices"] = {"gpus": 1, "closed": ["nvidia0", "nvidiactl"]}
    check = by_name(facts)["Container"]
    assert check.status == "problem" and check.command.startswith("sudo usermod -aG video")
    files(root, {"dev/nvidia0": ""})
    (root / "dev/nvidia0").chmod(0)
    if os.getuid():  # root may open all.
        assert machine.devices(root / "dev") == {"gpus": 1, "closed": ["nvidia0"]}


@pytest.mark.parametrize(
    ("option", "gpus", "status"),
    [
        ("rw,nosuid,size=65536k,inode64", 2, "problem"),
        ("rw,size=64m", 1, "warning"),
        ("rw,nosuid,nodev,size=8g", 2, "ok"),
    ],
)
def test_shared_memory_as_docker_mounts_it(option, gpus, status, root, by_name, with_gpus, a_gpu):
    files(root, {"proc/mounts": f"proc /proc proc rw 0 0\nshm /dev/shm tmpfs {option} 0 0\n", ".dockerenv": ""})
    facts = with_gpus(*[a_gpu(uuid=f"GPU-{index}") for index in range(gpus)])
    facts["machine"]["shared_memory"] = machine.shared_memory(root)
    facts["machine"]["container"] = machine.container(root, {})
    check = by_name(facts)["/dev/shm"]
    assert check.status == status, check
    assert ("--shm-size=8g" in check.fix) == (status != "ok")


def test_shared_memory_that_is_really_small(clean):
    """A file system of 1 MiB at /dev/shm, in a private mount namespace."""
    code = f"import json; from {MODULE} import shared_memory, Path; print(json.dumps(shared_memory(Path('/'))))"
    mount = f"mount -t tmpfs -o size=1m none /dev/shm && exec {sys.executable} -c {json.dumps(code)}"
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount]
    done = subprocess.run(command, env=asking.with_tfgpu(clean()), capture_output=True, text=True, timeout=550)
    if done.returncode:
        pytest.skip(f"needs mounts of its own: {done.stderr.strip()}")
    assert json.loads(done.stdout) == {"bytes": 2**20, "free_bytes": 2**20}


def test_shared_memory_full_of_what_others_left(facts, by_name):
    facts["machine"]["shared_memory"] = {"bytes": 2**34, "free_bytes": 2**20}
    assert "leftover" in by_name(facts)["/dev/shm"].found


def limited(number: int, soft: int, hard: int, environ: dict) -> dict:
    """The limits seen by a process with a limit."""
    code = f"import json; from {MODULE} import limits; print(json.dumps(limits()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=asking.with_tfgpu(environ),
        capture_output=True,
        text=True,
        timeout=550,
        preexec_fn=lambda: resource.setrlimit(number, (soft, hard)),
        check=True,
    )
    return json.loads(done.stdout)


def test_a_process_with_few_open_files(facts, by_name, clean):
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    facts["machine"]["limits"] = limited(resource.RLIMIT_NOFILE, 256, most, clean())
    check = by_name(facts)["Open files"]
    assert check.status == "warning" and check.found.startswith("at most 256 open files")
    if most >= 4096:
        assert check.command == f"ulimit -n {min(most, 65536)}"
        # A shell really takes the command.
        shell = subprocess.run(
            ["sh", "-c", f"ulimit -Sn 256; {check.command} && ulimit -n"], capture_output=True, text=True, timeout=550
        )
        assert int(shell.stdout) == min(most, 65536)
    facts["machine"]["limits"] = limited(resource.RLIMIT_NOFILE, 256, 512, clean())
    check = by_name(facts)["Open files"]
    assert check.command == "" and "the hard limit is 512" in check.fix


def test_limits_on_addresses_and_locked_memory(facts, by_name, clean):
    facts["machine"]["limits"] = limited(resource.RLIMIT_AS, 2**34, 2**34, clean())
    assert by_name(facts)["Address space"].found.startswith("at most 16.0 GiB of address")
    found = limited(resource.RLIMIT_MEMLOCK, 65536, 65536, clean())
    facts["machine"] |= {"limits": found, "infiniband": 0}
    assert "Locked memory" not in by_name(facts)
    facts["machine"]["infiniband"] = 1
    assert by_name(facts)["Locked memory"].found.startswith("at most 64 KiB")


@pytest.mark.parametrize(
    ("change", "environ", "words", "command"),
    [
        ({"cores": 64, "quota": 4.0}, {}, "quota of 4: ", "export TF_NUM_INTRAOP_THREADS=4"),
        ({"cores": 8}, {"OMP_NUM_THREADS": "64"}, "but OMP_NUM_THREADS=64", "unset OMP_NUM_THREADS"),
        ({"cores": 8}, {"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS allows one thread", "unset OMP_NUM_THREADS"),
        ({"cores": 8}, {"TF_NUM_INTRAOP_THREADS": "all"}, "not a number: TF_NUM_INTRAOP_THREADS='all'", "unset TF_NUM"),
    ],
)
def test_threads_against_cores(change, environ, words, command, facts, by_name, clean):
    facts["machine"] = ask(clean(**environ)) | change
    check = by_name(facts)["CPU"]
    assert check.status == "warning" and words in check.found and check.command.startswith(command), check


def test_a_process_that_may_use_one_core(facts, by_name, clean):
    code = f"import json; from {MODULE} import QUESTIONS; print(json.dumps(QUESTIONS['machine']()))"
    one = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=asking.with_tfgpu(clean()),
        capture_output=True,
        text=True,
        timeout=550,
        preexec_fn=lambda: os.sched_setaffinity(0, {one}),
        check=True,
    )
    facts["machine"] = json.loads(done.stdout)
    assert by_name(facts)["CPU"].found.startswith("1 cores for this process")


def test_few_cores_for_many_gpus(by_name, with_gpus, a_gpu):
    facts = with_gpus(*[a_gpu(uuid=f"GPU-{index}") for index in range(8)])
    facts["machine"] |= {"cores": 8, "quota": None, "threads": {}}
    assert by_name(facts)["CPU"].found == "8 cores for this process, for 8 GPU(s): too few to feed them"


def test_little_memory_is_a_warning(facts, by_name):
    facts["machine"]["free_bytes"] = 2**29
    assert by_name(facts)["Memory"].found.startswith("0.5 GiB free of")
    assert by_name(facts)["Memory"].status == "warning"
    facts["machine"] |= {"free_bytes": 2**35, "memory_bytes": 2**36, "memory_limit_bytes": 2**30}
    assert "1.0 GiB allowed here" in by_name(facts)["Memory"].found


def test_a_full_disk(facts, by_name):
    facts["machine"]["disk"] = {"folder": "/runs", "free_bytes": 2**30, "is_writable": True}
    assert by_name(facts)["Disk"].found == "1.0 GiB free in /runs: checkpoints may not fit"


DMESG = """\
[    1.000000] Linux version 6.1.0
[ 5012.123456] NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault
[ 5100.654321] NVRM: Xid (PCI:0000:af:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
"""


@pytest.mark.parametrize("code", [0, 1])
def test_the_kernels_log_is_read_by_dmesg(code, tmp_path, clean):
    program = tmp_path / "dmesg"
    (tmp_path / "log").write_text(DMESG)
    program.write_text(
        f"#!/bin/sh\ncat {tmp_path}/log\necho 'dmesg: read kernel buffer failed: denied' >&2\nexit {code}\n"
    )
    program.chmod(0o755)
    environ = asking.with_tfgpu(clean(PATH=f"{tmp_path}:{os.environ['PATH']}"))
    found = asking.ask(MODULE, ["xid"], environ=environ, seconds=60)["xid"]
    assert [each["number"] for each in found["lines"]] == ([] if code else [31, 79])
    assert found["unread"] == ("dmesg: read kernel buffer failed: denied" if code else "")


def test_every_command_is_one_that_a_shell_can_read(root, facts, by_name, with_gpus, a_gpu):
    gpus = [a_gpu(persistence=0, power_limit_w=300.0), a_gpu(uuid="GPU-2", used_bytes=60 * 2**30)]
    facts = with_gpus(*gpus)
    facts["machine"] |= {"quota": 0.5, "shared_memory": {"bytes": 2**20, "free_bytes": 2**20}, "container": ""}
    checks = [check for check in by_name(facts, TF_CONFIG="{'").values()]
    text = script(checks)
    assert "sudo nvidia-smi -pm 1" in text and "remount" in text and "unset TF_CONFIG" in text
    done = subprocess.run([shutil.which("sh"), "-n"], input=text, capture_output=True, text=True, timeout=550)
    assert (done.returncode, done.stderr) == (0, "")
