"""From sequences to a run's batches: splits, then packing or padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tfgpu.data import splits
from tfgpu.data.batches import Data, Info
from tfgpu.data.feed import Feed
from tfgpu.data.text import sequences
from tfgpu.errors import InputError
from tfgpu.finetuning.tokens import Example


@dataclass(frozen=True)
class RunData:
    """A run's data.

    Attributes:
        data: the batches.
        test: the sequences of the test part.
        filled: the share of positions in training rows that hold a token.
        learned: the number of tokens that an epoch learns.
    """

    data: Data
    test: tuple[Example, ...]
    filled: float
    learned: int


def make(
    examples: Sequence[Example],
    *,
    path: Path,
    vocabulary: int,
    length: int,
    global_batch: int,
    names: Sequence[str] | None,
    validation: float,
    test: float,
    seed: int = 0,
    split_seed: int = 0,
    feed: Feed | None = None,
) -> RunData:
    """Splits and batches sequences.

    Args:
        examples: of `tokens.encode`.
        path: their file.
        vocabulary: the model's number of tokens.
        length: the most tokens of a row.
        global_batch: rows in a batch.
        names: what x has where sequences are packed (see `sequences.pack`); None: they are padded.
        validation, test: shares of the sequences.
        seed, split_seed: of the order of an epoch, and of the split.
        feed: how batches are prepared ahead.

    Raises:
        InputError: too few sequences for the splits.
    """
    groups = splits.same(example.ids.tobytes() for example in examples)
    try:
        index = splits.split(
            np.zeros(len(examples), int), validation=validation, test=test, seed=split_seed, groups=groups
        )
    except InputError as error:
        raise InputError(f"{path} has {len(examples)} sequence(s). {error}") from None
    chosen = {part: [examples[at] for at in index[part]] for part in splits.PARTS}
    made = {}
    for part, found in ((part, found) for part, found in chosen.items() if found):
        settings = {"global_batch": global_batch, "seed": seed, "shuffle": part == "train", "feed": feed}
        pair = [example.ids for example in found], [example.targets for example in found]
        if names is None:
            made[part] = sequences.bucket(*pair, **settings)
        else:
            made[part] = sequences.pack(*pair, length=length, names=names, **settings)
    train = made["train"]
    facts = {f"{part}_examples": len(found) for part, found in chosen.items()}
    facts |= {"epoch_examples": train.rows, "steps_per_epoch": train.steps_per_epoch, "global_batch": global_batch}
    facts |= {"skipped": 0, "augment": (), "labels": "tokens", "label_smoothing": 0.0, "cache": "memory"}
    info = Info(path.name, (length,), classes=vocabulary, class_names=(), **facts)
    others = (made[part].train if part in made else None for part in ("validation", "test"))
    learned = sum(int((example.targets != sequences.IGNORED).sum()) for example in chosen["train"])
    return RunData(Data(train.train, *others, info, train.counter), tuple(chosen["test"]), train.filled, learned)
