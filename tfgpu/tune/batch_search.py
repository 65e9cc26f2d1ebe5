"""The batch size that a machine trains quickest with, and the largest that it holds: by trying, a process a try."""

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

from tfgpu.errors import InputError, MachineError, whole_number
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.recipe import Recipe
from tfgpu.tune import batches, scaling
from tfgpu.tune.batches import BatchTry, Bounds
from tfgpu.tune.plan import recipe_of
from tfgpu.tune.process import TrialProcess

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
    """What trying batches came to.

    Attributes:
        tries: in the order in which they were made.
        largest: the largest batch that fits, as near as `granularity` asks; the highest that was to be tried where all
            fit; None where it was not looked for.
        fastest: the smallest batch whose examples a second are within 5 % of the best.
        settings: what to put into the recipe for `fastest`: `global_batch`, `learning_rate`, `warmup_epochs`.
        recipe: the whole recipe with them.
        replicas: how many share a batch.
        examples: how many there are to train on; None where only the data knows, which is not here.
        device: what trained, such as "NVIDIA H100", or "CPU".
        notes: what to know about these figures.
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
        """All of it as plain values, for a file."""
        tries = [{**vars(one), "memory_bytes": one.memory_bytes} for one in self.tries]
        return {**vars(self), "tries": tries, "recipe": self.recipe.model_dump(mode="json")}

    def plot(self, path: str | Path | None = None) -> Any:
        """Draws examples a second and memory over the batch.

        Args:
            path: a file to write, `.png` or `.svg`; None writes none.

        Returns:
            Matplotlib's figure, which a notebook shows.
        """
        from tfgpu.tune.batch_plot import draw

        return draw(self, path)


def batch_size(
    recipe: Recipe | str | Path | None = None,
    *,
    lowest: int | None = None,
    highest: int | None = None,
    granularity: int | None = None,
    largest: bool = True,
    scale: str = "auto",
    rounds: int = 5,
    memory_limit_bytes: int | None = None,
    timeout_s: float = 600.0,
    allow_code: bool = False,
    on_try: Callable[[BatchTry], None] | None = None,
) -> BatchSizes:
    """Trains a recipe for some steps with one batch after the other: which fit, and the rate of each.

    Each try is a process of its own, with the recipe's model, strategy, precision and optimizer, so that a lack of
    memory, or a kill, ends the try and not the search. Batches double from `lowest` to `highest`; once one does not
    fit, the largest that does is looked for between the two. A batch does not fit where memory runs out, the process
    is killed by SIGKILL (as the system does where memory is used up), or it is not done after `timeout_s`.

    One batch is given again and again, so that the input limits nothing: made-up examples where the recipe says what
    they are like (as `tfgpu train --dry-run`), else of its data.

    Args:
        recipe: a `Recipe`, a file, or the name of a ready one; None: the default recipe.
        lowest: the first batch to try, in examples over all replicas; None: 8 a replica. Raised to a multiple of the
            replicas.
        highest: the last one; None: the training examples (65,536 where they are not here). Never more than these, nor
            than make one update with `accumulate`. Lowered to a multiple of the replicas.
        granularity: how near the largest that fits is to one that does not, in examples, a multiple of the replicas;
            None: a sixteenth of it, or 8 a replica where that is more.
        largest: look for the largest that fits. False: stop where two doublings have brought less than 5 %, or where
            one does not fit.
        scale: how the learning rate follows the batch: "linear", "sqrt", "none", or "auto": linear for sgd, momentum
            and lars, else the square root (see `settings` in docs/tuning.md).
        rounds: measurements of each batch, of half a second each or one update; the median counts.
        memory_limit_bytes: a limit in bytes: of each GPU; without GPUs of the data that a try's process may reserve
            (RLIMIT_DATA, of which TensorFlow itself takes about 0.8 GB). None: none.
        timeout_s: seconds that a try may take.
        allow_code: whether a recipe's file may name a function to be called.
        on_try: called with each try when it has ended.

    Returns:
        The tries, the largest and the fastest batch, and the recipe's settings for the latter.

    Raises:
        InputError: something in the recipe or the arguments cannot work.
        MachineError: not even the lowest batch fits, or a try fails in another way.

    Example:
        >>> from tfgpu import tune
        >>> found = tune.batch_size("digits", highest=1024)      # doctest: +SKIP
        >>> found.fastest, found.largest, found.settings         # doctest: +SKIP
        (256, 1024, {'global_batch': 256, 'learning_rate': 0.00849, 'warmup_epochs': 5.0})
    """
    numbers = {"lowest": lowest, "highest": highest, "granularity": granularity, "rounds": rounds}
    _check(numbers | {"memory_limit_bytes": memory_limit_bytes}, timeout_s)
    scaling.check_scale(scale)
    if "TF_CONFIG" in os.environ:
        raise InputError("A search starts its own processes. Received: TF_CONFIG, of a cluster. Unset it.")
    base = recipe_of(recipe, allow_code) or Recipe()
    recipes.check(base, needs_data=False)
    with tempfile.TemporaryDirectory(prefix="tfgpu-batches-") as folder:
        child = _Child(base, Path(folder) / "log", timeout_s, memory_limit_bytes, rounds, scale)
        about = child.about()
        bounds = _bounds(base, about, lowest, highest, granularity)
        tries: list[BatchTry] = []
        while (batch := batches.next_batch(tries, bounds, largest=largest)) is not None:
            tries.append(child.attempt(batch, about["examples"]))
            if on_try is not None:
                on_try(tries[-1])
    return _result(base, tries, about, bounds, scale, largest, child.refused)


class _Child:
    """The processes of a search, one at a time, each ended before this returns."""

    def __init__(self, base: Recipe, log: Path, timeout_s: float, memory_bytes: int | None, rounds: int, scale: str):
        self._base, self._log, self._timeout_s = base, log, timeout_s
        self._memory_bytes, self._rounds, self._scale = memory_bytes, rounds, scale
        self.refused: dict[int, str] = {}

    def about(self) -> dict[str, Any]:
        """What there is to train on, and with what."""
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
                "rounds": self._rounds,
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

    def _run(self, task: Mapping[str, Any]) -> dict[str, Any]:
        self._log.unlink(missing_ok=True)
        process = TrialProcess(task, str(self._log), {}, _CHILD)
        until = time.monotonic() + self._timeout_s
        try:
            while (left := until - time.monotonic()) > 0:
                for message in process.news(min(left, _LOOK_S)):
                    if "end" in message:
                        return message
            return {"end": "timed out", "reason": f"not done after {self._timeout_s:g} s"}
        finally:
            process.stop()

    def _reason(self, batch: int, ended: Mapping[str, Any]) -> str:
        """Why a batch does not fit.

        Raises:
            InputError, MachineError: it failed for another reason.
        """
        reason = str(ended["reason"])
        said = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        if ended["end"] in ("timed out", "out of memory"):
            return reason
        code = ended.get("code", 0)
        if code == -signal.SIGKILL:
            return reason
        if not ended.get("input") and (_NO_MEMORY.search(reason) or (code and _NO_MEMORY.search(said))):
            return reason
        if code and -code in _FATAL and self._memory_bytes is not None:
            return f"{reason[:-1]}, under a limit of memory: some code ends so where it gets none."
        if ended.get("input"):
            raise InputError(reason)
        raise MachineError(f"A batch of {batch} failed, and not for lack of memory: {reason}")


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
        told = "" if examples is None else f", {examples:,} examples to train on"
        told += f", accumulate={base.accumulate}" if base.accumulate > 1 else ""
        raise InputError(
            f"There is no batch to try between `lowest` and `highest` that is a multiple of the replicas. Received: "
            f"lowest={lowest}, highest={highest}, replicas={replicas}{told}. Lower `lowest`, or raise `highest`."
        )
    if granularity is not None and granularity % replicas:
        raise InputError(
            f"`granularity` must be a multiple of the replicas. Received: granularity={granularity}, "
            f"replicas={replicas}. Use {math.ceil(granularity / replicas) * replicas}."
        )
    return Bounds(low, high, replicas, granularity)


def _result(
    base: Recipe,
    tries: list[BatchTry],
    about: Mapping[str, Any],
    bounds: Bounds,
    scale: str,
    wants_largest: bool,
    refused: Mapping[int, str],
) -> BatchSizes:
    fastest = batches.fastest(tries)
    if fastest is None:
        raise MachineError(
            f"Not even a batch of {tries[0].batch} fits: {tries[0].reason} Lower `lowest`, or see docs/memory.md for "
            "what makes a model smaller."
        )
    found = scaling.settings(base, fastest, scale=scale)
    notes = []
    if wants_largest and all(one.fits for one in tries):
        why = (
            ""
            if about["examples"] is None or bounds.highest < about["examples"] // base.accumulate
            else (f", and there are no more than {about['examples']:,} examples to train on")
        )
        notes.append(f"All batches fit up to {bounds.highest:,}, the highest that was tried{why}.")
    if about["examples"] is None:
        notes.append(
            f"How many examples there are to train on is not known; batches may exceed them. {about['missing']}"
        )
    if not about["made_up"]:
        notes.append("Examples are the recipe's own, one batch again and again.")
    if (spread := batches.spread_of(tries)) > _BUSY:
        notes.append(
            f"The rounds of a batch differ by {spread:.0%}, so the fastest may be another. Is the machine busy?"
        )
    if fastest in refused:
        notes.append(f"With these settings the recipe is refused: {refused[fastest]}")
    return BatchSizes(
        tries=tuple(tries),
        largest=batches.largest(tries) if wants_largest else None,
        fastest=fastest,
        settings=found,
        recipe=scaling.with_settings(base, found),
        replicas=about["replicas"],
        examples=about["examples"],
        device=about["device"],
        notes=tuple(notes),
    )


def _check(numbers: Mapping[str, int | None], timeout_s: float) -> None:
    for name, value in numbers.items():
        if value is not None:
            whole_number(name, value)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise InputError(f"`timeout_s` must be above 0. Received: {timeout_s!r}.")
    low, high = numbers["lowest"], numbers["highest"]
    if low is not None and high is not None and low > high:
        raise InputError(f"`lowest` must be at most `highest`. Received: {low} and {high}.")
