import pytest

from tfgpu.sensors.limits import RESOURCES, input_wait, limit

BUSY_GPU = {"gpu0_utilization": 0.95, "gpu1_utilization": 0.85, "cpu_share": 0.3, "input_wait": 0.05}
IDLE_GPU = {"gpu0_utilization": 0.4, "cpu_share": 0.3, "machine_cpu_share": 0.35, "input_wait": 0.05}
NO_GPU = {"cpu_share": 0.95, "machine_cpu_share": 0.97, "input_wait": 0.0}


@pytest.mark.parametrize(
    ("means", "resource", "words"),
    [
        ({**BUSY_GPU, "input_wait": 0.2}, "input", "waits for data 20% of the time"),
        ({**BUSY_GPU, "input_wait": 0.5, "cpu_share": 0.9}, "input", "the cores are 90% busy"),
        (BUSY_GPU, "GPU compute", "the GPU is busy 90% of the time"),
        ({**BUSY_GPU, "gpu0_memory_utilization": 0.8, "gpu1_memory_utilization": 0.6}, "GPU memory traffic", "70%"),
        ({**BUSY_GPU, "gpu0_pcie_share": 0.9}, "GPU compute", "90%"),  # a busy GPU does not wait for its link
        ({**BUSY_GPU, "gpu0_nvlink_share": 0.4, "gpu1_nvlink_share": 0.7}, "communication", "NVLink uses 55%"),
        ({**BUSY_GPU, "gpu0_nvlink_share": 0.3}, "GPU compute", "90%"),
        ({**BUSY_GPU, "network_share": 0.9}, "GPU compute", "90%"),  # alone it is some other traffic
        ({**IDLE_GPU, "gpu0_pcie_share": 0.5}, "communication", "PCIe uses 50%"),
        ({**IDLE_GPU, "cpu_share": 0.8}, "CPU", "the GPU is busy 40% of the time, the cores are 80% busy"),
        ({**IDLE_GPU, "machine_cpu_share": 0.9}, "CPU", "other processes keep the machine's cores 90% busy"),
        (IDLE_GPU, "host", "the GPU is busy 40% of the time, the cores are 30% busy"),
        (NO_GPU, "CPU", "the cores are 95% busy"),
        ({**NO_GPU, "cpu_share": 0.5, "machine_cpu_share": 0.5}, "host", "the cores are 50% busy"),
        ({**NO_GPU, "input_wait": None}, "CPU", "the wait for data is unknown"),
        ({"cpu_share": None}, "unknown", "not known yet"),
        ({}, "unknown", "not known yet"),
        ({"gpu0s0_memory_bytes": 5, "cpu_share": 0.9}, "CPU", "90%"),  # a slice says nothing of its load
    ],
)
def test_what_limits_a_step(means, resource, words):
    found = limit(means)
    assert found.resource == resource and words in found.why and resource in RESOURCES
    is_incomplete = means.get("input_wait") is None and resource != "unknown"
    assert found.why.endswith("; the wait for data is unknown") == is_incomplete


@pytest.mark.parametrize(
    "step_s, computing_s, busy, expected",
    [
        (0.1, 0.04, [], 0.6),
        (0.1, 0.2, [], 0.0),  # the steps since the last sample were shorter
        (0.1, 0.01, [0.97], 0.03),  # the host is ahead of a busy GPU and waits for batches that are not due yet
        (0.1, 0.01, [0.3], 0.7),  # the GPU idles, and the host waits
        (0.1, 0.09, [0.3], 0.1),  # the GPU idles, and the host computes
        (0.1, 0.01, [None, 0.5], 0.5),
        (0.1, 0.01, [None], None),
        (None, 0.01, [], None),
        (0.1, None, [0.5], None),
    ],
)
def test_the_wait_for_data_is_no_longer_than_a_gpu_idles(step_s, computing_s, busy, expected):
    assert input_wait(step_s, computing_s, busy) == expected


def test_workers_whose_cores_idle_wait_for_each_other():
    means = {"cpu_share": 0.4, "machine_cpu_share": 0.4, "input_wait": 0.01}
    assert limit(means, workers=2).resource == "communication"
    assert limit(means).resource == "host"
    among_gpus = limit(IDLE_GPU, workers=8)
    for gpus in (BUSY_GPU, IDLE_GPU, means):  # a GPU that waits for a sum counts as busy
        full = limit({**gpus, "network_share": 0.6}, workers=2)
        assert full.resource == "communication" and "the network uses 60% of its bandwidth" in full.why
    assert "workers (the network uses 10% of" in limit({**IDLE_GPU, "network_share": 0.1}, workers=8).why
    assert among_gpus.resource == "host" and "or communication between 8 workers" in among_gpus.why
