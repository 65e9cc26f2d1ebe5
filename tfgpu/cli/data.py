"""`tfgpu data`: writes and checks shards, and serves data to other processes."""

from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tfgpu.cli import screen
from tfgpu.cli.flags import argument, option
from tfgpu.cli.start import imported, start_tensorflow
from tfgpu.errors import whole_number
from tfgpu.recipes import recipe as recipes

app = typer.Typer(
    cls=screen.Group,
    short_help="Write and check shards; prepare data in other processes.",
    help="Write data as shards, check them, and prepare data in other processes.",
    epilog=screen.examples(
        "tfgpu data write photos/ shards/ --shards 64", "tfgpu data check shards/", "tfgpu data serve --workers 4"
    ),
)


@app.command(
    "write",
    cls=screen.Command,
    short_help="Write any source as TFRecord shards.",
    help="Write any source as TFRecord shards with checksums and an index; training on them gets the same batches.",
    epilog=screen.examples(
        "tfgpu data write photos/ shards/ --shards 64", "tfgpu data write 'flowers.csv#species' shards/"
    ),
)
def write_data(
    source: argument(str, "SOURCE", "What to read, as for `tfgpu train --data`."),
    out: argument(Path, "OUT", "The folder for the shards."),
    shards: option(int, "Number of training shards.", metavar="N") = 8,
    name: option(str | None, "Prefix of the file names.", metavar="TEXT") = None,
    image_size: option(str | None, "Resize images and store them as PNG.", metavar="HxW") = None,
    skip_corrupt: option(bool, "Skip corrupt examples.", "--skip-corrupt") = False,
    overwrite: option(bool, "Replace existing shards in OUT.", "--overwrite") = False,
) -> None:
    from tfgpu.data import manifest, parse_source

    parse_source(source)
    whole_number("shards", shards, maximum=manifest.MOST_SHARDS)
    manifest.check_output(out, overwrite=overwrite)
    size = recipes.make({"image_size": image_size}).image_size if image_size else None
    with Console(stderr=True).status("writing shards"):
        start_tensorflow()
        write_shards = imported("tfgpu.data.writer").write_shards
        listed = write_shards(
            source, out, shards=shards, name=name, image_size=size, skip_corrupt=skip_corrupt, overwrite=overwrite
        )
    _show_shards(listed, out)


@app.command(
    "check",
    cls=screen.Command,
    short_help="Compare shards with their checksums.",
    help="Read the shards in a folder and compare their checksums with the index.",
    epilog=screen.examples("tfgpu data check shards/"),
)
def check_data(folder: argument(Path, "OUT", "A folder written by `data write`.")) -> None:
    from tfgpu.data import check_shards

    with Console(stderr=True).status("comparing checksums"):
        listed = check_shards(folder)
    _show_shards(listed, folder)


@app.command(
    "serve",
    cls=screen.Command,
    short_help="Start a tf.data service, whose processes prepare data.",
    help=(
        "Start a tf.data service, whose processes decode and augment for training, until Ctrl-C. Prints the address "
        "for [bold]data.load(service=...)[/]."
    ),
    epilog=screen.examples(
        "tfgpu data serve --workers 4",
        "tfgpu data serve --host node1 --port 5050 --workers 16",
        "tfgpu data serve --host node2 --join node1:5050 --workers 16",
    ),
)
def serve_data(
    workers: option(int, "Number of worker processes.", "--workers", "-n", metavar="N") = 1,
    port: option(int, "The dispatcher's port; 0 takes a free one.", metavar="N") = 0,
    host: option(str, "Name by which other machines reach this one.", metavar="NAME") = "localhost",
    join: option(str | None, "Add workers to this dispatcher.", metavar="HOST:PORT") = None,
) -> None:
    start_tensorflow()
    serve = imported("tfgpu.data.service").serve
    serve(workers, port=port, host=host, join=join, say=lambda line: print(line, flush=True))


def _show_shards(listed: Any, folder: Path) -> None:
    counts = ", ".join(f"{part} {count:,}" for part, count in listed.examples.items())
    print(f"{listed.name}: {counts} examples in {len(listed.shards)} shards, {listed.bytes:,} bytes")
    print(folder)
