"""What is read of a machine at one moment, and the same as one row of a table."""

import dataclasses
from dataclasses import dataclass, field

Value = float | int | str | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG slice of it. `None`: this GPU or this driver does not tell.

    Attributes:
        label: its index, as NVML counts; a slice's is `"0s1"`.
        name: such as `"NVIDIA H100 80GB HBM3"`.
        uuid: by which CUDA_VISIBLE_DEVICES may name it.
        utilization: share of the time in which a kernel ran, 0 to 1.
        memory_utilization: share of the time in which its memory was read or written, 0 to 1.
        memory_bytes: in use, by all processes.
        memory_total_bytes: all that it has.
        power_w: drawn now.
        power_limit_w: the most that it may draw.
        energy_j: used since the sampler began.
        temperature_c: of its chip.
        sm_clock_mhz: of its processors.
        memory_clock_mhz: of its memory.
        pcie_sent_bytes_per_s: to the host.
        pcie_received_bytes_per_s: from the host.
        pcie_share: of what the link can carry in one direction, the busier one, 0 to 1.
        nvlink_sent_bytes_per_s: to other GPUs, over all links.
        nvlink_received_bytes_per_s: the other way.
        nvlink_share: of what the links that are up carry in one direction, the busier one, 0 to 1.
        slowed_by: why its clocks are held back, such as `"power cap"`; with commas between.
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
    """A machine at one moment, as one process sees it. `None`: it cannot be read here.

    Rates are over the time since the sample before; the first sample has none.

    Attributes:
        time: seconds since 1970, by the clock of the day: for reading only.
        seconds: since the sampler began, by a clock that does not leap.
        cores: that this process may use: its affinity, or its control group's share where that is less.
        cpu_cores: cores' worth of time that this process and its children took.
        cpu_share: the same as a share of `cores`, 0 to 1.
        machine_cpu_share: of all cores of the machine, taken by anybody, 0 to 1.
        memory_bytes: resident, of this process and its children.
        machine_memory_bytes: in use by anybody.
        machine_memory_total_bytes: all there is.
        memory_limit_bytes: the most that the control group may use; `None` where there is no limit.
        group_memory_bytes: in use by the control group, where it has a limit.
        disk_read_bytes_per_s: from all disks.
        disk_written_bytes_per_s: to all disks.
        network_sent_bytes_per_s: by all interfaces but loopback.
        network_received_bytes_per_s: the other way.
        network_share: of what an interface carries in one direction, the busiest of those that tell their speed, 0 to
            1; InfiniBand's own traffic (RDMA) passes these counters by.
        cpu_energy_j: of all processor packages since the sampler began (RAPL).
        gpus: those that CUDA shows this process.
        gpu_error: why there are none, or none any more; `""` where all is well.
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
    cpu_energy_j: float | None = None
    gpus: tuple[Gpu, ...] = field(default=())
    gpu_error: str = ""

    @property
    def gpu_energy_j(self) -> float | None:
        """Of all whole GPUs that tell it, since the sampler began."""
        told = [gpu.energy_j for gpu in self.gpus if gpu.energy_j is not None]
        return sum(told) if told else None

    def row(self) -> dict[str, Value]:
        """One flat row; a GPU's columns begin with its label, as in `gpu0_power_w`.

        Example:
            >>> Sample(0.0, 1.0, 2.0, gpus=(Gpu("0", power_w=70.0),)).row()["gpu0_power_w"]
            70.0
        """
        names = [each.name for each in dataclasses.fields(self) if each.name not in ("gpus", "gpu_error")]
        row: dict[str, Value] = {name: getattr(self, name) for name in names}
        for gpu in self.gpus:
            row |= {f"gpu{gpu.label}_{name}": value for name, value in dataclasses.asdict(gpu).items() if name in READ}
        return row


READ = tuple(each.name for each in dataclasses.fields(Gpu) if each.name not in ("label", "name", "uuid"))
"""What is read of a GPU again and again."""
