"""Exports the newest sample to Prometheus, as a text file or over HTTP."""

import re
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tfgpu.errors import InputError, MachineError
from tfgpu.sensors.sample import Value

_GPU = re.compile(r"gpu(\d+(?:s\d+)?)_(\w+)")
# Prometheus uses base units, and a counter's name ends in `_total`.
_UNITS = (
    ("_bytes_per_s", "_bytes_per_second", 1.0),
    ("_per_s", "_per_second", 1.0),
    ("energy_j", "energy_joules_total", 1.0),
    ("_clock_mhz", "_clock_hertz", 1e6),
    ("power_w", "power_watts", 1.0),
    ("power_limit_w", "power_limit_watts", 1.0),
    ("temperature_c", "temperature_celsius", 1.0),
    ("_time_s", "_time_seconds", 1.0),
    ("_share", "_ratio", 1.0),
    ("utilization", "utilization_ratio", 1.0),
    ("input_wait", "input_wait_ratio", 1.0),
)
_LEFT_OUT = ("time", "seconds", "gpu_energy_j")  # Prometheus has its own clock, and adds up GPUs itself.


class Metrics(Collector):
    """The metrics of the newest sample.

    Args:
        worker: the number of this process, which labels every metric.

    Example:
        >>> metrics = Metrics(worker=1)
        >>> metrics.update({"gpu0_power_w": 70.5}, uuids={"0": "GPU-a"})
        >>> print(metrics.text(), end="")
        # HELP tfgpu_gpu_power_watts gpu power watts
        # TYPE tfgpu_gpu_power_watts gauge
        tfgpu_gpu_power_watts{gpu="0",uuid="GPU-a",worker="1"} 70.5
    """

    def __init__(self, *, worker: int = 0):
        self._worker = str(worker)
        self._families: list[Metric] = []

    def update(self, row: Mapping[str, Value], *, uuids: Mapping[str, str] | None = None) -> None:
        """Replaces the sample.

        Args:
            row: as `Sample.row` returns it, with columns that the training adds.
            uuids: the GPUs' UUIDs by their label in the row.
        """
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for column, value in row.items():
            if not isinstance(value, int | float) or column in _LEFT_OUT:
                continue
            labels, rest = {"worker": self._worker}, column
            if match := _GPU.fullmatch(column):
                labels |= {"gpu": match[1], "uuid": (uuids or {}).get(match[1], "")}
                rest = f"gpu_{match[2]}"
            name, factor = _named(rest)
            if name not in families:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                families[name] = kind(name, name.removeprefix("tfgpu_").replace("_", " "), labels=list(labels))
            families[name].add_metric(list(labels.values()), value * factor)
        found: list[Metric] = list(families.values())
        if isinstance(resource := row.get("limit"), str):
            info = InfoMetricFamily("tfgpu_limit", "what limits the step", labels=["worker"])
            info.add_metric([self._worker], {"resource": resource})
            found.append(info)
        self._families = found  # In one assignment: the server reads it from another thread.

    def collect(self) -> Iterable[Metric]:
        return self._families

    def text(self) -> str:
        """The metrics in Prometheus's text format."""
        return generate_latest(self).decode()


def _named(column: str) -> tuple[str, float]:
    for ending, unit, factor in _UNITS:
        if column.endswith(ending):
            return f"tfgpu_{column.removesuffix(ending)}{unit}", factor
    return f"tfgpu_{'steps_total' if column == 'step' else column}", 1.0


def address(value: int | str) -> tuple[str, int]:
    """Parses where to listen: a port of the loopback interface, or `host:port`.

    Raises:
        InputError: it is neither.

    Example:
        >>> address(9400), address("0.0.0.0:9400"), address("[::1]:9400")
        (('127.0.0.1', 9400), ('0.0.0.0', 9400), ('::1', 9400))
    """
    host, _, port = str(value).rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if isinstance(value, bool) or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise InputError(
            f'`prometheus` must be True (a file), a port or "host:port". Received: {value!r}. Use 9400, or '
            '"0.0.0.0:9400" for all interfaces.'
        )
    return host, int(port)


class Server:
    """Serves metrics over HTTP from a background thread, until `close`.

    Args:
        where: host and port; port 0 takes any free one.
        metrics: what to serve.

    Raises:
        MachineError: the port cannot be opened.
    """

    def __init__(self, where: tuple[str, int], metrics: Metrics):
        host, port = where
        registry = CollectorRegistry()
        registry.register(metrics)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise MachineError(
                f"Prometheus metrics cannot be served at {host}:{port}: {error.strerror or error}. "
                "Give another port with `prometheus`."
            ) from error
        self.port: int = self._server.server_port
        self._thread.name = "tfgpu-prometheus"

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
