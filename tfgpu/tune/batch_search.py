"""Searches the fastest batch size, and the largest that fits, by trying each in a separate process."""

import math
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfgpu.errors import InputError, MachineError, positive, whole_number
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.recipe import Recipe
from tfgpu.tune import batches, scaling
from tfgpu.tune.batches import BatchTry, Bounds
from tfgpu.tune.process import TrialProcess
from tfgpu.tune.spec import recipe_of

__all__ = ["BatchSizes", "BatchTry", "batch_size"]

_LOWEST = 8
_HIGHEST = 1 << 16
_CHILD = "tfgpu.tune.batch_try"
_LOOK_S = 0.5
_BUSY = 0.2
_NO_MEMORY = re.compile(
    r"out of memory|\bOOM\b|RESOURCE_EXHAUSTED|ALLOC_FAILED|bad_alloc|MemoryError|[Ff]ailed to allocate|"
    r"[Cc]annot allocate memory|could not (create|execute) a (primitive|memory)|can't start new thread"
)
_FATAL = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


@dataclass(frozen=True)
class BatchSizes:
    """The result of a batch size search.

    Attributes:
        tries: the tried batches, in order.
        largest: the largest batch that fits, to the precision of `granularity`; `highest` if all fit; None if it was
            not searched.
        fastest: the smallest batch whose rate is within 5 % of the best.
        settings: the recipe's settings for `fastest`: `global_batch`, `learning_rate`, `warmup_epochs`.
        recipe: the complete recipe with these settings.
        replicas: the number of replicas that share a batch.
        examples: the number of training examples; None if unknown because the data is not on this machine.
        device: the device, such as "NVIDIA H100", or "CPU".
        notes: remarks on the result.
    """

    tries: tuple[BatchTry, ...]
    largest: int | None
    fastest: int
    settings: Mapping[str, Any]
    recipe: Recipe = field(repr=False)
    replicas: int
    examples: int | None
    device: str
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns JSON-compatible values."""
        tries = [{**vars(one), "memory_bytes": one.memory_bytes} for one in self.tries]
        return {**vars(self), "tries": tries, "recipe": self.recipe.model_dump(mode="json")}


def batch_size(
    recipe: Recipe | str | Path | None = None,
    *,
    lowest: int | None = None,
    highest: int | None = None,
    granularity: int | None = None,
    largest: bool = True,
    scale: str = "auto",
    repeats: int = 5,
    memory_limit_bytes: int | None = None,
    timeout_s: float = 600.0,
    allow_code: bool = False,
    on_try: Callable[[BatchTry], None] | None = None,
) -> BatchSizes:
    """Trains a recipe for some steps with one batch size after the other: which fit, and the rate of each.

    Each try runs in a separate process with the recipe's model, strategy, precision and optimizer, so that running out
    of memory ends only the try. Batches double from `lowest` to `highest`; once one does not fit, the largest that fits
    is searched by bisection. A batch does not fit if memory runs out, the process is killed by SIGKILL (as the kernel
    does when memory runs out), or it does not finish within `timeout_s`.

    One batch is repeated, so that the input does not limit the rate: synthetic examples if the recipe determines their
    shape (see `tfgpu train --dry-run`), otherwise a batch of its data.

    Args:
        recipe: a `Recipe`, a file, or the name of a ready recipe; None takes the default recipe.
        lowest: the smallest global batch to try, rounded up to a multiple of the replicas; None takes 8 per replica.
        highest: the largest global batch to try, rounded down to a multiple of the replicas; at most the number of
            training examples (divided by `accumulate`), which is also the default (65,536 if unknown).
        granularity: the precision of the largest batch that fits, in examples, a multiple of the replicas; None takes a
            sixteenth of it, or 8 per replica if that is more.
        largest: whether to search the largest that fits. If False, the search ends when two doublings gain less than
            5 %, or when a batch does not fit.
        scale: how the learning rate scales with the batch: "linear", "sqrt", "none", or "auto": linear for sgd,
            momentum and lars, else the square root (see `settings` in docs/guides/tuning.md).
        repeats: measurements of each batch, of half a second or one update each; the median counts.
        memory_limit_bytes: memory limit of each GPU; without GPUs, of the data segment of a try's process (RLIMIT_DATA,
            of which TensorFlow itself needs about 0.8 GB). None sets no limit.
        timeout_s: time limit of a try in seconds.
        allow_code: whether a recipe's file may name functions to call.
        on_try: called after each try.

    Returns:
        The tries, the largest and the fastest batch, and the recipe's settings for the fastest.

    Raises:
        InputError: the recipe or an argument is invalid.
        MachineError: even the smallest batch does not fit, or a try fails for another reason.

    Example:
        >>> from tfgpu import tune
        >>> found = tune.batch_size("digits", highest=1024)      # doctest: +SKIP
        >>> found.fastest, found.largest, found.settings         # doctest: +SKIP
        (256, 1024, {'global_batch': 256, 'learning_rate': 0.00849, 'warmup_epochs': 5.0})
    """
    numbers = {"lowest": lowest, "highest": highest, "granularity": granularity, "repeats": repeats}
    _check(numbers | {"memory_limit_bytes": memory_limit_bytes}, timeout_s)
    scaling.check_scale(scale)
    if "TF_CONFIG" in os.environ:
        raise InputError("A search starts its own processes, but TF_CONFIG is set. Unset it.")
    base = recipe_of(recipe, allow_code) or Recipe()
    recipes.check(base, needs_data=False)
    with tempfile.TemporaryDirectory(prefix="tfgpu-batches-") as folder:
        search = _Search(base, Path(folder) / "log", timeout_s, memory_limit_bytes, repeats, scale)
        about = search.about()
        bounds = _bounds(base, about, lowest, highest, granularity)
        tries: list[BatchTry] = []
        while (batch := batches.next_batch(tries, bounds, largest=largest)) is not None:
            tries.append(search.attempt(batch, about["examples"]))
            if on_try is not None:
                on_try(tries[-1])
    return search.result(tries, about, bounds, largest)


class _Search:
    """Runs the processes of a search, one at a time, and judges its tries."""

    def __init__(self, base: Recipe, log: Path, timeout_s: float, memory_bytes: int | None, repeats: int, scale: str):
        self._base, self._log, self._timeout_s = base, log, timeout_s
        self._memory_bytes, self._repeats, self._scale = memory_bytes, repeats, scale
        self.refused: dict[int, str] = {}

    def about(self) -> dict[str, Any]:
        """Collects facts about the data and the devices."""
        ended = self._run({"about": True, "recipe": self._base.model_dump(mode="json")})
        if ended["end"] != "complete":
            kind = InputError if ended.get("input") else MachineError
            raise kind(f"{ended['reason']}" if ended.get("input") else f"The recipe cannot be tried: {ended['reason']}")
        return ended

    def attempt(self, batch: int, examples: int | None) -> BatchTry:
        """Tries a batch."""
        what = self._base.model_dump(mode="json") | {"global_batch": batch}
        begun = time.monotonic()
        ended = self._run(
            {
                "about": False,
                "recipe": what,
                "settings": scaling.settings(self._base, batch, scale=self._scale),
                "examples": examples,
                "repeats": self._repeats,
                "memory_limit_bytes": self._memory_bytes,
            }
        )
        time_s = time.monotonic() - begun
        if ended["end"] != "complete":
            return BatchTry(batch, False, reason=self._reason(batch, ended), time_s=time_s)
        if ended["refused"]:
            self.refused[batch] = ended["refused"]
        rate, (low, high) = ended["examples_per_s"], ended["spread"]
        return BatchTry(batch, True, rate, (low, high), batch / rate, ended["peaks"], time_s=time_s)

    def result(
        self, tries: list[BatchTry], about: Mapping[str, Any], bounds: Bounds, wants_largest: bool
    ) -> BatchSizes:
        """Judges the tries.

        Raises:
            MachineError: none fits.
        """
        fastest = batches.fastest(tries)
        if fastest is None:
            raise MachineError(
                f"Even a batch of {tries[0].batch} does not fit: {tries[0].reason} Lower `lowest`, or see "
                "docs/guides/memory.md for ways to save memory."
            )
        found = scaling.settings(self._base, fastest, scale=self._scale)
        notes = []
        if wants_largest and all(one.fits for one in tries):
            are_few = about["examples"] is not None and bounds.highest >= about["examples"] // self._base.accumulate
            why = f", and there are only {about['examples']:,} training examples" if are_few else ""
            notes.append(f"All batches up to {bounds.highest:,}, the largest tried, fit{why}.")
        if about["examples"] is None:
            notes.append(f"The number of training examples is unknown; batches may exceed it. {about['missing']}")
        if not about["made_up"]:
            notes.append("Measured by repeating one batch of the recipe's data.")
        if (spread := batches.spread_of(tries)) > _BUSY:
            notes.append(
                f"Measurements of a batch differ by {spread:.0%}, so the fastest may be wrong. Is the machine busy?"
            )
        if fastest in self.refused:
            notes.append(f"The recipe is invalid with these settings: {self.refused[fastest]}")
        return BatchSizes(
            tries=tuple(tries),
            largest=batches.largest(tries) if wants_largest else None,
            fastest=fastest,
            settings=found,
            recipe=scaling.with_settings(self._base, found),
            replicas=about["replicas"],
            examples=about["examples"],
            device=about["device"],
            notes=tuple(notes),
        )

    def _run(self, task: Mapping[str, Any]) -> dict[str, Any]:
        self._log.unlink(missing_ok=True)
        process = TrialProcess(task, str(self._log), {}, _CHILD)
        until = time.monotonic() + self._timeout_s
        try:
            while (left := until - time.monotonic()) > 0:
                for message in process.news(min(left, _LOOK_S)):
                    if "end" in message:
                        return message
            return {"end": "timed out", "reason": f"not finished after {self._timeout_s:g} s"}
        finally:
            process.stop()

    def _reason(self, batch: int, ended: Mapping[str, Any]) -> str:
        """Why a batch does not fit.

        Raises:
            InputError, MachineError: it failed for another reason.
        """
        reason = str(ended["reason"])
        said = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        code = ended.get("code", 0)
        if ended["end"] in ("timed out", "out of memory") or code == -signal.SIGKILL:
            return reason
        if not ended.get("input") and (_NO_MEMORY.search(reason) or (code and _NO_MEMORY.search(said))):
            return reason
        if code and -code in _FATAL and self._memory_bytes is not None:
            return f"{reason[:-1]}, under a memory limit: some libraries crash when an allocation fails."
        if ended.get("input"):
            raise InputError(reason)
        raise MachineError(f"A batch of {batch} failed, but not because of memory: {reason}")


def _bounds(
    base: Recipe, about: Mapping[str, Any], lowest: int | None, highest: int | None, granularity: int | None
) -> Bounds:
    """The batches to try, as multiples of the replicas."""
    replicas, examples = about["replicas"], about["examples"]
    most = _HIGHEST if examples is None else max(1, examples // base.accumulate)
    wanted = most if highest is None else highest if examples is None else min(highest, most)
    low = math.ceil((_LOWEST * replicas if lowest is None else lowest) / replicas) * replicas
    high = wanted // replicas * replicas
    if lowest is None:
        low = max(replicas, min(low, high))
    if high < low:
        told = "" if examples is None else f", {examples:,} training examples"
        told += f", accumulate={base.accumulate}" if base.accumulate > 1 else ""
        raise InputError(
            f"No multiple of the replicas lies between `lowest` and `highest`. Received: lowest={lowest}, "
            f"highest={highest}, replicas={replicas}{told}. Lower `lowest`, or raise `highest`."
        )
    if granularity is not None and granularity % replicas:
        raise InputError(
            f"`granularity` must be a multiple of the replicas. Received: granularity={granularity}, "
            f"replicas={replicas}. Use {math.ceil(granularity / replicas) * replicas}."
        )
    return Bounds(low, high, replicas, granularity)


def _check(numbers: Mapping[str, int | None], timeout_s: float) -> None:
    for name, value in numbers.items():
        if value is not None:
            whole_number(name, value)
    positive("timeout_s", timeout_s)
    low, high = numbers["lowest"], numbers["highest"]
    if low is not None and high is not None and low > high:
        raise InputError(f"`lowest` must be at most `highest`. Received: {low} and {high}.")
