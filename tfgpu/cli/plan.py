"""`tfgpu plan`: the possible layouts of a model over devices, their memory, and the time of a step."""

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfgpu.cli import screen
from tfgpu.cli.flags import AsJson, JsonTo, check_json, chosen, option, pairs, put_json, with_options
from tfgpu.cli.start import imported, started
from tfgpu.errors import InputError, unknown, whole_number
from tfgpu.parallel.planning import footprint, hardware
from tfgpu.parallel.planning.planner import HEADROOM, Plan, plan
from tfgpu.parallel.planning.pretrained import DECODERS, WEIGHTS, known
from tfgpu.parallel.planning.workload import PRECISIONS, Transformer, Workload

app = typer.Typer()
_SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary")
_BUILDER = {"depth": "layers", "width": "hidden", "mlp_width": "mlp", "dropout": "dropout", "heads": "heads"}
_WIDE = 112  # terminal columns needed to show the parts of each sum
_model, _on = functools.partial(option, panel="Model"), functools.partial(option, panel="Devices")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `tfgpu plan`."""

    devices: _on(int, "Number of devices (required).", "--devices N")
    model: _model(str | None, "A model, as for `tfgpu train`; or give the sizes of a transformer.", "NAME") = None
    model_option: _model(list[str] | None, "An argument of the model's builder.", "KEY=VALUE") = None
    input_shape: _model(str | None, "Shape of one example, such as 224x224x3.", "NxN") = None
    classes: _model(int | None, "Number of classes; for a transformer, its vocabulary.") = None
    layers: _model(int | None, "Transformer: number of blocks.") = None
    hidden: _model(int | None, "Transformer: hidden size.") = None
    heads: _model(int | None, "Transformer: attention heads.") = None
    sequence: _model(int | None, "Transformer: sequence length.") = None
    vocabulary: _model(int | None, "Transformer: vocabulary size.") = None
    mlp: _model(int | None, "Transformer: hidden size of the MLP [4 times --hidden].") = None
    dropout: _model(float, "Transformer: dropout rate; above 0, its masks take memory.", "NUMBER") = 0.0
    pretrained: _model(
        str | None,
        f"A published model, such as llama3-8b. One of: {', '.join(DECODERS)}; with --sequence [2048].",
        "NAME",
    ) = None
    lora: _model(int | None, "Pretrained: rank of LoRA [all weights are trained].") = None
    weights: _model(str, f"Pretrained: frozen weights, one of {', '.join(WEIGHTS)}.", "NAME") = "float32"
    flash_attention: _model(
        bool, "Pretrained: attention by blocks, as `tfgpu train --flash-attention`.", "--flash-attention"
    ) = False
    loss_chunk: _model(
        int | None, "Pretrained: tokens whose logits are computed at a time [as `tfgpu train` chooses]."
    ) = None
    batch: _model(int | None, "Examples per step, over all devices [8 per device].") = None
    optimizer: _model(str, "Optimizer name, or its number of slots per parameter.", "NAME|INTEGER") = "adamw"
    precision: _model(str, "Compute precision.", "NAME") = "mixed_bfloat16"
    loss: _model(
        str, "`batch`: computed from the whole batch, as in parallel.pipeline; `microbatch`: as in Megatron-LM.", "NAME"
    ) = "batch"
    device: _on(str, f"The kind of device. One of: {', '.join(hardware.DEVICES)}.", "NAME") = "a100-80"
    memory: _on(str | None, "Memory of a device, such as 80GB [the device's].", "--device-memory SIZE") = None
    per_host: _on(int, "Devices per host.", "--devices-per-host") = 8
    flops: _on(float | None, "Peak FLOP/s of a device, such as 312e12.") = None
    bandwidth: _on(str | None, "Bytes per second between devices of a host, such as 300GB.", "SIZE") = None
    host_bandwidth: _on(str | None, "Bytes per second between devices of two hosts, such as 25GB.", "SIZE") = None
    efficiency: _on(float, "Fraction of --flops reached while computing.") = footprint.EFFICIENCY
    headroom: _on(float, "Fraction of the memory to leave free.") = HEADROOM
    limit: option(int, "Number of layouts to show.", panel="Output") = 10
    as_json: AsJson = False
    json_to: JsonTo = None


@screen.command(
    app,
    "plan",
    "devices model layers pretrained input_shape classes batch device precision limit json_to",
    layers="Blocks; with --hidden --heads --sequence --vocabulary.",
    json_to="Write all layouts to a file; --json prints them.",
)
@with_options(Options)
def show_plans(options: Options) -> None:
    """List the layouts of a model over devices, the fastest first.

    List the layouts of a model over devices, the fastest that fits first. Nothing is run.

    tfgpu plan --model ResNet50 --input-shape 224x224x3 --classes 1000 --devices 8
    tfgpu plan --pretrained llama3-8b --lora 16 --weights int4 --devices 2
    tfgpu plan --layers 24 --hidden 2048 --heads 16 --sequence 1024 --vocabulary 50257 --devices 8
    tfgpu plan --model transformer --model-option depth=12 --model-option width=768 --model-option heads=12
        --input-shape 1024 --classes 50257 --devices 8 --device v100-16 --precision mixed_float16
    """
    whole_number("limit", options.limit)
    check_json(options.json_to)
    if options.precision not in PRECISIONS:
        raise unknown("precision", options.precision, PRECISIONS)
    work = _workload(options)
    same = ("batch", "memory", "optimizer", "device", "per_host", "flops", "efficiency", "headroom", "loss")
    how = {name: getattr(options, name) for name in same}
    for name, size in chosen(options, ("bandwidth", "host_bandwidth")).items():
        how[name] = hardware.bytes_of(size)
    found = plan(work, options.devices, **how)
    rows = [asdict(one) | {"fits": one.fits} for one in found]
    if not put_json(rows, as_json=options.as_json, json_to=options.json_to):
        _show(Console(highlight=False), _about(options, work), found, options.limit)
    if not found[0].fits:
        raise typer.Exit(1)


def _about(options: Options, work: Workload) -> str:
    size = options.memory or f"{hardware.known(options.device).memory_bytes >> 30} GiB"
    parameters = work.parameters if options.pretrained is None else known(options.pretrained).parameters
    return (
        f"{work.name}: {_count(parameters)} parameters, batches of {options.batch or 8 * options.devices:,}, "
        f"{options.precision}, {options.optimizer}; {options.devices:,} × {options.device} with {size}, of which "
        f"{options.headroom:.0%} is left free"
    )


def _workload(options: Options) -> Workload:
    builder_options = pairs("--model-option", options.model_option or [])
    if not 0 <= options.dropout < 1:
        raise InputError(f"--dropout must be at least 0 and below 1. Received: {options.dropout}.")
    given = chosen(options, (*_SIZES, "mlp")) | ({"dropout": True} if options.dropout > 0 else {})
    model, precision = options.model, options.precision
    if options.pretrained is not None:
        return _pretrained(options, given)
    for name in ("lora", "weights", "flash_attention", "loss_chunk"):
        if (value := getattr(options, name)) not in (None, "float32", False):
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} needs a published model. Received: {value}. Add --pretrained NAME.")
    if model is None:
        missing = [name for name in _SIZES if name not in given]
        if missing:
            raise InputError(
                f"A plan needs --model, or the sizes of a transformer: {', '.join(f'--{name}' for name in _SIZES)}. "
                f"Missing: --{missing[0]}."
            )
        if builder_options:
            raise InputError(
                f"--model-option is for --model. Received: {next(iter(builder_options))!r}. Add --model NAME."
            )
        return Transformer(**given).workload(precision)
    if given:
        raise InputError(f"Give --model or sizes, not both. Received: --model {model} and --{next(iter(given))}.")
    dims = _shape(model, options.input_shape)
    if model == "transformer":
        return _language_model(builder_options, dims, options.classes).workload(precision)
    return _built(model, builder_options, dims, options.classes, precision)


def _pretrained(options: Options, given: Mapping) -> Workload:
    """A published model; only the length of a sequence can be chosen."""
    others = [name for name in given if name != "sequence"] + (["model"] if options.model else [])
    if others:
        raise InputError(f"--pretrained has its own sizes. Received: --{others[0]}. Remove it.")
    decoder = known(options.pretrained)
    sequence = 2048 if options.sequence is None else options.sequence
    names = ("lora", "weights", "flash_attention", "loss_chunk")
    return decoder.workload(sequence, options.precision, **{name: getattr(options, name) for name in names})


def _language_model(options: Mapping, shape: tuple, classes: int | None) -> Transformer:
    """The sizes of `tfgpu.models.transformer` with these options."""
    known = _BUILDER | {"layers": "layers", "hidden": "hidden"}
    for name in options:
        if name not in known:
            raise unknown("option of a transformer's plan", name, known)
    if len(shape) != 1 or classes is None:
        raise InputError("A transformer needs its length and vocabulary. Add --input-shape 1024 --classes 50257.")
    sizes = {"layers": 2, "hidden": 128, "heads": 4} | {known[name]: value for name, value in options.items()}
    sizes["dropout"] = bool(sizes.get("dropout", False))
    return Transformer(sequence=shape[0], vocabulary=classes, **sizes)


def _built(name: str, options: Mapping, shape: tuple, classes: int | None, precision: str) -> Workload:
    """Builds a Keras model on this machine's CPU, and reads its graph."""
    if classes is None and ":" not in name:
        raise InputError(f"Model {name!r} needs the number of classes. Add, for example, --classes 10.")
    traced = started("tfgpu.parallel.planning.traced", says=True)
    keras, tf, models = imported("keras"), imported("tensorflow"), imported("tfgpu.models")
    keras.config.set_dtype_policy("float32" if precision == "tf32" else precision)
    with tf.device("CPU:0"), Console(stderr=True).status("reading the model's graph"):
        found = traced.workload(models.build(name, input_shape=shape, classes=classes or 1, options=options))
    return replace(found, precision=precision)


