"""Ports and messages of the preflight: lines of JSON, of bounded length, read in bounded time from whoever connects."""

import asyncio
import json
import os
import socket
import threading
from typing import Any

LIMIT = 2**16
"""Bytes of the longest message; a stranger's connection is closed at this many."""
FRAME = 9
"""Bytes of the head of a frame of HTTP/2."""
READ_S = 5.0
CONNECT_S = 5.0
KIND = "tfgpu preflight 1"


class Running(Exception):
    """TensorFlow's own server answers there already."""


class Foreign(Exception):
    """Something answers there that is no preflight."""


def encode(message: dict[str, Any]) -> bytes:
    """The message as it travels."""
    return json.dumps({"kind": KIND, **message}).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Reads a message.

    Raises:
        Running: it is the beginning of HTTP/2, as a gRPC server sends it.
        Foreign: it is no message of a preflight.
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
    """Whether this is how a gRPC server, such as TensorFlow's, begins: a frame of HTTP/2's settings."""
    # Three bytes of length, the type 4, flags, and stream 0.
    return len(beginning) >= FRAME and beginning[3] == 4 and beginning[5:FRAME] == bytes(4)


async def read(reader: asyncio.StreamReader, *, within_s: float | None = READ_S) -> dict[str, Any]:
    """Waits for a message.

    Raises:
        Running, Foreign: as `decode`.
        EOFError: the connection was closed before one.
        TimeoutError: none has come in time.
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
    """Opens a connection that leaves its own port free for a listener.

    Linux may choose for a connection's near end just the port on which a process of this machine is about to listen;
    without SO_REUSEADDR that process would find it in use, for a minute after the connection's end.

    Raises:
        OSError: nobody listens there, or the name does not resolve.
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
                    raise ConnectionRefusedError("nobody listens there")  # TCP had connected the socket with itself.
                return await asyncio.open_connection(sock=near, limit=LIMIT)
            except BaseException as error:
                near.close()
                if not isinstance(error, OSError) or address is found[-1][4]:
                    raise
    raise OSError("the name has no address")


def listener(port: int) -> socket.socket:
    """Listens on all interfaces, as TensorFlow will, and not beside another listener."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except OSError as error:
            if "Address family" not in str(error) and "assign requested" not in str(error):
                raise
    return socket.create_server(("", port), backlog=1024)


def words(error: OSError) -> str:
    """What the system calls the error, without the call that it came from."""
    is_errno = error.errno is not None and error.errno > 0
    return (os.strerror(error.errno) if is_errno else error.strerror or str(error)).lower()


async def _resolve(host: str, port: int) -> list[tuple]:
    """`getaddrinfo` in a daemon thread: one that hangs holds up neither the others nor the end of the process."""
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
