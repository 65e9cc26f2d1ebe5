"""Wheels in parts, over a folder: packed, carried, joined and installed without an index."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import carry_wheels  # noqa: E402


def wheel(folder, name, needs=(), size=0):
    """A real wheel of a module that knows its version."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + "".join(f"Requires-Dist: {n}\n" for n in needs)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", f"VERSION = 1.0  # {'x' * size}\n")
        file.writestr(f"{name}-1.0.dist-info/METADATA", meta)
        file.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """Two wheels in parts of 500 bytes; no index is asked."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    source = tmp_path / "source"
    source.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(source))
    wheel(source, "carried_part", size=2000)
    carry_wheels.main(["pack", str(tmp_path / "parts"), str(wheel(source, "carried", ["carried_part"]))])
    carry_wheels.main(["pack", str(tmp_path / "parts"), "carried", "--part-bytes", "500"])
    return tmp_path / "parts"


def test_parts_are_small_and_named_with_their_hashes(packed):
    manifest = json.loads((packed / "manifest.json").read_text())
    assert manifest["requirements"] == ["carried"] and len(manifest["wheels"]) == 2
    for name, facts in manifest["wheels"].items():
        parts = [packed / part for part in facts["parts"]]
        assert len(parts) > 1 and all(part.stat().st_size <= 500 for part in parts)
        assert b"".join(part.read_bytes() for part in parts) == (packed / "wheels" / name).read_bytes()


@pytest.mark.slow
def test_the_copy_beside_the_parts_installs_them(packed, tmp_path):
    command = [sys.executable, packed / "carry_wheels.py", "unpack", packed, "--venv", tmp_path / "venv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    code = "import carried, carried_part; print(carried.VERSION + carried_part.VERSION)"
    assert subprocess.check_output([tmp_path / "venv/bin/python", "-c", code], text=True) == "2.0\n"


def test_every_part_that_is_missing_or_damaged_is_named(packed, tmp_path):
    first, second, *_ = sorted(packed.glob("carried-1.0*.whl.*"))
    first.unlink()
    second.write_bytes(b"?")
    with pytest.raises(carry_wheels.Unusable, match=rf"2 parts are .* copy them again: {first.name} {second.name}$"):
        carry_wheels.unpack(packed, tmp_path / "venv")
    assert not (tmp_path / "venv").exists()


def test_another_python_is_refused(packed, tmp_path):
    path = packed / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "python": "cpython-27 amiga"}))
    with pytest.raises(carry_wheels.Unusable, match="packed for cpython-27 amiga; this is cpython-"):
        carry_wheels.unpack(packed, tmp_path / "venv")


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(carry_wheels.Unusable, match="has no manifest.json"):
        carry_wheels.unpack(tmp_path, tmp_path / "venv")
