"""The makers' figures: GPUs by driver name, and dense rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.parallel.planning.hardware import DEVICES, driven

# What the driver says, and the data sheet: 16 bits, TF32 (float32 before Ampere) and float32, dense, in TFLOP/s; GB/s.
SHEETS = {
    "Tesla P100-PCIE-12GB": ("p100-pcie-12", 18.7, 9.3, 9.3, 16),
    "Tesla P100-PCIE-16GB": ("p100-pcie-16", 18.7, 9.3, 9.3, 16),
    "Tesla P100-SXM2-16GB": ("p100-16", 21.2, 10.6, 10.6, 80),
    "Tesla T4": ("t4", 65, 8.1, 8.1, 16),
    "Tesla V100-PCIE-16GB": ("v100-pcie-16", 112, 14, 14, 16),
    "Tesla V100-PCIE-32GB": ("v100-pcie-32", 112, 14, 14, 16),
    "Tesla V100S-PCIE-32GB": ("v100s-pcie-32", 130, 16.4, 16.4, 16),
    "Tesla V100-SXM2-16GB": ("v100-16", 125, 15.7, 15.7, 150),
    "Tesla V100-SXM3-32GB": ("v100-32", 125, 15.7, 15.7, 150),
    "NVIDIA A10": ("a10", 125, 62.5, 31.2, 32),
    "NVIDIA A10G": ("a10g", 70, 35, 35, 32),
    "NVIDIA A30": ("a30", 165, 82, 10.3, 32),
    "NVIDIA A40": ("a40", 149.7, 74.8, 37.4, 32),
    "NVIDIA RTX A6000": ("rtx-a6000", 154.8, 77.4, 38.7, 32),
    "NVIDIA GeForce RTX 3090": ("rtx-3090", 71, 35.6, 35.6, 32),
    "NVIDIA A100-PCIE-40GB": ("a100-pcie-40", 312, 156, 19.5, 32),
    "NVIDIA A100 80GB PCIe": ("a100-pcie-80", 312, 156, 19.5, 32),
    "A100-SXM4-40GB": ("a100-40", 312, 156, 19.5, 300),
    "NVIDIA A100-SXM4-80GB": ("a100-80", 312, 156, 19.5, 300),
    "NVIDIA L4": ("l4", 121, 60, 30.3, 32),
    "NVIDIA L40": ("l40", 181, 90.5, 90.5, 32),
    "NVIDIA L40S": ("l40s", 362, 183, 91.6, 32),
    "NVIDIA RTX 6000 Ada Generation": ("rtx-6000-ada", 364.2, 182.1, 91.1, 32),
    "NVIDIA GeForce RTX 4090": ("rtx-4090", 165.2, 82.6, 82.6, 32),
    "NVIDIA H100 PCIe": ("h100-pcie-80", 756, 378, 51, 64),
    "NVIDIA H100 NVL": ("h100-nvl", 835, 417, 60, 64),
    "NVIDIA H100 80GB HBM3": ("h100-80", 989, 494, 67, 450),
    "NVIDIA H200 NVL": ("h200-nvl", 835, 417, 60, 64),
    "NVIDIA H200": ("h200", 989, 494, 67, 450),
    "NVIDIA GH200 480GB": ("gh200", 989, 494, 67, 450),
    "NVIDIA GeForce RTX 5090": ("rtx-5090", 209.5, 104.8, 104.8, 64),
    "NVIDIA B200": ("b200", 2250, 1100, 75, 900),
}
# Others, and parts of those above.
UNKNOWN = (
    *("", "NVIDIA", "NVIDIA T4G", "NVIDIA T400", "NVIDIA A100X", "NVIDIA A2", "NVIDIA A1000", "NVIDIA L40G"),
    *("NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GB200"),
    *("Quadro RTX 6000", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A10-24Q", "GRID A100-10C", "GeForce GTX 1080"),
    *("Tesla V100-DGXS-32GB", "NVIDIA H100 64GB HBM2", "NVIDIA B2000", "NVIDIA H200 NVL MIG 1g.18gb"),
)


@pytest.mark.parametrize("name", SHEETS)
def test_a_drivers_name_has_its_sheets_figures(name):
    found = driven(name)
    expected, bits, tf32, single, bandwidth = SHEETS[name]
    assert found.name == expected and found.source
    rates = (found.flops, found.flops_tf32, found.flops_float32)
    assert rates == pytest.approx((bits * 1e12, tf32 * 1e12, single * 1e12)) and found.bandwidth == bandwidth * 1e9
    assert found.link == ("PCIe" if bandwidth in (16, 32, 64) else "NVLink")


def test_every_device_is_found_by_some_name():
    assert {driven(name).name for name in SHEETS} == set(DEVICES)


@pytest.mark.parametrize("name", UNKNOWN)
def test_another_gpu_is_not_known(name):
    assert driven(name) is None


@given(st.sampled_from(sorted(SHEETS)), st.text("ABCDGLMNSTVX0123456789 -", min_size=1, max_size=8))
def test_a_longer_name_is_no_shorter_ones(name, rest):
    """What follows a name makes another GPU: of the table, or an unknown one."""
    found, expected = driven(name + rest), SHEETS.get((name + rest).strip())
    assert (found and found.name) == (expected and expected[0])


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_rates_are_dense(device):
    """TF32 is half of 16 bits where there is TF32; a sparse figure beside a dense one would show."""
    assert device.flops > device.flops_tf32 >= device.flops_float32
    old = device.name.startswith(("p100", "t4", "v100"))
    if old:
        assert device.flops_tf32 == device.flops_float32
    else:
        assert device.flops / device.flops_tf32 == pytest.approx(2, rel=0.03)
