"""The rules: each is a pure function that finds one problem in a trace, and says what to change."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tfgpu.measure.profiling import knobs
from tfgpu.measure.profiling.hooks import Around, Change
from tfgpu.measure.profiling.reading import Shares, Window
from tfgpu.measure.profiling.sorting import Call, Sorted
from tfgpu.measure.profiling.stages import InputStage

WORTH = 0.15
"""The least share of the time that is worth a finding."""
SMALL_S = 50e-6
"""On the host, operations shorter than this take about as long to launch as to run."""
SMALL_KERNEL_S = 10e-6
"""The same for GPU kernels."""
_READS_A_STEP = 0.5
_EAGER_A_STEP = 20


@dataclass(frozen=True)
class Seen:
    """The input of the rules.

    Args:
        found: the sorted events.
        window: the steps.
        shares: where their time went.
        stages: the stages of the input.
        tensor_cores: shares of the kernel time on Tensor Cores, and that could run there; None without kernels.
        around: facts of the process.
        batch: rows of a step; None if unknown.
    """

    found: Sorted
    window: Window
    shares: Shares
    stages: tuple[InputStage, ...]
    tensor_cores: tuple[float, float] | None
    around: Around
    batch: int | None = None

    @property
    def steps(self) -> int:
        return self.window.steps or 1

    def inside(self, spans: list) -> list:
        """The spans that begin in the window."""
        return [one for one in spans if self.window.start <= one.start < self.window.end]

    def share_of(self, spans: list) -> float:
        """How long spans last together, as a share of the window."""
        return sum(one.end - one.start for one in spans) / max(1, self.window.length)


@dataclass(frozen=True)
class Finding:
    """A problem that was found.

    Args:
        name: one of `RULES`.
        seen: a description with numbers.
        knob: what to change, with the code to write.
        where: file and line, or the name of a function or a stage; empty if unknown.
        share: the share of the steps' time that it explains, 0 to 1; None if unknown.
        figures: the numbers in `seen`.
    """

    name: str
    seen: str
    knob: str
    where: str = ""
    share: float | None = None
    figures: dict[str, float | int | str | None] | None = None


def judge(seen: Seen) -> tuple[Finding, ...]:
    """Applies all rules; the findings that explain most of the time come first."""
    found = [finding for rule in RULES.values() for finding in rule(seen)]
    return tuple(sorted(found, key=lambda finding: -(finding.share or 0)))


def slow_map(seen: Seen) -> list[Finding]:
    """The model waits for the input, and one stage of it is the slowest."""
    share = seen.shares["input"]
    if share < WORTH or not seen.stages:
        return []
    stage = seen.stages[0]
    others = sum(each.busy_s for each in seen.stages[1:])
    if stage.busy_s < max(0.3 * share * seen.window.length / 1e9, others / 4):
        text = f"The model waits for the input {share:.0%} of the time, and no stage stands out."
        knob = (
            ".prefetch(tf.data.AUTOTUNE) as the last stage; `tfgpu profile input` measures each setting of the input."
        )
        return [Finding("slow_input", text, knob, "", share, {"input_share": share})]
    is_map = stage.kind in ("Map", "ParallelMap", "MapAndBatch", "FlatMap", "Interleave", "ParallelInterleave")
    what, where = _function_of(stage, seen.around)
    each_ms = 1e3 * stage.work_s / max(1, stage.calls)
    heavy = f", mostly {stage.operations[0][0]}" if stage.operations else ""
    text = (
        f"The model waits for the input {share:.0%} of the time. The slowest stage is {what}: {each_ms:.3g} ms per "
        f"call, {stage.parallel} in parallel, {stage.calls / seen.steps:.3g} calls per step{heavy}."
    )
    figures = {"input_share": share, "call_ms": each_ms, "parallel": stage.parallel, "calls": stage.calls}
    name = "slow_map" if is_map else "slow_input"
    return [Finding(name, text, _input_knob(stage, where), where or stage.name, share, figures)]


def _function_of(stage: InputStage, around: Around) -> tuple[str, str]:
    """A description of the stage, and its function's name and place if they are unambiguous."""
    kinds = {"Map", "ParallelMap"} if stage.kind == "MapAndBatch" else {stage.kind}
    alike = [each for each in around.stages if each.kind in kinds]
    exact = [each for each in alike if each.index == stage.index]
    for candidates in (exact, alike):
        if len({(each.function, each.where) for each in candidates}) == 1:
            one = candidates[0]
            return f"{one.function} ({one.where}), in {stage.name}", f"{one.function} ({one.where})"
    return stage.name, ""


