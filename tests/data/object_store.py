"""Real servers on loopback for tests of remote data: a web server with ranges, and an object store (moto)."""

import contextlib
import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, by ranges too, with faults on demand."""

    def __init__(self, *args, facts: dict, **kwargs):
        self.facts = facts
        super().__init__(*args, **kwargs)

    def log_message(self, *args):
        pass

    def do_GET(self):
        facts, wanted = self.facts, self.headers.get("Range")
        facts["requests"].append((self.path, wanted))
        if facts["failures"] > 0:
            facts["failures"] -= 1
            self.send_error(503)
            return
        path = Path(self.translate_path(self.path))
        if wanted is None or not facts["ranges"] or not path.is_file():
            super().do_GET()
            return
        content = path.read_bytes()
        first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        if facts["flips"] > 0:
            facts["flips"] -= 1
            part = part[:-40] + bytes([part[-40] ^ 255]) + part[-39:]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[tuple[str, dict]]:
    """A server of a folder's files: its URL, and what it was asked and how it fails."""
    facts = {"requests": [], "failures": 0, "flips": 0, "ranges": True}
    handler = partial(_Handler, directory=str(folder), facts=facts)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", facts
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


@contextlib.contextmanager
def object_store(monkeypatch) -> Iterator[str]:
    """An S3 server; `s3://` means it, as AWS_ENDPOINT_URL says."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    names = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in (names | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextlib.contextmanager
def google_store(monkeypatch, address: str) -> Iterator[None]:
    """A server of Google's object store with a bucket `bucket`; `gs://` means it, as STORAGE_EMULATOR_HOST says.

    Call it before the first import of gcsfs, which would ask the server by gRPC, too.
    """
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    monkeypatch.setattr(http.server, "HTTPServer", http.server.ThreadingHTTPServer)  # many connections stay open
    from gcp_storage_emulator.server import create_server

    host, _, port = address.partition(":")
    server = create_server(host, int(port), in_memory=True, default_bucket="bucket")
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{address}")
    try:
        yield
    finally:
        server.stop()
