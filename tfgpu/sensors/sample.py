"""A sample of a machine, and its conversion to a table row."""

import dataclasses
from dataclasses import dataclass

Value = float | int | str | None


@dataclass(frozen=True)
class Gpu:
    """A GPU, or one of its MIG slices. Values that the GPU or the driver does not provide are `None`.

    Attributes:
        label: NVML's index; a slice is `"0s1"`.
        name: such as `"NVIDIA H100 80GB HBM3"`.
        uuid: as used in CUDA_VISIBLE_DEVICES.
        utilization: share of the time in which a kernel ran, 0 to 1.
        memory_utilization: share of the time in which its memory was read or written, 0 to 1.
        memory_bytes: memory in use by all processes.
        memory_total_bytes: total memory.
        power_w: current power.
        power_limit_w: power limit.
        energy_j: energy since the sampler began.
        temperature_c: temperature of the chip.
        sm_clock_mhz: clock of the SMs.
        memory_clock_mhz: clock of the memory.
        pcie_sent_bytes_per_s: rate to the host.
        pcie_received_bytes_per_s: rate from the host.
        pcie_share: share of the link's bandwidth in the busier direction, 0 to 1.
        nvlink_sent_bytes_per_s: rate to other GPUs, over all links.
        nvlink_received_bytes_per_s: rate from other GPUs.
        nvlink_share: share of the bandwidth of the active links in the busier direction, 0 to 1.
        slowed_by: comma-separated reasons for throttling, such as `"power cap"`.
    """

    label: str
    name: str = ""
    uuid: str = ""
    utilization: float | None = None
    memory_utilization: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    pcie_sent_bytes_per_s: float | None = None
    pcie_received_bytes_per_s: float | None = None
    pcie_share: float | None = None
    nvlink_sent_bytes_per_s: float | None = None
    nvlink_received_bytes_per_s: float | None = None
    nvlink_share: float | None = None
    slowed_by: str | None = None


@dataclass(frozen=True)
class Sample:
    """A sample of a machine, as seen by one process. Values that cannot be read are `None`.

    Rates cover the time since the previous sample; the first sample has none.

    Attributes:
        time: seconds since 1970, for display only.
        seconds: seconds since the sampler began, by a monotonic clock.
        cores: cores that this process may use: its affinity, or its control group's quota if that is less.
        cpu_cores: CPU use of this process and its children, in cores.
        cpu_share: the same as a share of `cores`, 0 to 1.
        machine_cpu_share: CPU use of the whole machine, 0 to 1.
        memory_bytes: resident memory of this process and its children.
        machine_memory_bytes: memory in use on the machine.
        machine_memory_total_bytes: total memory of the machine.
        memory_limit_bytes: memory limit of the control group; `None` without a limit.
        group_memory_bytes: memory in use by the control group, if it has a limit.
        disk_read_bytes_per_s: rate from all disks.
        disk_written_bytes_per_s: rate to all disks.
        network_sent_bytes_per_s: rate of all interfaces except loopback.
        network_received_bytes_per_s: the same for received bytes.
        network_share: share of the bandwidth in one direction of the busiest interface with a known speed, 0 to 1.
            RDMA over InfiniBand is not counted.
        gpus: the GPUs visible to this process.
        gpu_error: why there are no GPUs, or a GPU was lost; `""` if all is well.
    """

    time: float
    seconds: float
    cores: float
    cpu_cores: float | None = None
    cpu_share: float | None = None
    machine_cpu_share: float | None = None
    memory_bytes: int | None = None
    machine_memory_bytes: int | None = None
    machine_memory_total_bytes: int | None = None
    memory_limit_bytes: int | None = None
    group_memory_bytes: int | None = None
    disk_read_bytes_per_s: float | None = None
    disk_written_bytes_per_s: float | None = None
    network_sent_bytes_per_s: float | None = None
    network_received_bytes_per_s: float | None = None
    network_share: float | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""

    @property
    def gpu_energy_j(self) -> float | None:
        """The energy of all whole GPUs that report it, since the sampler began."""
        told = [gpu.energy_j for gpu in self.gpus if gpu.energy_j is not None]
        return sum(told) if told else None

    def row(self) -> dict[str, Value]:
        """Converts to a flat row; GPU columns begin with the label, as in `gpu0_power_w`.

        Example:
            >>> Sample(0.0, 1.0, 2.0, gpus=(Gpu("0", power_w=70.0),)).row()["gpu0_power_w"]
            70.0
        """
        row: dict[str, Value] = {name: value for name, value in vars(self).items() if name not in ("gpus", "gpu_error")}
        for gpu in self.gpus:
            row |= {f"gpu{gpu.label}_{name}": value for name, value in vars(gpu).items() if name in READ}
        return row


READ = tuple(each.name for each in dataclasses.fields(Gpu) if each.name not in ("label", "name", "uuid"))
"""The GPU values that each sample reads."""