def _shape(model: str, text: str | None) -> tuple[int, ...]:
    if text is None and ":" in model:
        return ()
    words = (text or "").lower().split("x")
    if not all(word.isdigit() and int(word) for word in words):
        raise InputError(
            f"Model {model!r} needs the shape of one example. Received: {text!r}. Add, for example, --input-shape "
            f"{'1024' if model == 'transformer' else '32x32x3'}."
        )
    return tuple(map(int, words))


def _show(console: Console, about: str, found: list[Plan], limit: int) -> None:
    fitting = [one for one in found if one.fits]
    console.print(escape(about))
    if fitting:
        console.print()
        console.print(_table(fitting[:limit], wide=console.width >= _WIDE))
        if len(fitting) > limit:
            console.print(f"\n[dim]and {len(fitting) - limit:,} more that fit; --limit {len(fitting)} shows them[/]")
    if len(found) > len(fitting):
        nearest = min(found[len(fitting) :], key=lambda one: one.lacks_bytes)
        memory, count = nearest.memory, len(found) - len(fitting)
        shown = hardware.shown
        console.print(
            f"\n[yellow]{count:,} {'layout does' if count == 1 else 'layouts do'} not fit.[/] The nearest, "
            f"{nearest.layout}, needs {shown(memory.peak)} per device, {shown(nearest.lacks_bytes)} too much: "
            f"parameters {shown(memory.parameters)}, slots {shown(memory.slots)}, gradients "
            f"{shown(memory.gradients)}, activations {shown(memory.activations)}."
        )


