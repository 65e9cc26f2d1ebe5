"""Holds a meeting from synchronous code."""

import asyncio
import threading

from tfgpu.rendezvous.meeting import Meeting


def hold(meeting: Meeting) -> None:
    """Holds a meeting; uses a new thread if this one already runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(meeting.hold())
        return
    errors: list[BaseException] = []

    def in_thread() -> None:
        try:
            asyncio.run(meeting.hold())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=in_thread, name="preflight", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