def _input_knob(stage: InputStage, where: str) -> str:
    name = where.split(" ")[0] or "function"
    advice = []
    if stage.kind == "Map":
        advice.append(f"dataset.map({name}, num_parallel_calls=tf.data.AUTOTUNE)")
    if any("PyFunc" in kind for kind, _ in stage.operations):
        advice.append("write it in TensorFlow: Python (tf.numpy_function, tf.py_function) runs one call at a time")
    if stage.kind.endswith(("Map", "MapAndBatch")):
        advice.append("map before .cache() if it is not random, so that it runs once")
        advice.append("`tfgpu data serve --workers 4` and data.load(service=...) to use the CPUs of more machines")
    elif "Shuffle" in stage.kind:
        advice.append("shuffle names or indices, before .map() decodes them")
    else:
        advice.append("`tfgpu profile input` measures each setting of the input")
    return "; ".join(advice) + "."


def host_read(seen: Seen) -> Iterator[Finding]:
    """Python reads a tensor in each step, and waits for it."""
    places = defaultdict(list)
    for read in seen.inside(seen.found.reads):
        places[read.name].append(read.end - read.start)
    for where, lengths in places.items():
        if seen.window.steps is None or len(lengths) < _READS_A_STEP * seen.steps:
            continue
        share = sum(lengths) / seen.window.length
        text = (
            f"{where} reads a tensor (.numpy(), float(), print) {len(lengths) / seen.steps:.3g} times per step, which "
            f"takes {share:.1%} of the time. "
        )
        there = "Here that is cheap; with a GPU, Python waits for the value and launches nothing until then."
        text += "Python launches nothing until it has the value." if seen.shares.device else there
        knob = (
            "accumulate it in a keras.metrics.Mean and read .result() every 100 steps: if step % 100 == 0: "
            "loss.numpy(). Keras's own `fit` reads once per call: use tfgpu.repair_keras() or "
            "compile(steps_per_execution=64)."
        )
        yield Finding("host_read", text, knob, where, share, {"reads_a_step": len(lengths) / seen.steps})


def retracing(seen: Seen) -> Iterator[Finding]:
    """A tf.function is retraced repeatedly."""
    calls = defaultdict(list)
    for call in seen.found.calls:
        calls[call.name].append(call)
    for name, each in calls.items():
        traced = [call for call in each if call.traced]
        is_new = all(call.count == 1 for call in traced)
        # tfgpu has separate loops for training and evaluation; a script may have two functions of one name.
        if len(traced) < (3 if is_new else 2) or (is_new and traced[0].ours):
            continue
        whole = max(1, max(call.end for call in each) - min(call.start for call in each))
        share = min(1.0, sum(call.end - call.start for call in traced) / whole)
        known = [change for change in seen.around.changes if change.function == name]
        why, knob = _why(traced, known)
        text = f"{name} was retraced in {len(traced)} of {len(each)} calls, {share:.0%} of their time. {why}"
        figures = {"graphs": len(traced), "calls": len(each), "argument": known[0].argument if known else None}
        yield Finding("retracing", text, knob, name, share, figures)


def _why(traced: list[Call], known: list[Change]) -> tuple[str, str]:
    if known:
        one = known[0]
        text = f"`{one.argument}` changes: {', '.join(one.values)}."
        if one.kind == "python":
            knob = f"a Python value is part of the graph. Pass a tensor: {one.argument}=tf.constant({one.argument})."
            return text, knob
        if one.kind == "shape":
            return text, "@tf.function(reduce_retracing=True); or .batch(n, drop_remainder=True) for constant shapes."
        return text, f"cast it before the call: tf.cast({one.argument}, tf.float32)."
    if all(call.count == 1 for call in traced):
        return "Each was a new tf.function of that name.", "create the tf.function once, before the loop."
    return "The changing argument is unknown.", "@tf.function(reduce_retracing=True)."


