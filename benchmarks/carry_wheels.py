"""Brings the package, TensorFlow and CUDA's libraries to a machine without network, in parts of under 60 MB.

    python benchmarks/carry_wheels.py pack parts                    # with network: downloads, splits, writes hashes
    python benchmarks/carry_wheels.py pack parts 'tensorflow[and-cuda]==2.21.0'        # these packages alone
    python parts/carry_wheels.py unpack parts --venv venv           # without: checks, joins, installs

Both machines need the same Python, operating system and processor. `pack` copies this file beside the parts; it needs
Python alone. Both commands continue where an earlier call stopped.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PART_BYTES = 56 << 20
MANIFEST = "manifest.json"


class Unusable(SystemExit):
    """The parts cannot be used; the message says which and what to do."""


def pack(folder: Path, requirements: Sequence[str], *, part_bytes: int = PART_BYTES) -> dict:
    """Downloads wheels and splits them.

    Args:
        folder: for the parts and their manifest; the wheels themselves stay in `folder/wheels`.
        requirements: as pip takes them; empty takes this package with its extra `gpu`.
        part_bytes: the largest part.

    Returns:
        The manifest: the tag of this Python, the requirements, and the hash and parts of each wheel.
    """
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    wanted = list(requirements) or [f"{ROOT}[gpu]"]
    _pip(sys.executable, "wheel", "--wheel-dir", wheels, "--find-links", wheels, *wanted)
    found = {wheel.name: _split(wheel, folder, part_bytes) for wheel in sorted(wheels.glob("*.whl"))}
    names = [_package(each) for each in wanted] if requirements else ["tfgpu[gpu]"]
    manifest = {"python": _tag(), "requirements": names, "wheels": found}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    shutil.copy(__file__, folder / Path(__file__).name)
    return manifest


def unpack(folder: Path, environment: Path) -> None:
    """Joins the wheels and installs them into a virtual environment, which is made if it is not there.

    Raises:
        Unusable: the manifest or parts are missing or damaged, or were packed for another Python.
    """
    if not (folder / MANIFEST).exists():
        raise Unusable(f"error: {folder} has no {MANIFEST}. Copy all files that `pack` wrote.")
    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["python"] != _tag():
        raise Unusable(f"error: packed for {manifest['python']}; this is {_tag()}. Pack with the same Python.")
    wheels = folder / "joined"
    wheels.mkdir(exist_ok=True)
    waiting = {name: facts for name, facts in manifest["wheels"].items() if _hash(wheels / name) != facts["sha256"]}
    bad = [part for facts in waiting.values() for part, mark in facts["parts"].items() if _hash(folder / part) != mark]
    if bad:
        raise Unusable(f"error: {len(bad)} parts are missing or damaged; copy them again: {' '.join(bad)}")
    for name, facts in waiting.items():
        with open(wheels / f"{name}.joining", "wb") as out:
            for part in facts["parts"]:
                out.write((folder / part).read_bytes())
        (wheels / f"{name}.joining").rename(wheels / name)
    python = environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        venv.create(environment, with_pip=True)
    _pip(python, "install", "--no-index", "--find-links", wheels, *manifest["requirements"])


def _split(wheel: Path, folder: Path, part_bytes: int) -> dict:
    parts = {}
    with open(wheel, "rb") as file:
        for number, content in enumerate(_pieces(file, part_bytes)):
            name, mark = f"{wheel.name}.{number:03d}", hashlib.sha256(content).hexdigest()
            if _hash(folder / name) != mark:
                (folder / name).write_bytes(content)
            parts[name] = mark
    return {"sha256": _hash(wheel), "parts": parts}


def _pieces(file, size: int) -> Iterator[bytes]:
    while content := file.read(size):
        yield content


def _hash(path: Path) -> str | None:
    """The hash of a file; None if the file is missing."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _package(requirement: str) -> str:
    """What to install where a wheel was packed: a folder or file has the name of its package there."""
    return requirement if not Path(requirement.partition("[")[0]).exists() else Path(requirement).stem.partition("-")[0]


def _tag() -> str:
    return f"{sys.implementation.cache_tag} {sysconfig.get_platform()}"


def _pip(python: str | Path, *words: object) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    if code := subprocess.run(command).returncode:
        raise SystemExit(code)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="with network: download and split")
    packing.add_argument("folder", type=Path)
    packing.add_argument("requirements", nargs="*", help="as pip takes them [this package with its extra gpu]")
    packing.add_argument("--part-bytes", type=int, default=PART_BYTES, help="the largest part [%(default)s]")
    unpacking = commands.add_parser("unpack", help="without network: check, join, install")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("--venv", type=Path, required=True, help="the virtual environment to install into")
    given = parser.parse_args(words)
    if given.command == "unpack":
        unpack(given.folder, given.venv)
        print(f"installed; start {given.venv}/bin/python")
    else:
        manifest = pack(given.folder, given.requirements, part_bytes=given.part_bytes)
        parts = [part for wheel in manifest["wheels"].values() for part in wheel["parts"]]
        size = sum((given.folder / part).stat().st_size for part in parts)
        print(f"{len(manifest['wheels'])} wheels in {len(parts)} parts, {size >> 20} MiB. Carry {given.folder}/*.*")


if __name__ == "__main__":
    main()
