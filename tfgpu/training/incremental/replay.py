"""Replay: a bounded memory of old examples, mixed into the new data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu import packing
from tfgpu.compat import slots
from tfgpu.errors import InputError, is_number, whole_number
from tfgpu.training.incremental import reservoirs

_KIND = "replay memory"
_DRAWN = 0x9E3779B9  # separates the random numbers of replaying from those of sampling


class Replay:
    """A memory of examples from a stream of unknown length.

    Every example that was ever added is in it with the same probability (reservoir sampling, algorithm R); with
    `balance`, classes get shares as equal as the stream allows, and each class is a reservoir of its own examples. The
    sample and the replay depend only on the seed and the order of the data, not on batches or replicas; all workers
    have the same. The replay also depends on TensorFlow's global seed, if one is set.

    Args:
        examples: the most examples to keep.
        bytes: or the most bytes to keep; use one of the two.
        balance: balance the classes; labels are then class indices or one column per class.
        seed: of all random numbers; 0 by default.
        folder: keep the examples in memory-mapped files there, for memories larger than the host's; None keeps them in
            memory. It must not have files of another memory.

    Raises:
        InputError: an argument is out of range.

    Example:
        >>> replay = Replay(3, seed=1)
        >>> for at in range(0, 100, 10):
        ...     _ = replay.add(np.arange(at, at + 10.0)[:, None], np.full(10, at // 50))
        >>> len(replay), replay.seen
        (3, 100)

    Sources: J. Vitter, "Random sampling with a reservoir", 1985; A. Chrysakis and M.-F. Moens, "Online continual
    learning from imbalanced data", 2020 (the balanced reservoir); D. Rolnick et al., "Experience replay for continual
    learning", 2019, arXiv:1811.11682.
    """

    def __init__(
        self,
        examples: int | None = None,
        *,
        bytes: int | None = None,
        balance: bool = False,
        seed: int = 0,
        folder: str | Path | None = None,
    ):
        if (examples is None) == (bytes is None):
            raise InputError(f"Set either `examples` or `bytes`. Received: {examples!r} and {bytes!r}.")
        name, value = ("bytes", bytes) if examples is None else ("examples", examples)
        whole_number(name, value)
        whole_number("seed", seed, minimum=0)
        self._bytes, self._folder = bytes, folder and Path(folder)
        self.seed: int = seed
        self.balance: bool = bool(balance)
        self._capacity = examples
        self._sampler = None if examples is None else self._made_sampler()
        self._structure = None  # of an example
        self._arrays: list[np.ndarray] = []
        self._mixed = 0

    def __len__(self) -> int:
        return 0 if self._sampler is None else self._sampler.kept

    @property
    def seen(self) -> int:
        """The number of examples added so far."""
        return 0 if self._sampler is None else self._sampler.seen

    @property
    def arrays(self) -> Any:
        """The kept examples in the structure in which they were added: `(x, y)` or `(x, y, sample_weight)`."""
        if self._structure is None:
            raise InputError("The replay memory is empty. Call `add` first.")
        return tf.nest.pack_sequence_as(self._structure, [array[: len(self)] for array in self._arrays])

    def add(self, x: Any, y: Any = None, sample_weight: Any = None) -> "Replay":
        """Adds examples, in order.

        Args:
            x: inputs, arrays with one row each (or a dict or tuple of them); or a finite dataset of batches.
            y: labels, one row each.
            sample_weight: weights, if the new data has them too.

        Returns:
            Itself.

        Raises:
            InputError: the numbers of rows differ, or shapes and dtypes differ from earlier ones.
        """
        if isinstance(x, tf.data.Dataset):
            for batch in x:
                self._add(batch)
            return self
        return self._add(tuple(part for part in (x, y, sample_weight) if part is not None))

    def _add(self, batch) -> "Replay":
        if not isinstance(batch, tuple) or not 2 <= len(batch) <= 3:
            raise InputError("Examples must be `(x, y)` or `(x, y, sample_weight)`. Add the labels.")
        flat = [np.asarray(part) for part in tf.nest.flatten(batch)]
        rows = {len(part) if part.ndim else 0 for part in flat}
        if len(rows) != 1:
            raise InputError(f"All arrays must have the same length. Received: {[part.shape for part in flat]}.")
        if not rows.pop():
            return self
        if self._structure is None:
            self._begin(batch, flat)
        self._check(batch, flat)
        slots = self._sampler.take(self._labels(batch))
        # If a slot is assigned twice in a batch, the later example wins.
        slot, row = np.unique(slots[::-1], return_index=True)
        row = len(slots) - 1 - row
        for array, part in zip(self._arrays, flat, strict=True):
            array[slot[slot >= 0]] = part[row[slot >= 0]]
        return self

    def mix(self, data: tf.data.Dataset, share: float = 0.5, *, seed: int | None = None) -> tf.data.Dataset:
        """Appends replayed examples to each batch.

        A batch of n new rows gets `round(n * share / (1 - share))` more rows, drawn uniformly from the current memory
        with replacement, with new draws in each epoch. Batches grow by a factor of 1 / (1 - share); the number of
        batches stays.

        Args:
            data: batches `(x, y)` or `(x, y, sample_weight)` like those that were added; finite or infinite.
            share: of replayed rows in a batch, at least 0 and below 1.
            seed: of these draws; None derives a different one for each call from the memory's seed.

        Returns:
            A dataset; `data` itself if the memory is empty.

        Raises:
            InputError: `share` is out of range, or the data has another structure, shape or dtype.
        """
        if not is_number(share) or not 0 <= share < 1:
            raise InputError(f"`share` must be at least 0 and below 1. Received: {share!r}.")
        if not isinstance(data, tf.data.Dataset):
            raise InputError(f"`data` must be a dataset of batches. Received: {type(data).__name__}.")
        self._mixed += 1
        if not len(self) or not share:
            return data
        spec = data.element_spec
        self._check(spec, tf.nest.flatten(spec))
        number = [self.seed ^ _DRAWN, self._mixed] if seed is None else [seed, 0]
        key = int(np.random.SeedSequence(number).generate_state(1, np.uint32)[0])
        seeds = tf.data.Dataset.random(seed=key, rerandomize_each_iteration=True).batch(2)
        rows, ratio = self._rows(), share / (1 - share)

        def join(batch, draw):
            flat = tf.nest.flatten(batch)
            new = tf.shape(flat[0])[0]
            count = tf.cast(tf.round(tf.cast(new, tf.float64) * ratio), tf.int32)
            at = tf.random.stateless_uniform([count], draw, maxval=len(self), dtype=tf.int32)
            both = [tf.concat([own, old], 0) for own, old in zip(flat, rows(at), strict=True)]
            return tf.nest.pack_sequence_as(batch, both)

        mixed = tf.data.Dataset.zip(data, seeds).map(join, num_parallel_calls=tf.data.AUTOTUNE)
        counter = slots.get(data, "epochs")
        if counter is not None:
            slots.of(mixed).epochs = counter
        return mixed

    def _rows(self):
        """Returns a function from indices in the current memory to its rows."""
        kept = [array[: len(self)] for array in self._arrays]
        if self._folder is None:
            with tf.device("CPU:0"):
                tensors = [tf.constant(array) for array in kept]
            return lambda at: [tf.gather(tensor, at) for tensor in tensors]

        def read(at):
            return [array[at] for array in kept]

        def rows(at):
            found = tf.numpy_function(read, [at], [array.dtype for array in kept], stateful=False)
            return [tf.ensure_shape(v, (None, *a.shape[1:])) for v, a in zip(found, kept, strict=True)]

        return rows

    def state(self) -> dict[str, Any]:
        """Returns the complete state as plain values and arrays, for `Checkpoint(remember=)`.

        The examples are copied, including those in a `folder`.
        """
        return {
            "settings": self._settings(),
            "mixed": self._mixed,
            "structure": self._structure,
            "capacity": self._capacity,
            "draws": None if self._sampler is None else self._sampler.state(),
            "kept": [np.array(array[: len(self)]) for array in self._arrays],
        }

    def put(self, state: dict[str, Any], model: Any = None) -> None:
        """Restores the result of `state` into a memory created with the same arguments.

        Args:
            state: of a `Replay`.
            model: unused.

        Raises:
            InputError: the arguments differ.
        """
        if state["settings"] != self._settings():
            raise InputError(
                f"The saved replay memory has other arguments: {state['settings']}. Received: {self._settings()}. "
                "Create the memory with the saved ones."
            )
        self._capacity, self._mixed = state["capacity"], state["mixed"]
        self._sampler = None if self._capacity is None else self._made_sampler()
        kept, before, self._structure, self._arrays = state["kept"], self._arrays, state["structure"], []
        if self._sampler is None:
            return
        self._sampler.put(state["draws"])
        for at, values in enumerate(kept):
            # Datasets that `mix` returned may still read the memory-mapped arrays, so these are reused.
            fits = at < len(before) and before[at].shape[1:] == values.shape[1:] and before[at].dtype == values.dtype
            space = before[at] if fits else self._space(at, values, replaces=True)
            space[: len(values)] = values
            self._arrays.append(space)

    def _settings(self) -> dict[str, Any]:
        examples = None if self._bytes is not None else self._capacity
        return {"examples": examples, "bytes": self._bytes, "balance": self.balance, "seed": self.seed}

    def save(self, path: str | Path) -> None:
        """Writes the complete state to one safetensors file, atomically."""
        packing.write(path, _KIND, self.state())

    def load(self, path: str | Path, like: Any = None) -> "Replay":
        """Restores the result of `save` into a memory created with the same arguments; see also `from_file`.

        Args:
            path: the file.
            like: an example to compare with those in the file: anything that could be added, such as `(x[:1], y[:1])`,
                or a dataset's `element_spec`.

        Returns:
            Itself.

        Raises:
            InputError: the file is missing, damaged or of another kind; or the arguments or the examples' structure
                differ.
        """
        self.put(packing.read(path, _KIND))
        if like is not None and self._structure is not None:
            self._check(like, tf.nest.flatten(like))
        return self

    @classmethod
    def from_file(cls, path: str | Path, *, folder: str | Path | None = None) -> "Replay":
        """Creates a memory from the result of `save`, with its arguments.

        Args:
            path: the file.
            folder: as for `Replay`; files there are replaced.

        Raises:
            InputError: the file is missing, damaged, or of another kind.

        Example:
            >>> Replay(3, seed=1).add(np.ones((2, 1)), np.zeros(2)).save("replay.safetensors")
            >>> len(Replay.from_file("replay.safetensors"))
            2
        """
        state = packing.read(path, _KIND)
        made = cls(**state["settings"], folder=folder)
        made.put(state)
        return made

    def _made_sampler(self):
        kind = reservoirs.Balanced if self.balance else reservoirs.Reservoir
        return kind(self._capacity, self.seed)

    def _begin(self, batch, flat: list[np.ndarray]) -> None:
        if self._capacity is None:
            each = sum(part.dtype.itemsize * int(np.prod(part.shape[1:])) for part in flat)
            if each > self._bytes:
                raise InputError(f"One example needs {each} bytes. Received: bytes={self._bytes}. Increase it.")
            self._capacity = self._bytes // each
        if self._sampler is None:
            self._sampler = self._made_sampler()
        self._structure = tf.nest.map_structure(lambda _: 0, batch)
        self._arrays = [self._space(at, part) for at, part in enumerate(flat)]

    def _space(self, at: int, part: np.ndarray, *, replaces: bool = False) -> np.ndarray:
        if part.dtype.kind not in "biuf" and part.dtype.name != "bfloat16":
            raise InputError(f"Examples must be numeric. Received: {part.dtype}.")
        shape = (self._capacity, *part.shape[1:])
        if self._folder is None:
            return np.zeros(shape, part.dtype)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"replay-{at:04d}.npy"
        if path.exists() and not replaces:
            raise InputError(
                f"{path} already exists and may belong to another memory. Remove it, or use another folder."
            )
        return np.lib.format.open_memmap(path, "w+", part.dtype, shape)

    def _check(self, batch, flat) -> None:
        try:
            tf.nest.assert_same_structure(self._structure, tf.nest.map_structure(lambda _: 0, batch))
        except (TypeError, ValueError):
            raise InputError(
                f"Examples must have the structure of earlier ones: {self._structure}. Received: {described(batch)}."
            ) from None
        for part, array in zip(flat, self._arrays, strict=True):
            dtype = part.dtype.as_numpy_dtype if isinstance(part.dtype, tf.DType) else part.dtype
            if tuple(part.shape[1:]) != array.shape[1:] or np.dtype(dtype) != array.dtype:
                raise InputError(
                    f"Examples must have the shape {array.shape[1:]} and dtype {array.dtype} of earlier ones. "
                    f"Received: {tuple(part.shape[1:])} of {np.dtype(dtype)}."
                )

    def _labels(self, batch) -> np.ndarray:
        labels = np.asarray(tf.nest.flatten(batch[1])[0])
        if not self.balance:
            return labels.reshape(len(labels), -1)[:, 0]
        if isinstance(batch[1], (Mapping, tuple, list)) or labels.ndim > 2:
            raise InputError("A balanced memory needs one label per example: class indices, or one column per class.")
        if labels.ndim == 2 and labels.shape[1] > 1:
            return labels.argmax(-1)
        if not np.array_equal(labels, np.round(labels)):
            raise InputError("A balanced memory needs class indices as labels. Received: fractions.")
        return labels.reshape(-1).astype("int64")


def described(batch) -> str:
    return str(tf.nest.map_structure(lambda part: tuple(getattr(part, "shape", ())), batch))
