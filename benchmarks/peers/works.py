"""The work that every peer does: four models, their batches and their first weights, made by NumPy for all of them.

Adam, cross-entropy of logits against random labels, the mean loss and the accuracy counted. The weights have
Keras's names and shapes; torch_models.py turns them round.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

# Adam adds it to the root of the second moment: Keras before the correction of the bias, PyTorch after it. So small
# that it makes no difference which.
EPSILON = 1e-12
NORM_EPSILON = 1e-5
WIDTH, HEADS, DEPTH = 64, 4, 2  # of the transformer
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # of ResNet-18: channels, first stride; two blocks each


@dataclass(frozen=True)
class Work:
    """One model and its input.

    Attributes:
        name: of the model.
        shape: of one example.
        batch: rows of a batch over all replicas; an even number.
        steps: of one round: some tenths of a second on two CPU cores.
        classes: number of labels.
        tokens: whole numbers below this for input, with a label for each; 0 for floats.
        batches: different batches, which are repeated.
        learning_rate: of Adam; small enough that the order of a sum does not show in the first steps' losses, nor
            that Keras on TensorFlow squares the gradients of an embedding's row before it adds them up.
    """

    name: str
    shape: tuple[int, ...]
    batch: int
    steps: int
    classes: int = 10
    tokens: int = 0
    batches: int = 8
    learning_rate: float = 1e-3

    def tiny(self) -> "Work":
        """The same model on next to no data, to see that everything runs."""
        return replace(self, batch=8, steps=2, batches=2)

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs (batches, batch, *shape), float32 or int32, and labels, int32."""
        random = np.random.default_rng(0)
        size = (self.batches, self.batch, *self.shape)
        labels = random.integers(0, self.classes, size if self.tokens else size[:2]).astype("int32")
        if not self.tokens:
            return random.normal(size=size).astype("float32"), labels
        # Each batch has every token: Keras on TensorFlow updates only the rows of an embedding that a batch uses.
        each = np.arange(np.prod(size[1:]), dtype="int32") % self.tokens
        return random.permuted(np.tile(each, (self.batches, 1)), axis=1).reshape(size), labels

    def weights(self) -> dict[str, np.ndarray]:
        """Returns the first weights by Keras path: He's normal for what multiplies, else 0, or 1 for scales."""
        random, made = np.random.default_rng(1), {}
        for path, shape in SHAPES[self.name](self):
            kind = path.rsplit("/", 1)[1]
            if kind in ("kernel", "embeddings"):
                fan_in = np.prod(shape[:-1]) if kind == "kernel" else shape[-1]
                made[path] = random.normal(0, np.sqrt(2 / fan_in), shape).astype("float32")
            else:
                made[path] = np.full(shape, kind in ("gamma", "moving_variance"), "float32")
        return made


def _dense(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}/kernel", shape
    yield f"{name}/bias", shape[-1:]


def _mlp(work: Work):
    yield from _dense("hidden", *work.shape, 64)
    yield from _dense("logits", 64, work.classes)


def _cnn(work: Work):
    yield from _dense("conv1", 3, 3, work.shape[-1], 32)
    yield from _dense("conv2", 3, 3, 32, 32)
    side = ((work.shape[0] - 2) // 2 - 2) // 2
    yield from _dense("logits", side * side * 32, work.classes)


def _convolution(name: str, *shape: int):
    """A convolution without bias and its normalization."""
    yield f"{name}/kernel", shape
    for part in ("gamma", "beta", "moving_mean", "moving_variance"):
        yield f"{name}_norm/{part}", shape[-1:]


def resnet_blocks() -> Iterator[tuple[str, int, int, int]]:
    """Yields each block's name, channels in, channels out and stride."""
    before = STAGES[0][0]
    for stage, (channels, stride) in enumerate(STAGES, start=1):
        for block in (1, 2):
            yield f"stage{stage}_block{block}", before, channels, stride if block == 1 else 1
            before = channels


def _resnet18(work: Work):
    yield from _convolution("stem", 3, 3, work.shape[-1], STAGES[0][0])
    for name, before, channels, stride in resnet_blocks():
        yield from _convolution(f"{name}_conv1", 3, 3, before, channels)
        yield from _convolution(f"{name}_conv2", 3, 3, channels, channels)
        if stride > 1:
            yield from _convolution(f"{name}_shortcut", 1, 1, before, channels)
    yield from _dense("logits", STAGES[-1][0], work.classes)


def _norm(name: str):
    yield f"{name}/gamma", (WIDTH,)
    yield f"{name}/beta", (WIDTH,)


def _transformer(work: Work):
    each = WIDTH // HEADS
    yield "embedding/embeddings", (work.tokens, WIDTH)
    for i in range(1, DEPTH + 1):
        yield from _norm(f"block{i}_norm1")
        for part in ("query", "key", "value"):
            yield f"block{i}_attention/{part}/kernel", (WIDTH, HEADS, each)
            yield f"block{i}_attention/{part}/bias", (HEADS, each)
        yield f"block{i}_attention/attention_output/kernel", (HEADS, each, WIDTH)
        yield f"block{i}_attention/attention_output/bias", (WIDTH,)
        yield from _norm(f"block{i}_norm2")
        yield from _dense(f"block{i}_wide", WIDTH, 4 * WIDTH)
        yield from _dense(f"block{i}_narrow", 4 * WIDTH, WIDTH)
    yield from _norm("norm")
    yield from _dense("logits", WIDTH, work.classes)


SHAPES = {"mlp": _mlp, "cnn": _cnn, "resnet18": _resnet18, "transformer": _transformer}
WORKS = {
    work.name: work
    for work in (
        Work("mlp", (64,), batch=64, steps=2048),
        Work("cnn", (28, 28, 1), batch=64, steps=64),
        Work("resnet18", (32, 32, 3), batch=32, steps=2, learning_rate=1e-4),
        Work("transformer", (32,), batch=32, steps=16, classes=64, tokens=64, learning_rate=1e-4),
    )
}
