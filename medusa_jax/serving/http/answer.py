"""One call on its way from the server's thread to the event loop and to its client."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from starlette.types import Receive, Send

from medusa_jax.api import Result
from medusa_jax.serving.http.metrics import Metrics
from medusa_jax.serving.http.replies import Reply
from medusa_jax.serving.prompt_scores import score_prompt
from medusa_jax.serving.request import Deliver, Delta, Ending, Handle, Stopped
from medusa_jax.serving.server import Server
from medusa_jax.whole_files import Json

T = TypeVar("T")
# Calls with constraints are submitted one at a time, on their own thread: compiling takes up to seconds,
# and other calls must not wait for it.
COMPILER = ThreadPoolExecutor(1, "constraints")
# Prompts are scored one at a time, since they share the device.
SCORER = ThreadPoolExecutor(1, "scoring")
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy in front must not hold pieces back
]


class ClientGone(Exception):
    """The client has closed the connection."""


class Answer:
    """The requests of one call, submitted together. Exiting the context cancels unfinished ones.

    Args:
      reply: the answer to the call; entering the context sets its `echoes`.
    """

    def __init__(self, server: Server, reply: Reply, metrics: Metrics) -> None:
        self._server, self._reply, self._metrics = server, reply, metrics
        self._requests = reply.call.requests
        self._queue: asyncio.Queue[tuple[int, Delta | Stopped]] = asyncio.Queue()
        self._open = set(range(len(self._requests)))
        self._left = False
        self._handles: list[Handle] = []

    async def __aenter__(self) -> "Answer":
        """Submit the requests.

        Raises:
          UserError, Busy, Stopped: as for `Server.submit`.
        """
        server, loop, n = self._server, asyncio.get_running_loop(), len(self._requests)

        def deliver(index: int, delta: Delta | Stopped) -> None:
            # The loop may be closed before the server is.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, delta))

        constrained = any(request.options.constraint for request in self._requests)
        executor = SCORER if self._reply.call.echo else COMPILER if constrained else None
        submit = partial(self._submit, [partial(deliver, i) for i in range(n)])
        try:
            with server.arriving(n, waits=executor is not None) as arrived:
                # In a thread, since tokenising a long text takes time.
                await loop.run_in_executor(executor, submit, arrived)
        except asyncio.CancelledError:  # `submit` may still be waiting for its thread
            self._left = True
            self._cancel()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cancel()

    def _submit(self, delivers: list[Deliver], arrived: float) -> None:
        echoes, call, model = self._reply.echoes, self._reply.call, self._server.model
        start = time.perf_counter()
        for i, (text, request) in enumerate(zip(call.echo, self._requests)):
            scored = text, request.prompt, request.options.logprobs
            # Choices of one prompt share its scores.
            echoes[i] = echoes.get(i - request.id) or score_prompt(
                model, *scored, wanted=lambda: not self._left
            )
        seconds = time.perf_counter() - start
        if call.empty and call.echo:  # scored, so that it need not be read again
            for deliver, request in zip(delivers, self._requests):
                n = len(request.prompt)
                empty = Result("", [], [], "length", n, 0, [], seconds, 0.0, 0.0)
                ending = Ending(empty, start - arrived, 0)
                deliver(Delta([], [], [], [], ending))
        elif not self._left:
            self._handles = self._server.submit_all(self._requests, delivers, arrived)
            if self._left:
                self._cancel()

    def _cancel(self) -> None:
        """Cancel the unfinished requests, if they were submitted."""
        for index in self._open if self._handles else ():
            self._handles[index].cancel()
            self._metrics.cancelled.inc()

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield the number of a choice and its next delta until all choices have ended.

        Raises:
          Stopped: the server ended first, or a constraint met a limit.
        """
        while self._open:
            index, delta = await self._queue.get()
            if isinstance(delta, Stopped):
                raise delta
            if self._reply.call.empty and delta.ending:  # no token was asked for
                delta.ending.result.cut(0, "")
                delta.ending.result.finish_reason = "length"
                delta = Delta([], [], [], [], delta.ending)
            if delta.ending:
                self._open.discard(index)
                self._metrics.ended(delta.ending)
            yield index, delta


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled when the client leaves.

    Raises:
      ClientGone: the client left.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Events:
    """Server-sent events over one connection.

    Attributes:
      headers_sent: whether the status has been sent, so that an error can only be an event.
    """

    def __init__(self, send: Send) -> None:
        self._send, self.headers_sent = send, False

    async def begin(self) -> None:
        """Send the status and the headers."""
        self.headers_sent = True
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def push(self, data: Json | str) -> None:
        """Send an event; waits while the client does not read."""
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        kind = "" if isinstance(data, str) else data.get("type", "")
        event = f"event: {kind}\n" if kind else ""  # of the Responses API
        body = f"{event}data: {text}\n\n".encode(errors="replace")
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, last: Json | str) -> None:
        """End the stream with an event, or with none if it is empty."""
        if last:
            await self.push(last)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
