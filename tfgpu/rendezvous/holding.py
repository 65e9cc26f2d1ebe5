"""Holds a meeting from synchronous code."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tfgpu.rendezvous.meeting import Meeting


def hold(meeting: Meeting) -> None:
    """Holds a meeting; uses a new thread if this one already runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(meeting.hold())
    else:
        ThreadPoolExecutor(1, "preflight").submit(asyncio.run, meeting.hold()).result()
