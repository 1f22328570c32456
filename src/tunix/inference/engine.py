"""The engine: a scheduler in a thread of its own, requests from any asyncio loop or thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from tunix.errors import RunError
from tunix.inference import device
from tunix.inference.request import Completion, Request
from tunix.inference.scheduler import OnToken, Scheduler
from tunix.models.llama import LlamaConfig, Params
from tunix.models.lora import Adapter
from tunix.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """What a stream yields."""

    tokens: list[int]
    """Ids drawn since the piece before."""
    completion: Completion | None
    """The whole completion, with the last piece."""


class Engine:
    """Generates for many callers at once; requests join and leave a running batch at any step.

    ``params`` and ``adapters`` are in training form and copied, here and in ``publish``.
    ``slots`` sequences run at once, each of at most ``max_positions`` tokens, prompt and answer
    together; further requests wait. The ``tokenizer`` is needed where requests have stop strings.
    Close it, or use it as a context manager. Raises ``ConfigError`` and ``ModelError`` as
    ``Scheduler`` does.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: Any,
        *,
        adapters: Sequence[Adapter] = (),
        slots: int = 64,
        max_positions: int,
        version: int = 0,
        tokenizer: Tokenizer | None = None,
    ):
        self._scheduler = Scheduler(
            config,
            params,
            adapters=adapters,
            slots=slots,
            max_positions=max_positions,
            version=version,
            tokenizer=tokenizer,
        )
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._waiting: dict[Future, int | None] = {}
        """What callers wait for: requests, with their id once the scheduler has them, and
        publications."""
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tunix-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the parameters that draw the next token."""
        return self._scheduler.version

    @property
    def adapters(self) -> int:
        """How many adapters there are; the policy in training is the last of them, or the base."""
        return len(self._scheduler.weights.adapters)

    async def generate(self, request: Request) -> Completion:
        """Generate one completion; cancelling the awaiting task aborts the request.

        Raises ``ConfigError`` for a request that cannot be served, ``ModelError`` where the
        logits are not finite, ``RunError`` where the engine has failed or is closed.
        """
        future = self._submit(request)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._abort([future])
            raise

    def generate_sync(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate completions, in the order of the requests; for plain scripts.

        ``generate_sync(request.samples(8))`` draws eight answers to one prompt. Errors as
        ``generate``.
        """
        futures = [self._submit(request) for request in requests]
        try:
            return [future.result() for future in futures]
        except BaseException:
            self._abort(futures)
            raise

    async def stream(self, request: Request) -> AsyncIterator[Piece]:
        """Yield the tokens of a request as they are drawn; the last piece has the completion.

        Cancelling, or closing the iterator, aborts the request. Errors as ``generate``.
        """
        loop = asyncio.get_running_loop()
        drawn: asyncio.Queue[int | None] = asyncio.Queue()

        def post(token: int) -> None:
            with contextlib.suppress(RuntimeError):  # that loop has ended; the abort is on its way
                loop.call_soon_threadsafe(drawn.put_nowait, token)

        future = self._submit(request, post)
        result = asyncio.wrap_future(future)
        result.add_done_callback(lambda _: drawn.put_nowait(None))  # behind the last token
        try:
            while True:
                ids = [await drawn.get()]
                while not drawn.empty():
                    ids.append(drawn.get_nowait())
                tokens = [token for token in ids if token is not None]
                if ids[-1] is None:
                    yield Piece(tokens, result.result())
                    return
                yield Piece(tokens, None)
        finally:
            self._abort([future])

    def warm_up(self) -> None:
        """Compile every program that requests may need (seconds each) before serving any."""
        self._command(self._scheduler.warm_up)

    def publish(self, published: Params | Adapter, version: int) -> bool:
        """Take over new weights between two steps, without draining; return when done.

        Parameters replace the base, an adapter the engine's first one. The caller may donate or
        delete its buffers afterwards. Returns whether any number changed. Callable from any thread,
        by one at a time.
        """
        old = self._scheduler.weights
        own = self._scheduler.taken_over(published)
        changed = bool(device.differ(old, own))
        self._command(lambda: self._scheduler.install(own, version))
        return changed

    def stats(self) -> dict[str, int | float]:
        """Counts and seconds since the start; see ``scheduler.Stats``."""
        return self._scheduler.stats.as_dict()

    def close(self) -> None:
        """Stop the thread and wait for it; whoever still waits gets a ``RunError``."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(self, run: Callable[[], None]) -> None:
        """Let the thread run something between two steps, and wait for it."""
        future: Future = Future()
        future.set_running_or_notify_cancel()

        def command() -> None:
            run()
            self._resolve(future, None)

        self._post(command, [future])
        future.result()

    def _submit(self, request: Request, on_token: OnToken | None = None) -> Future:
        self._scheduler.validate(request)
        future: Future = Future()
        # Marked as running, so that cancelling the asyncio side cannot race with our result.
        future.set_running_or_notify_cancel()

        def submit() -> None:
            def done(result: Any) -> None:
                self._resolve(future, result)

            self._waiting[future] = self._scheduler.submit(request, done, on_token)

        self._post(submit, [future])
        return future

    def _abort(self, futures: Sequence[Future]) -> None:
        def abort() -> None:
            for future in futures:
                id = self._waiting.get(future)
                if id is not None:
                    self._scheduler.abort(id)

        with self._wake:
            self._inbox.append(abort)
            self._wake.notify()

    def _post(self, command: Callable[[], None], waiting: Sequence[Future]) -> None:
        """Hand a command to the thread. Raises ``RunError`` where it no longer runs."""
        with self._wake:
            if self._failure is not None:
                raise RunError(f"the engine failed: {self._failure!r}") from self._failure
            if self._closing:
                raise RunError("the engine is closed")
            self._waiting.update(dict.fromkeys(waiting))
            self._inbox.append(command)
            self._wake.notify()

    def _resolve(self, future: Future, result: Any) -> None:
        del self._waiting[future]
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _run(self) -> None:
        failure: Exception = RunError("the engine was closed before the request was done")
        try:
            while self._next_commands():
                if self._scheduler.has_work:
                    self._scheduler.step()
        except BaseException as error:
            failure = RunError(f"the engine failed: {error!r}")
            failure.__cause__ = error
            self._failure = error
        with self._wake:
            self._closing = True
            waiting, self._waiting = list(self._waiting), {}
        for future in waiting:
            future.set_exception(failure)

    def _next_commands(self) -> bool:
        """Sleep while there is nothing to do, run what callers asked for; False to stop."""
        started = time.perf_counter()
        with self._wake:
            while not (self._inbox or self._closing or self._scheduler.has_work):
                self._wake.wait()
            if self._closing:
                return False
            commands, self._inbox = self._inbox, []
        self._scheduler.stats.idle_seconds += time.perf_counter() - started
        for command in commands:
            command()
        return True
