"""The `devices` argument of the factories."""

from collections.abc import Iterable

from tfgpu.environment import Device

Devices = int | str | Iterable[str] | None


def join_names(devices: Iterable[Device]) -> str:
    """Lists devices for an error message.

    Example:
        >>> from tfgpu import environment
        >>> join_names(environment.devices("CPU")[:1])
        'CPU:0'
    """
    return ", ".join(device.name for device in devices)
