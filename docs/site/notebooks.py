"""The notebooks as pages with their output. Those that have not run yet, as they stand now, are run.

    python docs/site/notebooks.py

Two of them install KerasHub where it is missing.
"""

import hashlib
import os
import re
import resource
import time
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"), key=lambda path: int(path.stem.split("_")[0]))
RESULTS = ROOT / "build" / "notebooks"
# What TensorFlow says as it starts, whatever its log level.
NOISE = re.compile(r"^(?:WARNING: All log messages before absl|[IWE]0000 ).*\n*", re.MULTILINE)


def run(path: Path, *, folder: Path) -> Path:
    """Runs a notebook from top to bottom and keeps it with its output.

    Args:
        path: the notebook, without output.
        folder: where it runs.

    Returns:
        The copy with output, under `build/notebooks/`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    result = _result(path)
    result.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, result)
    return result


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, with its output where it has run, and its pictures by file name."""
    notebook = nbformat.read(path if path in missing() else _result(path), as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output["text"] = NOISE.sub("", output.get("text", ""))
        cell["outputs"] = joined(each for each in cell.get("outputs", []) if each.get("text") or "data" in each)
    text, resources = MarkdownExporter(exclude_input_prompt=True).from_notebook_node(notebook)
    pictures = {f"{path.stem}_{name}": content for name, content in resources["outputs"].items()}
    for name in resources["outputs"]:
        text = text.replace(f"]({name})", f"]({path.stem}_{name})")
    text = re.sub(r"\]\((\d+_\w+)\.ipynb", r"](\1.md", text)  # links between notebooks
    return text.replace("](../docs/", "](../"), pictures


def joined(outputs: Iterable[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Makes one output of printed texts that follow each other: each would be a paragraph of its own."""
    found: list[nbformat.NotebookNode] = []
    for each in outputs:
        if found and each.output_type == found[-1].output_type == "stream":
            found[-1]["text"] += each.text
        else:
            found.append(each)
    return found


def missing() -> list[Path]:
    """The notebooks that have not run as they stand now."""
    return [path for path in NOTEBOOKS if not _result(path).exists()]


def _result(path: Path) -> Path:
    return RESULTS / f"{path.stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}.ipynb"


def _processor_time_s() -> float:
    """Of the processes that this one started and that have ended; unlike seconds, it hardly grows on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Runs what is missing, each in a folder of its own."""
    for path in missing():
        folder = RESULTS / "work" / path.stem
        folder.mkdir(parents=True, exist_ok=True)
        begin, before = time.monotonic(), _processor_time_s()
        run(path, folder=folder)
        taken = time.monotonic() - begin
        print(f"{path.name}: {taken:.0f} s, {_processor_time_s() - before:.0f} s of processor time", flush=True)


if __name__ == "__main__":
    main()
