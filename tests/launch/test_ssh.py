"""Launches through ssh: a server of the test's own on a loopback port, with keys of its own."""

import os
import signal

import pytest

from tfgpu.errors import InputError
from tfgpu.launch import ssh


@pytest.fixture
def options(ssh_server):
    return {"nodes": ["node1", "node2"], "ssh": ssh_server}


@pytest.mark.processes
def test_two_nodes_run_the_script_as_one_cluster(launch, options):
    script = (
        "print(len(set(config['cluster']['worker'])), me, sys.argv[1:], os.getcwd())\n"
        "print(os.environ['TF_SECRET'], os.environ['GIVEN'], 'FORGOTTEN' in os.environ)\n"
    )
    code, out, err = launch.run(
        script,
        workers=3,
        arguments=["a b", "--x"],
        options=options,
        environ={"TF_SECRET": "it's", "FORGOTTEN": "1"},
        environment={"GIVEN": "2"},
        logs=str(launch.folder / "logs"),
    )
    assert code == 0, err
    for index in range(3):
        said = [f"3 worker{index} ['a b', '--x'] {launch.folder}", "it's 2 False"]
        assert launch.shown(out, f"worker {index}") == said
        assert (launch.folder / "logs" / f"worker-{index}.log").read_text().splitlines() == said
    assert launch.shown(err, "launch")[:2] == ["node1: worker 0, worker 1", "node2: worker 2"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_bad_exit_on_one_node_ends_the_others_and_starts_all_again(launch, options):
    script = "up()\nif me == 'worker1' and attempt == '1': sys.exit(9)\nif attempt == '1': time.sleep(3600)\n"
    code, _, err = launch.run(script, max_restarts=1, options=options)
    assert code == 0, err
    assert "worker 1 on node2: exit code 9" in err and "1 of 1 restarts used" in err
    launch.gone_after()


@pytest.mark.processes
def test_no_process_is_left_on_any_node_when_the_launcher_is_killed(launch, options):
    launch.start(launch.FAMILY + "up()\ntime.sleep(3600)\n", options=options)
    launch.wait_for(2)
    launch.process.kill()
    launch.gone_after()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_reach_the_nodes(launch, options, number, code):
    launch.start("up()\ntime.sleep(3600)\n", options=options)
    launch.wait_for(2)
    launch.process.send_signal(number)
    assert launch.finish()[0] == code
    launch.gone_after()


@pytest.mark.slow
@pytest.mark.processes
def test_a_node_whose_connection_is_lost_is_named_and_all_end(launch, options):
    launch.start("up()\ntime.sleep(3600)\n", options=options)
    launch.wait_for(2)
    clients = [pid for pid, words in launch.left().items() if words.startswith("ssh ") and " node2 " in words]
    assert len(clients) == 1
    os.kill(clients[0], signal.SIGKILL)
    code, _, err = launch.finish()
    assert code == 1 and "The connection to the supervisor on node2 was lost" in err
    launch.gone_after()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": ["node1", "nowhere"]}, "on nowhere: ssh: connect to host 127.0.0.1 port"),
        ({"nodes": ["stranger", "node2"]}, "on stranger: "),
        ({"directory": "/no/such/folder"}, "/no/such/folder"),
        ({"python": "/no/such/python"}, "/no/such/python"),
    ],
)
def test_the_reason_for_an_unreachable_node_is_named(launch, options, changes, words):
    code, _, err = launch.run("up()", options={**options, **changes})
    assert code == 1 and "No supervisor could be started on " in err and words in err
    assert not list(launch.folder.glob("up-*"))
    launch.gone_after()


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([], "at least one machine"),
        (["a", ""], "commas"),
        (["a", "a"], "twice"),
        (["-oProxyCommand=x"], "list of names"),
    ],
)
def test_wrong_nodes_are_refused(nodes, words):
    with pytest.raises(InputError, match=words):
        ssh.checked(nodes)


def test_the_command_quotes_and_carries_only_what_the_interpreter_needs():
    words = ssh.command("ssh -p 7", "u@h", "/a b/python", "/c'd", {"PYTHONPATH": "/x y", "TF_SECRET": "s"})
    assert words[:3] == ["ssh", "-p", "7"] and words[-3:-1] == ["--", "u@h"]
    assert words[-1] == ("cd '/c'\"'\"'d' && exec env PYTHONPATH='/x y' '/a b/python' -m tfgpu.launch.remote")
