"""From a recipe with a pretrained language model to the parts of a run."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfgpu.cluster import Cluster
from tfgpu.data.feed import Feed
from tfgpu.errors import InputError
from tfgpu.finetuning import batches, conversations, graph, layouts, presets, samples, templates, tokens
from tfgpu.losses import heads, row_chunks
from tfgpu.losses.chunked_crossentropy import ChunkedCrossentropy
from tfgpu.parallel import model_graph
from tfgpu.parallel.rematerialization import api as rematerialization
from tfgpu.parallel.zero import sharding
from tfgpu.recipes import building, compiling
from tfgpu.recipes.building import Job
from tfgpu.recipes.heads import Head
from tfgpu.recipes.recipe import Recipe
from tfgpu.training.perplexity import Perplexity

_log = logging.getLogger(__name__)
_LENGTH = 1024  # default tokens per row


@dataclass(frozen=True)
class Finetuned:
    """What a run with a pretrained model needs at its end, and its facts.

    Attributes:
        task: the `keras_hub.models.CausalLM`, whose layers are trained.
        tokenizer: its tokenizer.
        parts: the data.
        names: the inputs where sequences are packed; None: they are padded.
        devices: that hold the model.
        facts: for `config.yaml` and the report.
    """

    task: keras.Model
    tokenizer: tokens.Tokenizer
    parts: batches.RunData
    names: Sequence[str] | None
    devices: tuple[str, ...]
    facts: Mapping[str, Any]

    def samples(self, model: keras.Model, what: Recipe) -> list[samples.Sample]:
        """What the model writes for prompts of the test part; every worker calls this."""
        length = int(self.facts["length"])
        settings = {"count": what.samples, "tokens": what.sample_tokens, "length": length}
        return samples.write(model, self.tokenizer, self.parts.test, names=self.names, **settings)

    def save(self, folder: Path) -> None:
        """Saves the preset."""
        presets.save(self.task, folder)


def build(what: Recipe, cluster: Cluster) -> Job:
    """Makes the layout, reads the data, and builds, spreads, loads and compiles the model.

    Args:
        what: a recipe with `model: causal_lm`.
        cluster: the facts of the cluster.

    Raises:
        InputError: something in the recipe, the data or the preset is invalid.
    """
    preset = presets.find(what.preset)
    presets.check_library()
    path = Path(what.data)
    records = conversations.read(path)
    building.join(what, cluster)
    layout = _layout(what, cluster)
    _check_batch(what, layout)
    with layout.scope():
        task = presets.build(preset)
        if what.lora is not None:
            presets.add_lora(task, what.lora)
        names = _names(task, what)
        model = graph.flat(task, names)
        has_head = _has_head(model)
        # Counted before the variables are cut into shards.
        trained = sum(math.prod(variable.shape) for variable in task.trainable_variables)
    tokenizer = presets.tokenizer(task)
    length, limit = _length(what, task)
    template = templates.choose(what.template, preset.folder, tokenizer.has, tokenizer.text_of(tokenizer.start))
    examples = tokens.encode(records, tokenizer, template, path=path, length=length, limit=limit)
    parts = _parts(what, examples, task, path, length, names)
    rows = -(-what.global_batch // _replicas(layout))
    loss = _loss(what, layout, rows * length * task.backbone.vocabulary_size, has_head)
    if what.recompute:
        model = rematerialization.recompute(model, "layers")
    model = layout.spread(model, batch={name: np.ones((what.global_batch, length), np.int32) for name in model.input})
    presets.load(task, preset)
    ends = (Head("tokens", parts.data.info.classes),)
    compiling.check_monitors(what, heads=ends, has_validation=parts.data.validation is not None)
    schedule = compiling.schedule(what, steps_per_epoch=parts.data.info.steps_per_epoch)
    with layout.compile_scope(model):
        _compile(model, what, schedule.learning_rate, loss)
    facts = {
        "preset": str(preset.folder),
        "layout": layout.name,
        "length": length,
        "logits": "by chunks" if isinstance(loss, ChunkedCrossentropy) else "whole",
        "template": template.name,
        "packed": names is not None,
        "filled": round(parts.filled, 4),
        "learned_tokens": parts.learned,
        "trainable_parameters": trained,
    }
    finetuned = Finetuned(task, tokenizer, parts, names, layout.devices, facts)
    callbacks = (*schedule.callbacks, *compiling.callbacks(what))
    return Job(what, cluster, model.distribute_strategy, parts.data, model, ends, callbacks, finetuned)


def _layout(what: Recipe, cluster: Cluster) -> layouts.Layout:
    def strategy_of(name: str):
        return building.strategy_of(what.model_copy(update={"strategy": name}), cluster)

    virtual = tuple(f"CPU:{at}" for at in range(what.virtual_devices)) or None
    return layouts.make(
        what.layout,
        strategy_of=strategy_of,
        devices=what.devices if what.devices is not None else virtual,
        is_multi_worker=cluster.is_multi_worker,
        microbatches=what.microbatches,
    )


def _check_batch(what: Recipe, layout: layouts.Layout) -> None:
    building.check_batch(what, _replicas(layout))
    if what.recompute and layout.name in ("zero3", "pipeline", "tensor"):
        raise InputError(
            f"The layout {layout.name} decides itself what is recomputed. Received: recompute. Remove --recompute."
        )


def _replicas(layout: layouts.Layout) -> int:
    return 1 if layout.strategy is None else layout.strategy.num_replicas_in_sync


def _has_head(model: keras.Model) -> bool:
    """Whether a model's outputs are logits that can be computed by chunks."""
    found = next(call for call in model_graph.calls(model) if any(each is model.output for each in call.outputs))
    given = found.node.arguments
    return heads.makes_logits(found.operation, given.args, given.kwargs)


