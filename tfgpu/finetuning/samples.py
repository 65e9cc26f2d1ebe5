"""Texts that a model continues, for the report: greedy, without a cache, in whatever layout the model is trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np

from tfgpu.data.text.sequences import IGNORED
from tfgpu.finetuning import graph
from tfgpu.finetuning.tokens import Example, Tokenizer

_LONGEST_PROMPT = 64  # tokens of a text without a prompt


@dataclass(frozen=True)
class Sample:
    """A prompt of the test part, what followed it there, and what the model wrote."""

    prompt: str
    expected: str
    written: str


def write(
    model: keras.Model,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    *,
    names: Sequence[str] | None,
    count: int,
    tokens: int,
    length: int,
) -> list[Sample]:
    """Lets a model continue prompts; on several workers each calls this.

    Args:
        model: of `graph.flat`.
        tokenizer: the model's.
        examples: of the test part.
        names: the model's inputs, as for `graph.flat`.
        count: the most samples.
        tokens: the most tokens to write.
        length: the most tokens of a row.
    """
    prompts, rest = [], []
    for example in examples[:count]:
        given = example.prompt if example.prompt > 1 else min(len(example.ids) // 2, _LONGEST_PROMPT) or 1
        given = min(given, max(1, length - tokens))
        prompts.append([int(token) for token in example.ids[:given]])
        rest.append(_following(example, given))
    if not prompts:
        return []
    tokens, stops = min(tokens, length - 1), tokenizer.stops()
    rows = np.full((len(prompts), min(length, max(map(len, prompts)) + tokens)), tokenizer.pad, np.int32)
    ends = np.array([len(prompt) for prompt in prompts])
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    is_over, written = np.zeros(len(prompts), bool), [[] for _ in prompts]
    for _ in range(tokens):  # greedy: at each step the whole rows, of one shape, pass the model
        logits = model.predict(_inputs(rows, ends, names), batch_size=len(prompts), verbose=0)
        for at in np.flatnonzero(~is_over):
            token = int(np.argmax(logits[at, ends[at] - 1]))
            is_over[at] = token in stops
            if not is_over[at]:
                written[at].append(token)
                rows[at, ends[at]] = token
                ends[at] += 1
                is_over[at] = ends[at] == rows.shape[1]
        if is_over.all():
            break
    return [
        Sample(*(tokenizer.decode(_text(part, tokenizer)).strip() for part in parts))
        for parts in zip(prompts, rest, written, strict=True)
    ]


def _following(example: Example, given: int) -> list[int]:
    """What follows in the data: the answer, or all that is left if the prompt was cut within."""
    whole = [*map(int, example.ids[given:]), int(example.targets[-1])]
    others = np.flatnonzero(example.targets[given - 1 :] == IGNORED)
    return whole[: others[0]] if len(others) and others[0] > 0 else whole


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    left_out = {tokenizer.start, *tokenizer.stops()}  # asked once: it reads the whole vocabulary
    return [token for token in tokens if token not in left_out]


def _inputs(rows: np.ndarray, ends: np.ndarray, names: Sequence[str] | None) -> dict[str, np.ndarray]:
    places = np.arange(rows.shape[1], dtype=np.int32)[None, :]
    is_there = (places < ends[:, None]).astype(np.int32)
    if names is None:
        return {graph.TOKENS: rows, graph.PADDING: is_there}
    every = {graph.TOKENS: rows, graph.SEGMENTS: is_there, graph.POSITIONS: places * is_there}
    return {name: every[name] for name in names}
