"""A node that loses its network in the middle of a training: two network namespaces, joined by a bridge, stand for two
machines, each with an ssh server of its own."""

import contextlib
import getpass
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SERVER = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
NET = "198.18.77"  # of a range that is kept for tests (RFC 2544)
pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Network:
    """Hosts a and b, and this machine, on one bridge."""

    def __init__(self, folder: Path):
        self._folder, self._tag, self._servers = folder, f"tf{os.getpid()}", []

    def build(self) -> None:
        """Raises `CalledProcessError` where this process may not."""
        self._ip(f"link add {self._tag} type bridge")
        self._ip(f"address add {NET}.254/24 dev {self._tag}")
        self._ip(f"link set {self._tag} up")
        for number, host in enumerate("ab", 1):
            space, near = self._tag + host, self._tag + host
            self._ip(f"netns add {space}")
            self._ip(f"link add {near} type veth peer name net netns {space}")
            self._ip(f"link set {near} master {self._tag} up")
            self._ip(f"-n {space} address add {NET}.{number}/24 dev net")
            for device in ("net", "lo"):
                self._ip(f"-n {space} link set {device} up")

    def link(self, host: str, how: str) -> None:
        """Takes a host's link up or down: packets are lost without a word."""
        self._ip(f"link set {self._tag}{host} {how}")

    def serve(self) -> str:
        """Starts the servers; the ssh command that reaches hosta and hostb."""
        for name in ("host", "own"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._folder / name], check=True)
        (self._folder / "sshd_config").write_text(
            f"Port 2200\nHostKey {self._folder}/host\nAuthorizedKeysFile {self._folder}/own.pub\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            "PermitRootLogin yes\n"
        )
        (self._folder / "ssh_config").write_text(
            f"Host hosta\n  HostName {NET}.1\nHost hostb\n  HostName {NET}.2\n"
            f"Host *\n  Port 2200\n  User {getpass.getuser()}\n  IdentityFile {self._folder}/own\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {self._folder}/known\n"
            "  StrictHostKeyChecking accept-new\n  GlobalKnownHostsFile /dev/null\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)  # Where a server that runs as root wants an empty folder.
        for host in "ab":
            command = [IP, "netns", "exec", self._tag + host, SERVER, "-D", "-e", "-f", self._folder / "sshd_config"]
            self._servers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        ssh = f"ssh -F {self._folder}/ssh_config"
        for host in "ab":
            self._until_it_answers([*ssh.split(), "-o", "ConnectTimeout=2", f"host{host}", "true"])
        return ssh

    def close(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait()
        for host in "ab":
            for words in (f"link del {self._tag}{host}", f"netns del {self._tag}{host}"):
                with contextlib.suppress(subprocess.CalledProcessError):
                    self._ip(words)
        with contextlib.suppress(subprocess.CalledProcessError):
            self._ip(f"link del {self._tag}")

    @staticmethod
    def _ip(words: str) -> None:
        subprocess.run([IP, *words.split()], check=True, capture_output=True, text=True, timeout=550)

    @staticmethod
    def _until_it_answers(command: list[str]) -> None:
        until = time.monotonic() + 500
        while (done := subprocess.run(command, capture_output=True, text=True)).returncode:
            if time.monotonic() > until:
                raise TimeoutError(done.stderr)
            time.sleep(0.1)


@pytest.fixture
def network(tmp_path):
    """The two hosts, and the ssh command."""
    if not SERVER or not IP:
        pytest.skip("needs sshd (openssh-server) and ip (iproute2)")
    made = Network(tmp_path)
    try:
        try:
            made.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        try:
            made.ssh = made.serve()
        except TimeoutError as error:
            pytest.skip(f"hosts on a bridge do not reach each other here: {str(error).strip()}")
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("lost", ["b", "a"])
def test_a_lost_network_ends_the_others_and_all_start_again(lost, tmp_path, network, launched, whole, same_bytes):
    """Rank 0, the chief, runs on host a."""
    options = ("--hosts", "hosta,hostb", "--ssh", network.ssh, "--max-restarts", "12")
    one_thread = ("--env", "TF_NUM_INTRAOP_THREADS=1", "--env", "TF_NUM_INTEROP_THREADS=2")
    cut = launched(tmp_path / "run", "slow", *options, *one_thread)
    rank = "ab".index(lost)
    middle = {its: cut.event("middle", attempt=1, rank=its) for its in (0, 1)}
    pids = [middle[its][1] for its in (0, 1)]
    network.link(lost, "down")
    lost_at = time.monotonic()
    left_at = cut.gone(pids[1 - rank])
    gone_at = cut.gone(pids[rank])
    ended_at = cut.said_at("Attempt 2 starts")
    said = cut.said
    time.sleep(15)  # so that the second attempt fails, too
    network.link(lost, "up")
    up_at = time.monotonic()
    trains_at = _trains_again(cut)
    found = cut.finish()
    seconds = {"lost": f"rank {rank}", "the other left": left_at - lost_at, "the attempt ended": ended_at - lost_at}
    seconds |= {"the lost one had left": gone_at - lost_at, "link up": up_at - lost_at, "trains": trains_at - lost_at}
    print(json.dumps({name: round(each, 1) if isinstance(each, float) else each for name, each in seconds.items()}))
    # The remaining worker names the lost one; the launcher, its machine.
    assert f"worker {rank} ({NET}.{rank + 1}:" in said and "no longer answers" in said
    assert f"The connection to the supervisor on host{lost} was lost" in said
    assert f"No supervisor could be started on host{lost}" in cut.said
    assert same_bytes(whole, found) and cut.begun_at(1) == 0


def _trains_again(cut) -> float:
    """Waits for the first moment at which a later attempt trains."""
    while not (found := [at for number in range(2, 14) for at, _ in cut.events("trains", number)]):
        assert cut.process.poll() is None, cut.said
        time.sleep(0.1)
    return found[0]
