"""Executes a Dockerfile without Docker or a registry: this machine stands in for the base images.

Each stage is an overlay over this machine's own files, which stay as they are, and starts with its base's changes.
RUN lines run in it word for word, by `chroot`; the other instructions mean what they mean to Docker.
What it cannot show: what a base image lacks that this machine has.

    unshare --mount python build.py CONTEXT FOLDER --arg DEVICE=cpu --run '["tfgpu", "doctor"]'

Needs root, since overlays are mounted; the mounts end with the process.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# How this machine reaches its package indexes is no part of the image.
CARRIED = re.compile(r"(PIP_|SSL_|REQUESTS_CA|CURL_CA|https?_proxy|no_proxy)", re.IGNORECASE)


@dataclass(frozen=True)
class Stage:
    """Where a stage's files lie, and what its later instructions inherit."""

    changes: str = ""
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    folder: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    root: str = "/"


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions, comments left out and lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines()]


def expand(text: str, known: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], ""), text)


class Builder:
    """Builds stages as they are asked for, each once."""

    def __init__(self, context: Path, work: Path, arguments: dict[str, str]):
        self.context, self.work, self.arguments = context, work, arguments
        self.built: dict[str, Stage] = {}
        self.stages: dict[str, tuple[str, list[tuple[str, str]]]] = {}
        name = ""
        for word, value in instructions((context / "Dockerfile").read_text()):
            if word == "FROM":
                base, _, name = expand(value, self.arguments).partition(" AS ")
                self.stages[name] = (base, [])
            elif not name and not self.stages:
                assert word == "ARG", f"{word} before FROM"
                key, _, default = value.partition("=")
                self.arguments.setdefault(key, default)
            else:
                self.stages[name][1].append((word, value))

    def build(self, name: str) -> Stage:
        if name not in self.stages:
            print(f"this machine stands in for {name}", flush=True)
            return Stage()
        if name not in self.built:
            base, lines = self.stages[name]
            stage = self.mounted(self.build(base), name or "final")
            for word, value in lines:
                print(f"[{name or 'final'}] {word} {value}", flush=True)
                stage = getattr(self, word.lower())(stage, value)
            self.built[name] = stage
        return self.built[name]

    def mounted(self, parent: Stage, name: str) -> Stage:
        places = [self.work / name / part for part in ("upper", "work", "root")]
        for place in places:
            place.mkdir(parents=True)
        upper, work, root = map(str, places)
        if parent.changes:
            subprocess.run(["cp", "--archive", f"{parent.changes}/.", upper], check=True)
        options = f"lowerdir=/,upperdir={upper},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], check=True)
        subprocess.run(["mount", "--rbind", "/dev", f"{root}/dev"], check=True)
        subprocess.run(["mount", "-t", "proc", "proc", f"{root}/proc"], check=True)
        return replace(parent, changes=upper, root=root)

    def run(self, stage: Stage, value: str) -> Stage:
        carried = {name: text for name, text in os.environ.items() if CARRIED.match(name)}
        code = call(stage, ["/bin/sh", "-c", value], {"HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", **carried})
        assert code == 0, f"exit code {code}"
        return stage

    def copy(self, stage: Stage, value: str) -> Stage:
        words, source = value.split(), self.context
        if words[0].startswith("--from="):
            source = Path(self.build(words.pop(0).removeprefix("--from=")).root)
        *names, target = words
        place = Path(stage.root + os.path.join(stage.folder, target))
        for name in names:
            if (source / name.lstrip("/")).is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "*.pyc") if source == self.context else None
                shutil.copytree(source / name.lstrip("/"), place, symlinks=True, ignore=ignore, dirs_exist_ok=True)
            else:
                shutil.copy(source / name, place)
        return stage

    def env(self, stage: Stage, value: str) -> Stage:
        pairs = dict(pair.split("=", 1) for pair in value.split())
        values = {name: expand(text, stage.environment) for name, text in pairs.items()}
        return replace(stage, environment={**stage.environment, **values})

    def workdir(self, stage: Stage, value: str) -> Stage:
        Path(stage.root + value).mkdir(parents=True, exist_ok=True)
        return replace(stage, folder=value)

    def user(self, stage: Stage, value: str) -> Stage:
        return replace(stage, user=value)

    def entrypoint(self, stage: Stage, value: str) -> Stage:
        return replace(stage, entrypoint=tuple(json.loads(value)))

    def cmd(self, stage: Stage, value: str) -> Stage:
        return replace(stage, command=tuple(json.loads(value)))


def call(stage: Stage, command: list[str], more: dict[str, str] | None = None) -> int:
    """Runs a command in a stage, as its user, in its folder, as process 1; returns its exit code."""
    inside = ["chroot", f"--userspec={stage.user}", f"--groups={stage.user.split(':')[1]}", stage.root]
    shell = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', stage.folder, *command]
    # /proc anew, with the numbers that the processes have in here.
    counted = ["/bin/sh", "-c", 'mount -t proc proc "$0/proc" && exec "$@"', stage.root, *inside, *shell]
    numbered = ["unshare", "--pid", "--fork", "--kill-child", "--mount", *counted]
    return subprocess.run(numbered, env={**stage.environment, **(more or {})}).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("context", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arg", action="append", default=[])
    parser.add_argument("--run", action="append", help="a JSON list, run in the image; without it, its CMD")
    asked = parser.parse_args()
    # The name of the last stage is empty: it is the image.
    image = Builder(asked.context, asked.folder, dict(arg.split("=", 1) for arg in asked.arg)).build("")
    for command in map(json.loads, asked.run or [json.dumps(list(image.command))]):
        print(f"[image] {command}", flush=True)
        print("EXIT", call(image, [*image.entrypoint, *command]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