def recompiling(seen: Seen) -> Iterator[Finding]:
    """XLA compiles the same function repeatedly."""
    for name, times in Counter(one.name for one in seen.found.compiles).items():
        if times < 2:
            continue
        compiles = [one for one in seen.found.compiles if one.name == name]
        seconds = sum(one.end - one.start for one in compiles) / 1e9
        text = f"XLA compiled {name} {times} times, in {seconds:.2g} s: once for each new shape."
        knob = "keep shapes constant: .batch(n, drop_remainder=True); or disable XLA: compile(jit_compile=False)."
        share = min(1.0, seen.share_of(seen.inside(compiles)))
        yield Finding("recompiling", text, knob, name, share, {"times": times, "seconds": seconds})


def tiny_batch(seen: Seen) -> list[Finding]:
    """The operations are so short that launching them takes most of the time."""
    overhead = seen.shares["launch"]
    if seen.window.marked_by == "tfgpu":  # The time between short blocks counts too; in other loops it is Python's.
        overhead += seen.shares["between"]
    work = seen.inside([one for each in seen.found.kernels.values() for one in each] or seen.found.operations)
    if seen.window.steps is None or not work or overhead < 0.4 or eager_step(seen) or batch_callback(seen):
        return []
    mean_s = sum(one.own for one in work) / len(work) / 1e9
    if mean_s > (SMALL_KERNEL_S if seen.shares.device else SMALL_S):
        return []
    rows = f"{seen.batch} rows per step" if seen.batch else "few rows per step"
    text = (
        f"{rows}: an operation takes {mean_s * 1e6:.2g} µs on average, and for {overhead:.0%} of the time nothing "
        f"computes while TensorFlow launches operations."
    )
    knob = (
        f"{knobs.launches(seen.window)} A larger batch does more work per launch, but changes the result: "
        f".batch({8 * (seen.batch or 32)}), with an adjusted learning rate."
    ).strip()
    return [Finding("tiny_batch", text, knob, "", overhead, {"rows": seen.batch, "operation_us": mean_s * 1e6})]


def batch_callback(seen: Seen) -> list[Finding]:
    """A callback needs each batch, so that `fit` returns to Python after each."""
    names, share = knobs.callbacks(seen.window), seen.shares["launch"] + seen.shares["between"]
    if not names or share < WORTH:
        return []
    does = f"{', '.join(names)} {'needs' if len(names) == 1 else 'need'}"
    text = (
        f"{does} each batch, so that Python calls each step separately: for {share:.0%} of the time nothing computes "
        "meanwhile. Without such callbacks one call runs many steps."
    )
    return [Finding("batch_callback", text, knobs.fewer_looks(names), ", ".join(names), share, {"share": share})]


def eager_step(seen: Seen) -> list[Finding]:
    """Python runs the step's operations one by one."""
    eager = seen.inside(seen.found.eager)
    each = len(eager) / seen.steps
    # Includes Python's time around the operations.
    share = max(seen.share_of(eager), seen.shares["python"] - seen.share_of(seen.inside(seen.found.reads)))
    if seen.window.steps is None or each < _EAGER_A_STEP or share + seen.shares["between"] < WORTH:
        return []
    often = ", ".join(name for name, _ in Counter(one.name for one in eager).most_common(3))
    text = f"Python runs {each:.0f} operations per step one by one ({often}), outside any tf.function."
    knob = "decorate the step with @tf.function; in fit, model.compile(..., run_eagerly=False)."
    return [Finding("eager_step", text, knob, "", share, {"operations_a_step": each})]


def python_in_step(seen: Seen) -> list[Finding]:
    """The compiled step calls Python."""
    calls = seen.inside(seen.found.python)
    share = seen.share_of(calls)
    if not calls or share < WORTH / 3:
        return []
    where = Counter(one.name for one in calls).most_common(1)[0][0]
    text = f"Each step calls Python {len(calls) / seen.steps:.3g} times ({where}), {share:.0%} of the time."
    knob = (
        "write it in TensorFlow: tf.py_function and tf.numpy_function run on the host, one at a time, and not in XLA."
    )
    return [Finding("python_in_step", text, knob, where, share, {"calls_a_step": len(calls) / seen.steps})]