def _loss(what: Recipe, layout: layouts.Layout, numbers: int, has_head: bool) -> keras.losses.Loss:
    """The loss over the tokens that are learned, computed by chunks where that saves memory.

    Args:
        what: the recipe.
        layout: the layout.
        numbers: how many logits a device's rows have.
        has_head: whether the model's last layer can compute logits by chunks.

    Raises:
        InputError: a chunk is given, but the layout or the model computes all logits at once.
    """
    reduction = "mean_with_sample_weight"
    why = "pipelines and split layers compute" if layout.name in ("pipeline", "tensor") else ""
    why = why or ("" if has_head else "the last layer of this model computes")
    if what.loss_chunk is not None and why:
        raise InputError(
            f"`loss_chunk` needs logits of chunks, and {why} all logits. Received: loss_chunk={what.loss_chunk}, "
            f"layout={layout.name}. Remove --loss-chunk, or use the layout one, mirrored or zero3."
        )
    if what.loss_chunk is not None or (not why and numbers > 3 * row_chunks.NUMBERS):
        return ChunkedCrossentropy(what.loss_chunk, reduction=reduction)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def _names(task: keras.Model, what: Recipe) -> tuple[str, ...] | None:
    """The model's inputs for packed rows; None, with a line in the log, where it does not take them."""
    if not what.packing:
        return None
    found = graph.packed_inputs(task)
    if found is None:
        _log.warning(
            "%s takes no mask that keeps packed sequences apart, so each sequence gets a separate, padded row.",
            type(task).__name__,
        )
    return found


def _length(what: Recipe, task: keras.Model) -> tuple[int, str]:
    """The most tokens of a row, and where the number comes from."""
    positions = presets.positions(task)
    if what.length is None:
        length = min(_LENGTH, positions or _LENGTH)
        return length, "the model's positions" if length == positions else "the default"
    if positions is not None and what.length > positions:
        raise InputError(
            f"`length` must be at most the model's positions. Received: length={what.length}, positions={positions}. "
            f"Use --length {positions}."
        )
    return what.length, "--length"


def _parts(
    what: Recipe, examples: list[tokens.Example], task: keras.Model, path: Path, length: int, names: Any
) -> batches.RunData:
    return batches.make(
        examples,
        path=path,
        vocabulary=task.backbone.vocabulary_size,
        length=length,
        global_batch=what.global_batch,
        names=names,
        validation=what.validation,
        test=what.test,
        seed=what.seed,
        split_seed=what.split_seed,
        feed=Feed(prefetch=what.prefetch),
    )


def _rank(variable: keras.Variable) -> int:
    """The rank of a variable; for a flat piece, the rank of the whole one."""
    return len(sharding.full_shape(variable) if sharding.is_fully_sharded(variable) else variable.shape)


def _compile(model: keras.Model, what: Recipe, learning_rate: Any, loss: keras.losses.Loss) -> None:
    """Compiles; all metrics count tokens."""
    optimizer = compiling.optimizer(what, learning_rate=learning_rate)
    if what.decay == "kernels":
        optimizer.exclude_from_weight_decay([v for v in model.trainable_variables if _rank(v) < 2])
    model.compile(
        optimizer=optimizer,
        loss=loss,
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy"), Perplexity()],
        jit_compile=what.jit,
    )
