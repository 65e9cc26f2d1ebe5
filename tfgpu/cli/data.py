"""`tfgpu data`: writes and checks shards, and serves data to other processes."""

from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tfgpu.cli import screen
from tfgpu.cli.flags import argument, option
from tfgpu.cli.start import started
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


@screen.command(app, "write")
def write_data(
    source: argument(str, "SOURCE", "What to read, as for `tfgpu train --data`."),
    out: argument(Path, "OUT", "The folder for the shards."),
    shards: option(int, "Number of training shards.", "N") = 8,
    name: option(str | None, "Prefix of the file names.", "TEXT") = None,
    image_size: option(str | None, "Resize images and store them as PNG.", "HxW") = None,
    skip_corrupt: option(bool, "Skip corrupt examples.", "--skip-corrupt") = False,
    overwrite: option(bool, "Replace existing shards in OUT.", "--overwrite") = False,
) -> None:
    """Write any source as TFRecord shards.

    Write any source as TFRecord shards with checksums and an index. Training on them reads the same batches.

    tfgpu data write photos/ shards/ --shards 64
    tfgpu data write 'flowers.csv#species' shards/
    """

    from tfgpu.data import manifest, parse_source

    parse_source(source)
    whole_number("shards", shards, maximum=manifest.MOST_SHARDS)
    manifest.check_output(out, overwrite=overwrite)
    size = recipes.make({"image_size": image_size}).image_size if image_size else None
    with Console(stderr=True).status("writing shards"):
        listed = started("tfgpu.data.writer").write_shards(
            source, out, shards=shards, name=name, image_size=size, skip_corrupt=skip_corrupt, overwrite=overwrite
        )
    _show_shards(listed, out)


@screen.command(app, "check")
def check_data(folder: argument(Path, "OUT", "A folder written by `data write`.")) -> None:
    """Compare shards with their checksums.

    Read the shards in a folder and compare their checksums with the index.

    tfgpu data check shards/
    """

    from tfgpu.data import check_shards

    with Console(stderr=True).status("comparing checksums"):
        listed = check_shards(folder)
    _show_shards(listed, folder)


@screen.command(app, "serve")
def serve_data(
    workers: option(int, "Number of worker processes.", "--workers -n N") = 1,
    port: option(int, "The dispatcher's port; 0 takes a free one.", "N") = 0,
    host: option(str, "Name by which other machines reach this one.", "NAME") = "localhost",
    join: option(str | None, "Add workers to this dispatcher.", "HOST:PORT") = None,
) -> None:
    """Start a tf.data service, whose processes prepare data.

    Start a tf.data service, whose processes decode and augment for training, until Ctrl-C. Prints the address for
    [bold]data.load(service=...)[/].

    tfgpu data serve --workers 4
    tfgpu data serve --host node1 --port 5050 --workers 16
    tfgpu data serve --host node2 --join node1:5050 --workers 16
    """
    service = started("tfgpu.data.service")
    service.serve(workers, port=port, host=host, join=join, say=lambda line: print(line, flush=True))


def _show_shards(listed: Any, folder: Path) -> None:
    counts = ", ".join(f"{part} {count:,}" for part, count in listed.examples.items())
    print(f"{listed.name}: {counts} examples in {len(listed.shards)} shards, {listed.bytes:,} bytes")
    print(folder)