def _table(plans: list[Plan], *, wide: bool) -> Table:
    """One row per layout; a wide terminal also shows the parts of the memory and of the traffic."""
    size, unit = _unit(plans[0].memory.peak, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3})
    second, time_unit = _unit(plans[0].step_time_s, {"s": 1, "ms": 1e-3, "µs": 1e-6})
    experts = any(one.layout.expert > 1 for one in plans)
    headings = ["\ndata", "pipe-\nline", *(["ex-\npert"] if experts else []), "ten-\nsor", "\nZeRO"]
    headings += ["accu-\nmulate", "micro-\nbatches", "\nschedule", "re-\ncompute", f"memory,\n{unit}"]
    headings += ["para-\nmeters", "\nslots", "gra-\ndients", "acti-\nvations"] if wide else []
    headings += ["sent:\ndata", "pipe-\nline", "ten-\nsor"] if wide else [f"sent,\n{unit}"]
    headings += ["ex-\npert"] if wide and experts else []
    headings += [f"step,\n{time_unit}", "\nidle"]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "\nschedule" else "right", no_wrap=True)
    for at, one in enumerate(plans):
        table.add_row(*_cells(one, wide, size, second, experts), style="bold" if at == 0 else None)
    return table


def _cells(one: Plan, wide: bool, size: float, second: float, experts: bool) -> list[str]:
    layout, memory, sent = one.layout, one.memory, one.sent
    cells = [f"{layout.data:,}", str(layout.pipeline), *([str(layout.expert)] if experts else [])]
    cells += [str(layout.tensor), str(layout.zero or "-")]
    cells += [str(layout.accumulate) if layout.accumulate > 1 else "-"]
    cells += [str(layout.microbatches), layout.schedule] if layout.pipeline > 1 else ["-", "-"]
    cells += ["yes" if layout.recompute else "-"]
    sizes = [memory.peak]
    sizes += [memory.parameters, memory.slots, memory.gradients, memory.activations] if wide else []
    sizes += [sent.data, sent.pipeline, sent.tensor] if wide else [sent.total]
    sizes += [sent.expert] if wide and experts else []
    cells += [_digits(each / size) if each else "-" for each in sizes]
    return [*cells, _digits(one.step_time_s / second), f"{layout.idle:.0%}" if layout.idle else "-"]


def _unit(value: float, units: Mapping[str, float]) -> tuple[float, str]:
    """The largest unit in which a value is at least 1, else the smallest unit."""
    found = next((name for name, size in units.items() if value >= size), list(units)[-1])
    return units[found], found


def _digits(value: float) -> str:
    """Formats a number with three significant digits, at most two of them after the point.

    Example:
        >>> _digits(0.01234), _digits(1.5), _digits(1234.5)
        ('0.01', '1.50', '1,234')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.005 else "<0.01"


def _count(number: int) -> str:
    """Formats a count, with words for large ones.

    Example:
        >>> _count(175245043712), _count(592246)
        ('175.2 billion', '592,246')
    """
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.1f} {name}"
    return f"{number:,}"
