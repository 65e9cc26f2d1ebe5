"""Pretrained decoders as the planner sees them: all weights trained, or LoRA beside frozen ones. No TensorFlow.

from tfgpu.parallel.planning import planner, pretrained
work = pretrained.known("llama3-8b").workload(2048, lora=16, weights="int4")
best = planner.plan(work, 1, batch=8, memory="24GB")[0]
"""

from dataclasses import dataclass
from types import MappingProxyType

from tfgpu.errors import InputError, unknown, whole_number
from tfgpu.parallel.planning.workload import PRECISIONS, Block, Workload

_SCALES = 4 / 128
"""Bytes for each quantized weight: a float32 scale for each 128, Keras's default for int4; int8 has fewer."""
WEIGHTS = MappingProxyType({"float32": 4.0, "bfloat16": 2.0, "int8": 1 + _SCALES, "int4": 0.5 + _SCALES})
"""Bytes of a frozen weight."""
# As in `losses.row_chunks`, `recipes.finetune` and `attention.blockwise`, which start TensorFlow.
NUMBERS, LEAST_ROWS, WHOLE, BLOCK = 2**24, 256, 3 * 2**24, 256
# Of attention by blocks: copies of a block's scores, sums of gradients, and what is kept, the last two for each number
# of the queries; of the loss by chunks: sums of the head's gradient. Fitted to measured steps (docs/measured).
_COPIES, _SUMS, _KEPT, _HEADS = 2, 2, 19, 3


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder with grouped queries, a gated MLP, RMS norms and rotary positions (Llama, Gemma, Mixtral).

    Attributes:
        name: such as `"llama3-8b"`.
        layers: number of blocks.
        hidden: units of each position.
        heads: attention heads of queries.
        groups: heads of keys and values.
        head: units of a head.
        mlp: units of the gate; of an expert's, if there are experts.
        vocabulary: number of tokens.
        is_tied: whether the table of tokens makes the logits too.
        source: where the sizes are published.
        experts: the MLPs of a block, of which a router chooses for each token; 1 without experts.
        norms_heads: whether queries and keys are normalized, by weights of their own.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    mlp: int
    vocabulary: int
    is_tied: bool
    source: str = ""
    experts: int = 1
    norms_heads: bool = False

    @property
    def parameters(self) -> int:
        """The number of weights.

        Example:
            >>> known("llama3-8b").parameters
            8030261248
        """
        tables = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        return tables + self.layers * (self._kernels + self._whole) + self.hidden

    @property
    def _kernels(self) -> int:
        """The numbers in a block's kernels that the tensor axis splits."""
        width = self.hidden
        return width * (2 * self.heads * self.head + 2 * self.groups * self.head) + self.experts * 3 * width * self.mlp

    @property
    def _of_experts(self) -> int:
        """Those of experts."""
        return self.experts * 3 * self.hidden * self.mlp if self.experts > 1 else 0

    @property
    def _whole(self) -> int:
        """The numbers in a block's norms and router."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return 2 * self.hidden + router + (2 * self.head if self.norms_heads else 0)

    def workload(
        self,
        sequence: int,
        precision: str = "mixed_bfloat16",
        *,
        lora: int | None = None,
        weights: str = "float32",
        flash_attention: bool = False,
        loss_chunk: int | None = None,
    ) -> Workload:
        """The model's blocks for `planner.plan`.

        What a block keeps for its backward pass is counted as for training all weights, which LoRA needs less of. Each
        expert runs on every token, as KerasHub's mixtures do; the router then weighs the results.

        Args:
            sequence: tokens of an example.
            precision: that it computes in.
            lora: the rank of LoRA for queries and values; None trains all weights.
            weights: of frozen weights, one of `WEIGHTS`. Weights that are trained are as the precision has them.
            flash_attention: whether attention goes by blocks of queries.
            loss_chunk: tokens whose logits are there at a time; None: as `tfgpu train finetune-text` chooses.

        Raises:
            InputError: an unknown precision or kind of weights, frozen weights without LoRA, or a number below 1.

        Example:
            >>> work = known("gemma-2b").workload(1024, lora=8)
            >>> round(sum(block.trainable(1) for block in work.blocks))
            2727936
        """
        for name, value in (("sequence", sequence), ("lora", lora), ("loss_chunk", loss_chunk)):
            if value is not None or name == "sequence":
                whole_number(name, value)
        if precision not in PRECISIONS:
            raise unknown("precision", precision, PRECISIONS)
        if weights not in WEIGHTS:
            raise unknown("kind of weights", weights, WEIGHTS)
        if lora is None and weights != "float32":
            raise InputError(f"Only frozen weights are kept as {weights}. Received: lora=None. Add a rank, such as 8.")
        variable, number = PRECISIONS[precision]
        each = 1.0 if lora is None else WEIGHTS[weights] / variable  # of a frozen weight, in bytes of a variable
        table = self.vocabulary * self.hidden
        first = self._part("embedding", table, 0, each, lora, takes=4 * sequence, kept_whole=4 * sequence)
        last = self._part(
            "logits",
            0 if self.is_tied else table,
            self.hidden,
            each,
            lora,
            takes=number * sequence * self.hidden,
            kept_whole=sequence * self.hidden * (number + 8),
            flops=2 * sequence * table,
            reduces=number * sequence * self.hidden,
        )
        sizes = sequence, variable, number, each, lora, flash_attention
        blocks = (first, *(self._block(at, *sizes) for at in range(self.layers)), last)
        return Workload(
            self.name,
            blocks,
            variable,
            precision,
            outputs=4 * sequence * self.vocabulary,
            heads=self.groups if self.groups > 1 else self.heads,
            experts=self.experts,
            segments=tuple(range(len(blocks))),
            most_stages=len(blocks),
            chunk=4 * self.vocabulary * (loss_chunk or max(LEAST_ROWS, NUMBERS // self.vocabulary)),
            chunk_sums=0 if lora else 4 * _HEADS * table,
            chunked_from=0 if loss_chunk else 4 * WHOLE,
        )

    def _block(
        self, at: int, length: int, variable: int, number: int, each: float, lora: int | None, flash: bool
    ) -> Block:
        width, queries, keys = self.hidden, self.heads * self.head, self.groups * self.head
        scores = 8 + (number if number < 4 else 0)  # before and after the float32 softmax, and cast
        attention = number * _KEPT * queries if flash else scores * self.heads * length
        in_block = _COPIES * 4 * min(length, BLOCK) * self.heads
        kept = number * (4 * queries + 2 * keys + self.experts * 4 * self.mlp)
        results = self.experts * width if self.experts > 1 else 0  # of all experts, before the router weighs them
        routed = 2 * results + 8 * self.experts if results else 0
        experts = self._of_experts
        return self._part(
            f"block{at + 1}",
            self._kernels,
            self._whole,
            each,
            lora,
            experts=experts,
            adapters=0 if lora is None else lora * (width * (self.heads + self.groups) + 2 * self.head),
            kept_split=length * (kept + number * routed + attention),
            passing=length * (in_block + _SUMS * 4 * queries) if flash else 0,
            kept_whole=length * (3 * number * width + 16 * width),
            casts=number * self._kernels if number < variable or each < 1 else 0,
            casts_experts=number * experts if number < variable or each < 1 else 0,
            takes=number * length * width,
            flops=2 * length * self._kernels + 4 * length * length * queries,
            reduces=2 * number * length * width,
            spreads=number * length * width if experts else 0,
            exchanges=number * length * results,
        )

    def _part(
        self,
        name: str,
        split: int,
        whole: int,
        each: float,
        lora: int | None,
        *,
        experts=0,
        adapters=0,
        **others: float,
    ) -> Block:
        if lora is None:
            return Block(name, split=split, whole=whole, experts=experts, **others)
        frozen = {"frozen": whole, "frozen_split": each * split, "frozen_experts": each * experts}
        return Block(name, whole=adapters, **frozen, **others)


_HUB = "https://huggingface.co/{}/blob/main/config.json"
_LLAMA = _HUB.format("meta-llama/Meta-Llama-3-{}")
_MIXTRAL, _QWEN = _HUB.format("mistralai/Mixtral-8x7B-v0.1"), _HUB.format("Qwen/Qwen3-30B-A3B")
DECODERS = MappingProxyType(
    {
        each.name: each
        for each in (
            Decoder("gemma-2b", 18, 2048, 8, 1, 256, 16384, 256_000, True, _HUB.format("google/gemma-2b")),
            Decoder("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128_256, False, _LLAMA.format("8B")),
            Decoder("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128_256, False, _LLAMA.format("70B")),
            Decoder("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32_000, False, _MIXTRAL, 8),
            Decoder("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151_936, False, _QWEN, 128, norms_heads=True),
        )
    }
)
"""Published sizes."""


def known(name: str) -> Decoder:
    """A decoder by name.

    Raises:
        InputError: the name is not in `DECODERS`.
    """
    if name not in DECODERS:
        raise unknown("pretrained model", name, DECODERS)
    return DECODERS[name]
