"""The pictures of docs/start/gallery: what the commands print, and the pages that they write.

    python docs/site/gallery.py          # needs Chromium for the pages; two minutes on two CPU cores

Each picture is made by the command that stands above it in docs/start/gallery.md.
"""

import itertools
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping
from fcntl import ioctl
from pathlib import Path

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

PICTURES = Path(__file__).parents[1] / "start" / "gallery"
ROWS, COLUMNS = 60, 100
LIMIT_S = 300
TRAIN = "train digits --epochs 6 --virtual-devices 2 --output runs/"
# Rich's format without its fonts, which a browser would fetch from another site.
SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def screen(command: str, folder: Path) -> Text:
    """What stands on a terminal, in its colors, when a command has ended."""
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "CUDA_VISIBLE_DEVICES": ""}
    terminal = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(terminal)
    with subprocess.Popen(
        arguments(command), cwd=folder, env=environment, stdin=its, stdout=its, stderr=its
    ) as process:
        os.close(its)
        while chunk := _read(ours):
            stream.feed(chunk)
        process.wait(LIMIT_S)
    os.close(ours)
    text = Text("\n").join(_line(terminal.buffer[row]) for row in range(ROWS))
    if process.returncode:
        raise SystemExit(f"tfgpu {command} failed:\n{text.plain.strip()}")
    text.rstrip()
    return text


def arguments(command: str) -> list[str]:
    return [sys.executable, "-m", "tfgpu", *shlex.split(command)]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the process has closed its side
        return b""


def _line(cells: Mapping[int, pyte.screens.Char]) -> Text:
    text = Text()
    for look, group in itertools.groupby((cells[column] for column in range(COLUMNS)), _style):
        text.append("".join(cell.data for cell in group), look)
    text.rstrip()
    return text


def _style(cell: pyte.screens.Char) -> Style:
    return Style(color=_color(cell.fg), bgcolor=_color(cell.bg), bold=cell.bold, reverse=cell.reverse)


def _color(name: str) -> str | None:
    """Rich's name of a color of pyte's: `brown` is ANSI's yellow, and hexadecimal digits come without `#`."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return name.replace("brown", "yellow").replace("bright", "bright_")


def draw_screen(name: str, command: str, text: Text) -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(text, soft_wrap=True)
    picture = console.export_svg(title=f"tfgpu {command}", code_format=SVG)
    (PICTURES / f"{name}.svg").write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n")


def draw_page(name: str, page: Path, height: int) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("The pictures of pages need Chromium. Install the package `chromium`.")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size=1100,{height}"]
    picture = PICTURES / f"{name}.png"
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, *options, f"--user-data-dir={profile}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)


def draw_top(folder: Path) -> None:
    """`tfgpu top` beside a training that runs."""
    run = folder / "runs" / "live"
    command = arguments("train digits --epochs 200 --watch-machine --virtual-devices 2 --output runs/live")
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as training:
        try:
            until = time.monotonic() + LIMIT_S
            while not (run / "metrics.csv").exists():
                if training.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"No epoch of `{shlex.join(command)}` ended.")
                time.sleep(0.5)
            draw_screen("top", "top runs/live", screen("top runs/live --once", folder))
        finally:
            training.kill()


def main() -> None:
    """Makes all pictures."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        draw_screen("train", TRAIN + "a", screen(TRAIN + "a", folder))
        screen(TRAIN + "b --learning-rate 0.01", folder)
        draw_page("report", folder / "runs" / "a" / "report.html", 1400)
        command = "compare runs/a runs/b"
        draw_screen("compare", command, screen(command, folder))
        draw_page("compare-page", folder / "compare.html", 1000)
        command = "profile digits"
        draw_screen("profile", command, screen(command, folder))
        command = "plan --pretrained llama3-8b --lora 16 --devices 8 --batch 32"
        draw_screen("plan", command, screen(command, folder))
        draw_top(folder)


if __name__ == "__main__":
    main()
