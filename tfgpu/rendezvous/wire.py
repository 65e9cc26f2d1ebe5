"""Ports and messages of the rendezvous: lines of JSON with limits on length and time."""

import asyncio
import json
import os
import socket
import threading
from typing import Any

LIMIT = 2**16
"""Bytes of the longest message; connections that send more are closed."""
FRAME = 9
"""Bytes of an HTTP/2 frame header."""
READ_S = 5.0
CONNECT_S = 5.0
KIND = "tfgpu preflight 1"


class Running(Exception):
    """TensorFlow's server already answers there."""


class Foreign(Exception):
    """Another program answers there."""


def encode(message: dict[str, Any]) -> bytes:
    """Encodes a message."""
    return json.dumps({"kind": KIND, **message}).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Decodes a message.

    Raises:
        Running: it is the start of HTTP/2, as sent by a gRPC server.
        Foreign: it is not a message of a rendezvous.
    """
    if is_grpc(line):
        raise Running
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise Foreign from None
    if not isinstance(message, dict) or message.get("kind") != KIND:
        raise Foreign
    return message


def is_grpc(beginning: bytes) -> bool:
    """Whether this is the start of a gRPC server's answer: an HTTP/2 SETTINGS frame."""
    # Three bytes of length, type 4, flags, and stream 0.
    return len(beginning) >= FRAME and beginning[3] == 4 and beginning[5:FRAME] == bytes(4)


async def read(reader: asyncio.StreamReader, *, within_s: float | None = READ_S) -> dict[str, Any]:
    """Waits for a message.

    Raises:
        Running, Foreign: see `decode`.
        EOFError: the connection was closed before a message.
        TimeoutError: no message arrived in time.
        OSError: the connection broke.
    """
    try:
        async with asyncio.timeout(within_s):
            line = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError:
        raise Foreign from None
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise EOFError from None
        line = error.partial
    return decode(line)


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens a connection that leaves its local port free for a listener.

    Linux may choose as the local port the very port on which another process of this machine is about to listen.
    Without SO_REUSEADDR, that process would find the port in use until a minute after the connection's end.

    Raises:
        OSError: nothing listens there, or the name does not resolve.
        TimeoutError: no answer within `CONNECT_S`.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_S):
        found = await _resolve(host, port)
        for family, kind, protocol, _, address in found:
            near = socket.socket(family, kind, protocol)
            try:
                near.setblocking(False)
                near.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                await loop.sock_connect(near, address)
                if near.getsockname() == near.getpeername():
                    raise ConnectionRefusedError("nobody listens there")  # TCP connected the socket to itself.
                return await asyncio.open_connection(sock=near, limit=LIMIT)
            except BaseException as error:
                near.close()
                if not isinstance(error, OSError) or address is found[-1][4]:
                    raise
    raise OSError("the name has no address")


def listener(port: int) -> socket.socket:
    """Listens on all interfaces, as TensorFlow will; fails if the port has another listener."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except OSError as error:
            if "Address family" not in str(error) and "assign requested" not in str(error):
                raise
    return socket.create_server(("", port), backlog=1024)


def words(error: OSError) -> str:
    """The system's message for an error, without the failed call."""
    is_errno = error.errno is not None and error.errno > 0
    return (os.strerror(error.errno) if is_errno else error.strerror or str(error)).lower()


async def _resolve(host: str, port: int) -> list[tuple]:
    """Runs `getaddrinfo` in a daemon thread, so that it cannot block other calls or the end of the process."""
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def deliver(result: Any) -> None:
        if not answer.done():
            answer.set_exception(result) if isinstance(result, OSError) else answer.set_result(result)

    def ask() -> None:
        try:
            result: Any = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except OSError as error:
            result = error
        except UnicodeError as error:
            result = OSError(str(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result)

    threading.Thread(target=ask, name=f"resolve {host}", daemon=True).start()
    return await answer
