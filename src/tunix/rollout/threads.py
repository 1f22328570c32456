"""Blocking user code beside an asyncio loop, in daemon threads that can be given up on."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call user code: a coroutine function on the loop, any other in a thread of its own.

    Where the result is awaitable, it is awaited on the loop.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    result = await call_in_thread(function, *arguments)
    return await result if inspect.isawaitable(result) else result


async def call_in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a blocking function in a thread of its own and await its result.

    The thread is a daemon and is not joined: when the awaiting task is cancelled or times out, a
    function that hangs keeps its thread but blocks neither the loop nor the exit of the process
    (an executor's threads would do both).
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = function(*arguments)
        except StopIteration as stop:  # a future refuses to carry it
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(finish, value, error)
        except RuntimeError:  # the loop closed while the function ran: nobody waits any more
            return

    threading.Thread(target=work, name=f"tunix-call-{function!r:.60}", daemon=True).start()
    return await result