def unsharded_input(seen: Seen) -> list[Finding]:
    """Each replica computes all rows, or each worker prepares all rows."""
    around = seen.around
    if around.plain:
        where, count = around.plain[0], around.replicas
        text = f"{where} passes the whole batch to each of {count} replicas: all of them compute the same rows."
        knob = "dataset = strategy.experimental_distribute_dataset(dataset), which gives each replica its own rows."
        return [Finding("unsharded_input", text, knob, where, 1 - 1 / count, {"replicas": count})]
    kinds = {stage.kind for stage in seen.stages}
    if around.workers < 2 or not seen.stages or any("Shard" in kind or "DataService" in kind for kind in kinds):
        return []
    rows = 1 - 1 / around.workers
    if seen.window.marked_by == "tfgpu":  # Each worker prepares the whole batch and slices it.
        if seen.shares["input"] < WORTH:
            return []
        text = f"Each of {around.workers} workers prepares all rows and trains on one in {around.workers}."
        knob = "`tfgpu data serve --workers 4`, and data.load(service=...): rows are prepared once for all workers."
    else:
        text = (
            f"{around.workers} workers train, and no stage shards this worker's input: unless you divide the files "
            "by hand, all workers train on each example."
        )
        knob = (
            "dataset.shard(workers, index) before .shuffle() and .map(), or strategy.experimental_distribute_dataset."
        )
    return [Finding("unsharded_input", text, knob, "", None, {"workers": around.workers, "rows_in_vain": rows})]


def no_tensor_cores(seen: Seen) -> list[Finding]:
    """Kernels that could use Tensor Cores do not."""
    if seen.tensor_cores is None:
        return []
    on, could = seen.tensor_cores
    if could - on < WORTH:
        return []
    text = f"{could:.0%} of the kernel time multiplies matrices, {on:.0%} on Tensor Cores."
    knob = (
        'keras.config.set_dtype_policy("mixed_bfloat16") or `tfgpu train --precision mixed_bfloat16`, with sizes '
        "divisible by 8 (tfgpu.precision.advice(model)). It changes the result by rounding."
    )
    share = (could - on) * seen.shares["compute"]
    return [Finding("no_tensor_cores", text, knob, "", share, {"on": on, "could": could})]


def slow_collectives(seen: Seen) -> list[Finding]:
    """The devices wait for the all-reduce of gradients."""
    share = seen.shares["communication"]
    if share < WORTH:
        return []
    text = f"For {share:.0%} of the time collectives run and nothing computes."
    knob = (
        "same result: strategy(bytes_per_pack=16 * 2**20), or compile(..., gradient_accumulation_steps=4) with smaller "
        'batches. Half the bytes, by rounding: strategy(reduce_dtype="float16").'
    )
    return [Finding("slow_collectives", text, knob, "", share, {"share": share})]


def work_between_steps(seen: Seen) -> list[Finding]:
    """Python does other work between the steps: callbacks, logs, checkpoints."""
    share = seen.shares["between"]
    # Ignore the longest pause, which may be the end of an epoch.
    steady = sum(sorted(pauses(seen))[:-1]) / max(1, seen.window.length)
    if min(share, steady) < WORTH or tiny_batch(seen) or eager_step(seen) or batch_callback(seen):
        return []
    text = f"For {share:.0%} of the time no step runs: callbacks, logs, checkpoints, or your own Python code."
    return [Finding("work_between_steps", text, knobs.python(seen.window), "", share, {"share": share})]


def pauses(seen: Seen) -> list[int]:
    """The lengths of the pauses between steps, or between blocks of steps."""
    inside = seen.window.inside
    return [after[0] - before[1] for before, after in zip(inside, inside[1:], strict=False)]


_RULES = (
    *(slow_map, host_read, retracing, recompiling, batch_callback, tiny_batch, eager_step),
    *(python_in_step, unsharded_input, no_tensor_cores, slow_collectives, work_between_steps),
)
RULES: dict[str, Callable[[Seen], Iterable[Finding]]] = {rule.__name__: rule for rule in _RULES}
"""All rules by name; `slow_map` reports `slow_input` for stages other than a map."""
