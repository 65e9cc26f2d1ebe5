"""What benchmarks/gpu.py measures: ResNet-50 on 224x224 images, one setting per cell, the most informative first."""

from dataclasses import dataclass

# The sets of operations that XLA may put into CUDA graphs, as --xla_gpu_enable_command_buffer takes them; "default" is
# XLA's own choice. (--xla_gpu_graph_level is gone: TensorFlow 2.21 ends at it.)
GRAPHS = {
    "default": None,
    "none": "--xla_gpu_enable_command_buffer=",
    "all": "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
}


@dataclass(frozen=True)
class GpuCell:
    """One setting.

    Attributes:
        path: "fit" (tfgpu), "hand" (a hand-written loop), "stock" (Keras without the repairs) or "input" (no model).
        precision: as `tfgpu.precision.use` takes it; "float32" has TF32 off.
        xla: `jit_compile`.
        data: "synthetic" (one batch of uint8 in memory) or "jpeg" (files that are decoded).
        device: "gpu" or "cpu".
        graphs: a key of `GRAPHS`.
        batch: pictures in a batch.
    """

    path: str = "fit"
    precision: str = "mixed_float16"
    xla: bool = True
    data: str = "synthetic"
    device: str = "gpu"
    graphs: str = "default"
    batch: int = 256

    @property
    def name(self) -> str:
        parts = [self.path, self.precision, "xla" if self.xla else "no-xla", self.data, self.device]
        return " ".join(parts + ([f"graphs={self.graphs}"] if self.graphs != "default" else []))


_CPU = {"device": "cpu", "precision": "float32", "xla": False, "batch": 32}
CELLS = {
    cell.name: cell
    for cell in (
        GpuCell(),
        GpuCell(path="hand"),
        GpuCell(precision="tf32", xla=False),
        GpuCell(data="jpeg"),
        GpuCell(precision="mixed_bfloat16"),
        GpuCell(precision="float32", xla=False),
        GpuCell(**_CPU),
        GpuCell(xla=False),
        GpuCell(graphs="none"),
        GpuCell(graphs="all"),
        GpuCell(path="stock"),
        GpuCell(precision="tf32"),
        GpuCell(precision="float32"),
        GpuCell(precision="mixed_bfloat16", xla=False),
        GpuCell(path="input", data="jpeg"),
        GpuCell(path="hand", data="jpeg"),
        GpuCell(path="hand", xla=False),
        GpuCell(precision="tf32", data="jpeg"),
    )
}

# What NVIDIA has published for one GPU: ResNet-50 v1.5, its TensorFlow container, batch 256, mixed precision, XLA.
ANCHORS = {"A100": 2375, "V100": 1270}
ANCHOR_SOURCE = "https://github.com/NVIDIA/DeepLearningExamples (TensorFlow/Classification/ConvNets/resnet50v1.5)"
