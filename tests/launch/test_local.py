"""Launches on this machine, with real processes, signals and kills."""

import json
import os
import pty
import re
import signal
import time

import pytest

pytestmark = pytest.mark.processes


# What a process gets, and what it says


def test_each_process_gets_its_role_its_share_and_its_arguments(launch):
    script = "print(json.dumps([sys.argv[1:], config, {k: os.environ[k] for k in os.environ if 'T' in k}]))"
    code, out, _ = launch.run(script, workers=2, arguments=["--epochs", "3", "-n"], startup_timeout_s=7)
    assert code == 0
    said = [json.loads(launch.shown(out, f"worker {index}")[0]) for index in range(2)]
    addresses = said[0][1]["cluster"]["worker"]
    assert len(set(addresses)) == 2 and all(address.startswith("127.0.0.1:") for address in addresses)
    for index, (arguments, config, environ) in enumerate(said):
        assert arguments == ["--epochs", "3", "-n"]
        assert config == {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        assert (environ["TFGPU_ATTEMPT"], environ["TFGPU_STARTUP_TIMEOUT"]) == ("1", "7")
        assert int(environ["TF_NUM_INTRAOP_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.slow
def test_one_process_is_no_cluster(launch):
    code, out, _ = launch.run("print(os.environ.get('TF_CONFIG'), 'TF_NUM_INTRAOP_THREADS' in os.environ)", workers=1)
    assert (code, launch.shown(out, "worker 0")) == (0, ["None False"])


def test_streams_stay_apart_on_the_screen_and_together_in_the_file(launch):
    script = "print('out', me)\nprint('err', me, file=sys.stderr)\nsys.stdout.write('no end of line')\n"
    code, out, err = launch.run(script, logs=str(launch.folder / "logs"))
    assert code == 0
    for index in range(2):
        assert launch.shown(out, f"worker {index}") == [f"out worker{index}", "no end of line"]
        assert launch.shown(err, f"worker {index}") == [f"err worker{index}"]
        text = (launch.folder / "logs" / f"worker-{index}.log").read_text()
        assert sorted(text.splitlines()) == sorted([f"out worker{index}", f"err worker{index}", "no end of line"])
    assert "\033[" not in out + err


@pytest.mark.slow
def test_colors_are_for_terminals_and_force_color(launch):
    _, out, _ = launch.run("print('hello')", workers=1, environ={"FORCE_COLOR": "1"})
    assert re.fullmatch(r"\033\[\d+mworker 0\|\033\[0m hello\n", out)
    _, out, _ = launch.run("print('hello')", workers=1, environ={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert out == "worker 0| hello\n"


@pytest.mark.slow
def test_much_output_arrives_whole(launch):
    script = "for i in range(100000): print(f'{i:050d}')"
    code, out, _ = launch.run(script, workers=1, logs=str(launch.folder / "logs"))
    assert code == 0
    assert [int(line) for line in launch.shown(out, "worker 0")] == list(range(100000))
    assert (launch.folder / "logs" / "worker-0.log").stat().st_size == 51 * 100000


@pytest.mark.slow
def test_a_closed_output_pipe_ends_the_launch(launch):
    launch.start("up()\nwhile True: print('x'); time.sleep(0.01)\n")
    launch.wait_for(2)
    launch.process.stdout.close()
    assert launch.process.wait(300) == 128 + signal.SIGPIPE
    launch.gone_after()


# Ends


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(7)", 7, "worker 1: exit code 7"),
        pytest.param("sys.exit(2)", 2, "worker 1: exit code 2", marks=pytest.mark.slow),
        pytest.param("raise ValueError('bad luck')", 1, "ValueError: bad luck", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "worker 1: killed by SIGKILL"),
        pytest.param("os.abort()", 134, "worker 1: killed by SIGABRT", marks=pytest.mark.slow),
    ],
)
def test_the_first_bad_exit_ends_the_group_and_is_shown(launch, end, code, words):
    script = f"if me == 'worker1':\n    print('my last words')\n    {end}\ntime.sleep(3600)\n"
    found, _, err = launch.run(script, workers=3)
    assert found == code
    assert words in err and "  my last words" in launch.shown(err, "launch")
    launch.gone_after()


@pytest.mark.slow
def test_a_killed_worker_ends_the_group_before_the_grace_although_another_ignores_sigterm(launch):
    script = "if me == 'worker0': signal.signal(signal.SIGTERM, signal.SIG_IGN)\nup()\ntime.sleep(3600)\n"
    launch.start(script, options={"grace_period_s": 3600.0})
    files = launch.wait_for(2)
    os.kill(int(files[1].read_text()), signal.SIGKILL)
    code, _, err = launch.finish()  # long before the end of worker 0's grace
    assert code == 137 and "worker 1: killed by SIGKILL" in err
    launch.gone_after()


@pytest.mark.slow
def test_processes_that_ended_earlier_are_named(launch):
    _, _, err = launch.run("if me == 'worker0': sys.exit(0)\ntime.sleep(1)\nsys.exit(5)\n")
    assert "Before that, worker 0 had ended with exit code 0." in err


@pytest.mark.slow
def test_leftover_processes_of_the_script_are_killed_and_reported(launch):
    code, _, err = launch.run(launch.FAMILY)
    assert code == 0
    assert "Killed 6 process(es) that the script had left running on this machine." in err
    launch.gone_after()


def test_no_orphan_when_the_launcher_is_killed(launch):
    launch.start(launch.FAMILY + "up()\ntime.sleep(3600)\n")
    launch.wait_for(2)
    launch.wait_for_processes(8)
    launch.process.kill()
    launch.gone_after()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["guard", "supervisor"])
def test_no_orphan_when_a_process_of_the_launcher_is_killed(launch, which):
    launch.start(launch.FAMILY + "up()\ntime.sleep(3600)\n")
    worker = int(launch.wait_for(2)[0].read_text())
    supervisor = parent(worker)
    os.kill(parent(supervisor) if which == "guard" else supervisor, signal.SIGKILL)
    code, _, err = launch.finish()
    said = {"guard": "received SIGTERM", "supervisor": "The connection to the supervisor"}
    assert code == 1 and said[which] in err
    launch.gone_after()


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


# Signals

SAVING = """
def heed(number, _):
    with open("heard-" + me, "a") as file:
        file.write(str(number) + " ")
    time.sleep(0.5)
    sys.exit(75)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, heed)
up()
time.sleep(3600)
"""


@pytest.mark.parametrize(("number", "code", "heard"), [(2, 130, "2 "), (15, 75, "15 "), (1, 75, "15 ")])
def test_a_signal_reaches_all_once_and_all_may_save(launch, number, code, heard):
    launch.start(SAVING, max_restarts=3)
    launch.wait_for(2)
    launch.process.send_signal(number)
    found, _, _ = launch.finish()
    assert found == code
    assert [path.read_text() for path in sorted(launch.folder.glob("heard-*"))] == [heard, heard]
    launch.gone_after()


@pytest.mark.slow
def test_sigterm_to_scripts_that_do_not_save(launch):
    launch.start("up()\ntime.sleep(3600)\n")
    launch.wait_for(2)
    launch.process.terminate()
    assert launch.finish()[0] == 143


DEAF = "for number in (2, 15): signal.signal(number, signal.SIG_IGN)\nup()\ntime.sleep(3600)\n"


@pytest.mark.slow
def test_the_grace_period_ends(launch):
    launch.start(DEAF, options={"grace_period_s": 1.0})
    launch.wait_for(2)
    launch.process.terminate()
    assert launch.finish()[0] == 143
    launch.gone_after()


def test_a_second_ctrl_c_kills(launch):
    launch.start(DEAF, options={"grace_period_s": 100.0})
    launch.wait_for(2)
    launch.process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert launch.process.poll() is None
    launch.process.send_signal(signal.SIGINT)
    code, _, err = launch.finish()
    assert code == 130 and "Press Ctrl-C again" in err
    launch.gone_after()


# Silence

BEATING = """
def beat():
    pathlib.Path(os.environ["TFGPU_HEARTBEAT"]).touch()
"""


def test_a_stopped_process_is_named_and_the_group_ends(launch):
    # Worker 0 sends no heartbeat, and so is never late, however busy the machine is.
    script = "up()\nwhile True:\n    if me == 'worker1': beat()\n    time.sleep(0.1)\n"
    launch.start(BEATING + script, heartbeat_timeout_s=5.0)
    files = launch.wait_for(2)
    os.kill(int(files[1].read_text()), signal.SIGSTOP)
    code, _, err = launch.finish()
    assert code == 124 and "worker 1: no heartbeat for 5 s" in err
    launch.gone_after()


@pytest.mark.slow
def test_a_process_without_any_heartbeat_is_not_late(launch):
    assert launch.run("time.sleep(3)", heartbeat_timeout_s=1.0)[0] == 0


@pytest.mark.slow
def test_a_changed_clock_is_no_timeout(launch):
    script = BEATING + "for i in range(120):\n    os.utime(beat() or os.environ['TFGPU_HEARTBEAT'], (i, i))\n    "
    assert launch.run(script + "time.sleep(0.1)\n", heartbeat_timeout_s=8.0)[0] == 0


# Restarts

ONCE = "print(attempt, config['cluster']['worker'][0])\n"


def test_the_whole_group_starts_again_on_fresh_ports(launch):
    script = ONCE + "if attempt == '1':\n    time.sleep(3600 if me == 'worker0' else 0.5); sys.exit(3)\n"
    code, out, err = launch.run(script, max_restarts=2, logs=str(launch.folder / "logs"))
    assert code == 0
    lines = launch.shown(out, "worker 0")
    assert [line.split()[0] for line in lines] == ["1", "2"] and lines[0].split()[1] != lines[1].split()[1]
    assert launch.shown(err, "launch").count("Attempt 2 starts in 1 s (1 of 2 restarts used).") == 1
    assert "===== attempt 2" in (launch.folder / "logs" / "worker-0.log").read_text()


@pytest.mark.slow
def test_restarts_run_out(launch):
    code, out, err = launch.run(ONCE + "sys.exit(3)", workers=2, max_restarts=1)
    assert code == 3 and "All restarts are used (1)." in err
    assert {line.split()[0] for line in launch.shown(out, "worker 0")} <= {"1", "2"}


def test_a_preemption_uses_no_restart_and_wrong_input_is_final(launch):
    script = ONCE + "if attempt == '1': sys.exit(75)\nsys.exit(2)\n"
    code, _, err = launch.run(script, max_restarts=1)
    assert code == 2
    assert "was preempted and has saved" in err and "(0 of 1 restarts used)" in err
    assert "a restart cannot fix" in err


@pytest.mark.slow
def test_ctrl_c_during_the_wait_ends_it(launch):
    launch.start("up(); sys.exit(1)", max_restarts=50)
    launch.wait_for(1, "up-*-2")
    launch.process.send_signal(signal.SIGINT)
    assert launch.finish()[0] == 130


# Parameter servers


def test_parameter_servers_serve_until_the_chief_is_done(launch):
    script = "print(sorted(config['cluster']))\nup()\nif me != 'chief0': time.sleep(3600)\n" + (
        "while len(list(pathlib.Path().glob('up-*'))) < 4: time.sleep(0.05)\n"
    )
    code, out, _ = launch.run(script, workers=2, parameter_servers=1)
    assert code == 0
    for name in ("chief", "worker 0", "worker 1", "ps 0"):
        assert launch.shown(out, name) == ["['chief', 'ps', 'worker']"]
    launch.gone_after()


RETURNING = """
if me == "worker1" and "TFGPU_REJOIN" not in os.environ:
    sys.exit(9)
print(os.environ.get("TFGPU_REJOIN"), config["cluster"]["worker"])
up()
if me != "chief0":
    time.sleep(3600)
while not pathlib.Path("up-worker1-1").exists() or not pathlib.Path("up-worker0-1").exists():
    time.sleep(0.05)
"""


def test_a_worker_of_a_chief_returns_alone_at_its_old_address(launch):
    code, out, err = launch.run(RETURNING, parameter_servers=1, max_restarts=1)
    assert code == 0
    assert "worker 1: exit code 9. It alone is restarted; 1 of 1 restarts used." in err
    (first,), (second,) = launch.shown(out, "worker 0"), launch.shown(out, "worker 1")
    assert (first.split()[0], second.split()[0]) == ("None", "1") and first.split()[1:] == second.split()[1:]


@pytest.mark.slow
def test_a_worker_of_a_chief_ends_the_group_when_no_restart_is_left(launch):
    code, _, err = launch.run(RETURNING, parameter_servers=1)
    assert code == 9 and "worker 1: exit code 9" in err


@pytest.mark.slow
def test_a_parameter_server_that_dies_ends_the_group(launch):
    code, _, err = launch.run("if me == 'ps0': sys.exit(9)\ntime.sleep(3600)\n", parameter_servers=1)
    assert code == 9 and "ps 0: exit code 9" in err


FAILING_EVALUATOR = """
if me == "evaluator0":
    if os.environ.get("TFGPU_REJOIN") == "1":
        pathlib.Path("again").touch()
    else:
        sys.exit(9)
while not pathlib.Path("again").exists():
    time.sleep(0.05)
"""


def test_an_evaluator_that_dies_returns_alone(launch):
    code, _, err = launch.run(FAILING_EVALUATOR, evaluator=True, max_restarts=1)
    assert code == 0 and "evaluator: exit code 9. It alone is restarted; 1 of 1 restarts used." in err


@pytest.mark.slow
def test_an_evaluator_may_finish_and_is_ended_if_it_does_not(launch):
    script = "up()\nif me == 'evaluator0':\n    time.sleep(float(sys.argv[1]))\n    print('finished')\n"
    code, out, _ = launch.run(script, evaluator=True, arguments=["2"])
    assert (code, launch.shown(out, "evaluator")) == (0, ["finished"])
    code, out, _ = launch.run(script, evaluator=True, arguments=["300"], options={"grace_period_s": 1.0})
    assert (code, launch.shown(out, "evaluator")) == (0, [])
    launch.gone_after()


# TensorFlow


@pytest.mark.slow
def test_tensorflow_reads_the_numbers_of_threads(launch):
    script = """
import tensorflow as tf
tf.reduce_sum(tf.ones((9, 9)) @ tf.ones((9, 9)))
names = [pathlib.Path(f"/proc/self/task/{i}/comm").read_text().strip() for i in os.listdir("/proc/self/task")]
print(names.count("tf_Compute"), len(names))
"""
    threads = {"TF_NUM_INTRAOP_THREADS": "61", "TF_NUM_INTEROP_THREADS": "9"}
    code, out, err = launch.start(script, workers=1, environment=threads).finish(200)
    assert code == 0, err
    inter, all_threads = map(int, launch.shown(out, "worker 0")[-1].split())
    assert inter == 9 and all_threads >= 61 + 9


# Terminals


def test_ctrl_c_on_a_terminal_reaches_each_process_once(launch):
    screen, terminal = pty.openpty()
    launch.start(SAVING, terminal=terminal)
    launch.wait_for(2)
    os.write(screen, b"\x03")
    assert launch.process.wait(300) == 130
    assert [path.read_text() for path in sorted(launch.folder.glob("heard-*"))] == ["2 ", "2 "]
    assert b"\033[1mlaunch  |\033[0m Interrupted" in os.read(screen, 2**16)
    os.close(screen)
    launch.gone_after()


# Wrong input


@pytest.mark.parametrize(
    ("job", "environ", "words"),
    [
        ({"script": "none.py"}, {}, "There is no script 'none.py'"),
        ({}, {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "TF_CONFIG is set"),
        ({"environment": {"TF_CONFIG": "{}"}}, {}, "TF_CONFIG cannot be set"),
        ({"workers": 2}, {"CUDA_VISIBLE_DEVICES": "0"}, "--gpus-per-worker 0"),
        ({"logs": "/proc/logs"}, {}, "cannot be written to '/proc/logs'"),
        ({"heartbeat_timeout_s": -1}, {}, "`heartbeat_timeout_s`"),
    ],
)
def test_wrong_input_is_one_line(launch, job, environ, words):
    code, out, err = launch.run("", environ=environ, **job)
    assert code == 1 and not out  # The driver's code; the command line's is 2.
    assert words in err and "Traceback" not in err
    launch.gone_after()
