"""The newest sample as Prometheus reads it: as text, in a file, or at a port."""

import http.server
import re
import socket
import threading
from collections.abc import Callable, Mapping

from tfgpu.errors import InputError, MachineError
from tfgpu.sensors.sample import Value

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GPU = re.compile(r"gpu(\d+(?:s\d+)?)_(\w+)")
# Prometheus wants base units, and a counter's name to end in `_total`.
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
_PLAIN = {"step": "steps_total", "epoch": "epoch", "cores": "cores", "cpu_cores": "cpu_cores"}
_LEFT_OUT = ("time", "seconds", "gpu_energy_j")  # Prometheus has a clock of its own, and sums.


def text(row: Mapping[str, Value], *, worker: int = 0, uuids: Mapping[str, str] | None = None) -> str:
    """One sample in Prometheus's text format.

    Args:
        row: as `Sample.row` gives it, with what the training adds.
        worker: the number of the process, a label of all.
        uuids: of GPUs, by their label in the row.

    Example:
        >>> print(text({"gpu0_power_w": 70.5}, uuids={"0": "GPU-a"}), end="")
        # HELP tfgpu_gpu_power_watts gpu power watts
        # TYPE tfgpu_gpu_power_watts gauge
        tfgpu_gpu_power_watts{worker="0",gpu="0",uuid="GPU-a"} 70.5

    Source: https://prometheus.io/docs/instrumenting/exposition_formats
    """
    families: dict[str, list[str]] = {}
    helps: dict[str, str] = {}
    for column, value in row.items():
        if not isinstance(value, int | float) or column in _LEFT_OUT:
            continue
        labels, rest = {"worker": str(worker)}, column
        if match := _GPU.fullmatch(column):
            labels |= {"gpu": match[1], "uuid": (uuids or {}).get(match[1], "")}
            rest = f"gpu_{match[2]}"
        name, factor = _named(rest)
        helps.setdefault(name, name.removeprefix("tfgpu_").replace("_", " "))
        families.setdefault(name, []).append(f"{name}{_labelled(labels)} {value * factor:.15g}")
    if isinstance(resource := row.get("limit"), str):
        name = "tfgpu_limit_info"
        helps[name] = "what limits the step"
        families[name] = [f"{name}{_labelled({'worker': str(worker), 'resource': resource})} 1"]
    lines = []
    for name, values in families.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {helps[name]}", f"# TYPE {name} {kind}", *values]
    return "\n".join([*lines, ""])


def _named(column: str) -> tuple[str, float]:
    if column in _PLAIN:
        return f"tfgpu_{_PLAIN[column]}", 1.0
    for ending, unit, factor in _UNITS:
        if column.endswith(ending):
            return f"tfgpu_{column.removesuffix(ending)}{unit}", factor
    return f"tfgpu_{column}", 1.0


def _labelled(labels: Mapping[str, str]) -> str:
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def address(value: int | str) -> tuple[str, int]:
    """Where to listen: a port of this machine alone, or `host:port`.

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
    """Serves the newest sample at `/metrics`, in a thread of its own, until `close`.

    Args:
        where: host and port; port 0 takes any that is free.
        current: gives the text.

    Raises:
        MachineError: the port cannot be had.
    """

    def __init__(self, where: tuple[str, int], current: Callable[[], str]):
        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 10  # A client that says nothing holds no thread for long.

            def do_GET(self) -> None:
                if self.path.split("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                content = current().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        class Listening(http.server.ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET

            def server_bind(self) -> None:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(self.server_address)  # The library's own asks the name service, which may take long.
                self.server_name, self.server_port = where[0], self.socket.getsockname()[1]

        try:
            self._server = Listening(where, Handler)
        except OSError as error:
            raise MachineError(
                f"Prometheus's figures cannot be served at {where[0]}:{where[1]}: {error.strerror or error}. "
                "Give another port with `prometheus`."
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="tfgpu-prometheus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving, and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
