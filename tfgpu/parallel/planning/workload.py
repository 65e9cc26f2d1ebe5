"""Describes what a model needs of the devices, block by block, for the planner.

A `Transformer` is described by its sizes, so a model that fits on no machine at hand can be planned. For a Keras model,
`traced.py` reads the same facts from its graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tfgpu.errors import InputError, unknown, whole_number
from tfgpu.parallel import balance

PRECISIONS = {  # Bytes of a variable, and of an activation.
    "float32": (4, 4),
    "tf32": (4, 4),
    "mixed_float16": (4, 2),
    "mixed_bfloat16": (4, 2),
    "bfloat16": (2, 2),
    "float16": (2, 2),
}
_MAX_LAYERS = 10_000  # each is counted by itself
_LOSS_COPIES = 3  # Logits, what the loss keeps for its gradient, and the gradient.


@dataclass(frozen=True)
class Block:
    """A part of a model that is in one stage. "Split" is what the tensor axis divides, "whole" what each device has.

    Attributes:
        name: of its first layer.
        split: trainable parameters that are split.
        whole: trainable parameters that are whole.
        frozen: parameters that no optimizer changes, whole.
        frozen_split: the same, split.
        experts: those of `split` that are experts', which the expert axis divides.
        frozen_experts: those of `frozen_split`.
        kept_split: bytes kept for the backward pass for each example, split.
        kept_whole: the same, whole.
        passing: bytes for each example that the block needs beside these while it runs, split.
        casts: bytes kept for each pass, whatever its rows, above all 16-bit copies of kernels; includes `casts_whole`.
        casts_whole: those that are not split.
        casts_experts: those of experts.
        takes: bytes of its input for each example.
        flops: of the forward pass for each example; includes `flops_whole`.
        flops_whole: those that are not split.
        reduces: bytes that the tensor axis sums in a forward pass for each example, and again in a backward pass.
        spreads: bytes of each example that go to every other device along the expert axis, in each pass.
        exchanges: bytes of each example that are dealt to all devices along it, in each pass.
    """

    name: str
    split: int = 0
    whole: int = 0
    frozen: int = 0
    frozen_split: int = 0
    experts: int = 0
    frozen_experts: int = 0
    kept_split: float = 0
    kept_whole: float = 0
    passing: float = 0
    casts: float = 0
    casts_whole: float = 0
    casts_experts: float = 0
    takes: float = 0
    flops: float = 0
    flops_whole: float = 0
    reduces: float = 0
    spreads: float = 0
    exchanges: float = 0

    def kept(self, rows: float, tensor: int, expert: int = 1) -> float:
        """Bytes that a forward pass over so many rows keeps for its gradient."""
        casts = (self.casts - self.casts_whole) / tensor + self.casts_whole
        casts -= (1 - 1 / expert) * self.casts_experts
        return rows * (self.kept_split / tensor + self.kept_whole) + casts

    def operations(self, tensor: int) -> float:
        """Operations of the forward pass for each example, on the device that has the most."""
        return (self.flops - self.flops_whole) / tensor + self.flops_whole

    def parameters(self, tensor: int, expert: int = 1) -> float:
        elsewhere = (1 - 1 / expert) * (self.experts + self.frozen_experts)
        return (self.split + self.frozen_split) / tensor + self.whole + self.frozen - elsewhere

    def trainable(self, tensor: int, expert: int = 1) -> float:
        return self.split / tensor + self.whole - (1 - 1 / expert) * self.experts


@dataclass(frozen=True)
class Stage:
    """The blocks on one device of the pipeline, in segments that are recomputed one at a time."""

    segments: tuple[tuple[Block, ...], ...]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for segment in self.segments for block in segment)

    @cached_property
    def sum(self) -> Block:
        """All blocks as one."""
        return _together(self.blocks)

    @cached_property
    def kinds(self) -> tuple[Block, ...]:
        """Each distinct segment as one block."""
        return tuple({_together(segment, name=""): None for segment in self.segments})

    @cached_property
    def signature(self) -> tuple:
        """Equal for two stages that cost the same."""
        return _together(self.blocks, name=""), self.kinds, len(self.segments)

    def inputs(self, rows: float) -> float:
        """Bytes kept where segments are recomputed: the inputs of each."""
        return rows * sum(segment[0].takes for segment in self.segments)

    def largest_segment(self, rows: float, tensor: int, expert: int = 1) -> float:
        return max(kind.kept(rows, tensor, expert) for kind in self.kinds)

    def largest_passing(self, rows: float, tensor: int) -> float:
        """Bytes that the block which needs the most has only while it runs; there is one at a time."""
        return rows / tensor * max(block.passing for block in self.blocks)

    def largest_trainable(self, tensor: int) -> float:
        return max(kind.trainable(tensor) for kind in self.kinds)

    def largest_parameters(self, tensor: int) -> float:
        return max(kind.parameters(tensor) for kind in self.kinds)


_SUMMED = (
    *("split", "whole", "frozen", "frozen_split", "experts", "frozen_experts", "kept_split", "kept_whole"),
    *("casts", "casts_whole", "casts_experts", "flops", "flops_whole", "reduces", "spreads", "exchanges"),
)


def _together(blocks: Sequence[Block], name: str | None = None) -> Block:
    sums = {key: sum(getattr(block, key) for block in blocks) for key in _SUMMED}
    return Block(blocks[0].name if name is None else name, takes=blocks[0].takes, **sums)


@dataclass(frozen=True)
class Workload:
    """A model as a sequence of blocks.

    Attributes:
        name: the model's.
        blocks: in the order in which they run.
        variable_bytes: of one parameter.
        precision: that it computes in.
        outputs: bytes that it returns for each example, which the loss reads.
        heads: the number that the size of the tensor axis must divide; 1 where the model cannot be split along it.
        experts: the number that the size of the expert axis must divide; 1 where the model has none.
        segments: where runs of blocks begin that are recomputed together.
        most_stages: the largest number of stages.
        loss_splits: whether the tensor axis splits what the loss reads.
        chunk: bytes of a device's outputs that are there at a time, where the loss computes them by chunks; None: all.
        chunk_sums: bytes of the gradient of the trained layer that computes them, which grows chunk by chunk.
        chunked_from: the loss goes by chunks only where a device's outputs take more bytes than this.
        cutter: returns the model as split into a number of shards, or None; used where a split is not a division.
    """

    name: str
    blocks: tuple[Block, ...]
    variable_bytes: int = 4
    precision: str = "float32"
    outputs: float = 0
    heads: int = 1
    experts: int = 1
    segments: tuple[int, ...] = (0,)
    most_stages: int = 1
    loss_splits: bool = True
    chunk: float | None = None
    chunk_sums: float = 0
    chunked_from: float = 0
    cutter: "Callable[[int], Workload | None] | None" = field(default=None, repr=False, compare=False)

    def along(self, tensor: int) -> "Workload | None":
        """The model for a tensor axis of this size; None where it cannot be split into so many shards."""
        if self.cutter is not None and tensor > 1:
            cut = self.cutter(tensor)
            return cut and replace(cut, precision=self.precision)
        return None if self.heads % tensor else self

    @cached_property
    def parameters(self) -> int:
        return round(sum(block.parameters(1) for block in self.blocks))

    @cached_property
    def flops(self) -> float:
        return sum(block.flops for block in self.blocks)

    def loss(self, rows: float, *, by_chunks: bool) -> float:
        """Bytes that the loss of so many examples needs at its peak.

        Args:
            rows: examples.
            by_chunks: whether the layout can compute the outputs by chunks.
        """
        outputs = self.outputs * rows
        if by_chunks and self.chunk is not None and outputs > self.chunked_from:
            return _LOSS_COPIES * min(outputs, self.chunk) + self.chunk_sums
        return _LOSS_COPIES * outputs

    def stages(self, count: int) -> tuple[Stage, ...]:
        """The blocks in so many stages, where the most expensive stage is as cheap as possible."""
        flops = [block.flops for block in self.blocks]
        begins = [0, *balance.cut(flops, count), len(self.blocks)] if count > 1 else [0, len(self.blocks)]
        return tuple(self._stage(begin, end) for begin, end in zip(begins, begins[1:], strict=False))

    def _stage(self, begin: int, end: int) -> Stage:
        inner = [begin, *(at for at in self.segments if begin < at < end), end]
        return Stage(tuple(self.blocks[a:b] for a, b in zip(inner, inner[1:], strict=False)))


@dataclass(frozen=True)
class Transformer:
    """The sizes of a causal language model as `tfgpu.models.transformer` builds it.

    A block keeps for its backward pass what Keras's layers keep: per token, `2 (c W + 8 W + 12)` bytes for the
    normalizations, `4 c W` for queries, keys, values and the attention's result, `4 c F` for the activation, and for
    each head and position 9 (float32) or 7 bytes for the attention weights, with W units, F units in the MLP and c
    bytes per number. Megatron-LM keeps less, because its activations are fused.

    Args:
        layers: number of blocks.
        hidden: units of each position.
        heads: attention heads; divides `hidden`.
        sequence: tokens in an example.
        vocabulary: number of different tokens.
        mlp: units of the hidden layer of a block's MLP; None is 4 times `hidden`.
        dropout: whether there is dropout, which keeps masks.
        name: used in messages.

    Raises:
        InputError: a size is not a whole number from 1, or the heads do not divide the units.

    Example:
        >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)
        >>> round(gpt3.workload().parameters / 1e9)
        175

    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021 (operations);
    Korthikanti et al., Reducing activation recomputation in large transformer models, 2022 (what the tensor axis cuts).
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    mlp: int | None = None
    dropout: bool = False
    name: str = "transformer"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "mlp"):
            value = getattr(self, name)
            if not (name == "mlp" and value is None):
                whole_number(name, value)
        if self.layers > _MAX_LAYERS:
            raise InputError(f"`layers` must be at most {_MAX_LAYERS:,}. Received: {self.layers:,}.")
        if self.hidden % self.heads:
            nearest = max(1, round(self.hidden / self.heads)) * self.heads
            raise InputError(
                f"`hidden` must divide evenly among the heads. Received: hidden={self.hidden}, heads={self.heads}. "
                f"Use hidden={nearest}."
            )

    def workload(self, precision: str = "mixed_bfloat16") -> Workload:
        """The transformer's blocks in a precision.

        Raises:
            InputError: the precision is unknown.
        """
        if precision not in PRECISIONS:
            raise unknown("precision", precision, PRECISIONS)
        variable, number = PRECISIONS[precision]
        width, length = self.hidden, self.sequence
        position = Block(
            "embedding",
            split=self.vocabulary * width,
            whole=length * width,
            kept_whole=length * (4 + (width if self.dropout else 0)),
            takes=4 * length,
        )
        head = Block(
            "logits",
            split=self.vocabulary * (width + 1) * (4 // variable),  # in float32, whatever the precision
            whole=2 * width,
            kept_whole=length * (12 * width + 12),
            takes=number * length * width,
            flops=2 * length * width * self.vocabulary,
            reduces=number * length * width,
        )
        blocks = (position, *(self._block(at, variable, number) for at in range(1, self.layers + 1)), head)
        return Workload(
            self.name,
            blocks,
            variable,
            precision,
            outputs=4 * length * self.vocabulary,
            heads=self.heads,
            segments=tuple(range(len(blocks))),
            most_stages=len(blocks),
        )

    def _block(self, at: int, variable: int, number: int) -> Block:
        width, length = self.hidden, self.sequence
        inner = self.mlp or 4 * width
        kernels = 4 * width * width + 2 * width * inner
        norms = 2 * (number * width + 8 * width + 12)
        if self.dropout:
            weights = 2 * number + 1
        else:
            weights = 5 + (number if number < 4 else 0)
        return Block(
            f"block{at}",
            split=kernels + 3 * width + inner,
            whole=6 * width,
            kept_split=length * (number * 4 * (width + inner) + weights * self.heads * length)
            + (length * inner if self.dropout else 0),
            kept_whole=length * (norms + (2 * width if self.dropout else 0)),
            casts=number * kernels if number < variable else 0,
            takes=number * length * width,
            flops=2 * length * kernels + 4 * length * length * width,
            reduces=2 * number * length * width,
        )


def in_segments(kept: Sequence[float]) -> tuple[int, ...]:
    """Where segments begin that are recomputed one at a time; their number is about the square root of the blocks'.

    Source: Chen et al., Training deep nets with sublinear memory cost, 2016.

    Example:
        >>> in_segments([1, 1, 1, 1, 1, 1, 1, 1, 1])
        (0, 3, 6)
    """
    parts = max(1, round(len(kept) ** 0.5))
    return (0, *balance.cut(kept, parts))
