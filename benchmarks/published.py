"""Published layouts of large language models, as the planner sees them: a table in Markdown.

    python -m benchmarks.published

Sources: Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021, tables 1 and 2; Smith
et al., Using DeepSpeed and Megatron to train Megatron-Turing NLG 530B, 2022, section 2.4. All with sequences of 2048
tokens, a vocabulary of 51,200, Adam, 16-bit activations that are recomputed, and A100s of 80 GB, eight a host.
"""

from dataclasses import dataclass

from tfgpu.parallel.planning import planner
from tfgpu.parallel.planning.layouts import Layout
from tfgpu.parallel.planning.workload import Transformer

_LENGTH, _VOCABULARY = 2048, 51200


@dataclass(frozen=True)
class Published:
    """A published training.

    Attributes:
        name: in billions of parameters.
        layers: of the model; `hidden` and `heads` likewise.
        gpus: how many; `tensor` and `pipeline` of them hold a copy of the model.
        batch: examples of a step.
        teraflops: operations a second that each GPU reached, in units of 10 to the 12th.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    gpus: int
    tensor: int
    pipeline: int
    batch: int
    teraflops: float


ROWS = (
    Published("1.7", 24, 2304, 24, 32, 1, 1, 512, 137),
    Published("3.6", 30, 3072, 32, 64, 2, 1, 512, 138),
    Published("7.5", 36, 4096, 32, 128, 4, 1, 512, 142),
    Published("18.4", 40, 6144, 48, 256, 8, 1, 1024, 135),
    Published("39.1", 48, 8192, 64, 512, 8, 2, 1536, 138),
    Published("76.1", 60, 10240, 80, 1024, 8, 4, 1792, 140),
    Published("145.6", 80, 12288, 96, 1536, 8, 8, 2304, 148),
    Published("310.1", 96, 16384, 128, 1920, 8, 16, 2160, 155),
    Published("529.6", 105, 20480, 128, 2520, 8, 35, 2520, 163),
    Published("1008.0", 128, 25600, 160, 3072, 8, 64, 3072, 163),
    Published("GPT-3, 174.6", 96, 12288, 96, 384, 8, 12, 1536, 153),
    Published("GPT-3, 174.6", 96, 12288, 96, 768, 8, 12, 1536, 149),
    Published("GPT-3, 174.6", 96, 12288, 96, 1536, 8, 12, 1536, 141),
    Published("Megatron-Turing, 530", 105, 20480, 128, 2240, 8, 35, 1920, 126),
    Published("Megatron-Turing, 530", 105, 20480, 128, 3360, 8, 35, 1920, 113),
)


def sizes(row: Published) -> Transformer:
    return Transformer(row.layers, row.hidden, row.heads, _LENGTH, _VOCABULARY, name=row.name)


def layout(row: Published, loss: str = "microbatch") -> Layout:
    """The published layout, in micro-batches of one example."""
    data = row.gpus // row.tensor // row.pipeline
    rows = row.batch // data
    parts = {"microbatches": rows} if row.pipeline > 1 else {"accumulate": rows}
    return Layout(data, row.pipeline, row.tensor, recompute=True, loss=loss, **parts)


def predicted(row: Published) -> planner.Plan:
    return planner.predict(sizes(row), layout(row), batch=row.batch)


def teraflops(row: Published, step_time_s: float) -> float:
    """Operations a second and GPU as the papers count them: with the recomputation.

    Source: Narayanan et al., 2021, equation 3.
    """
    width, length = row.hidden, _LENGTH
    shape = 1 + length / (6 * width) + _VOCABULARY / (16 * row.layers * width)
    return 96 * row.batch * length * row.layers * width**2 * shape / step_time_s / row.gpus / 1e12


def main() -> None:
    """Prints the table."""
    headings = ["model, 10⁹", "GPUs", "data", "pipeline", "tensor", "batch", "GB a GPU", "fits", "TFLOP/s", "published"]
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for row in ROWS:
        one = predicted(row)
        cells = [row.name, row.gpus, one.layout.data, row.pipeline, row.tensor, row.batch]
        cells += [
            f"{one.memory.peak / 1e9:.1f}",
            "yes" if one.fits else "no",
            f"{teraflops(row, one.step_time_s):.0f}",
            row.teraflops,
        ]
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
