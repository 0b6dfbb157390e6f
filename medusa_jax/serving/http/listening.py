"""The listening side: connections with deadlines, a limit on them, and a shutdown with one."""

import asyncio
import fcntl
import socket
import struct
import termios
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from medusa_jax.serving.http.app import Limits

# Connections taken at a time before any of them is counted.
BACKLOG = 128


def make_listener(app: Starlette, limits: Limits, drain: int = 60) -> uvicorn.Server:
    """What serves an application of `make_app` on given sockets (`run`).

    Args:
      drain: seconds that running answers have to end after SIGTERM; then they get 503.
    """
    protocol: Any = partial(Connection, limits=limits)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level="warning",
        backlog=BACKLOG,
        timeout_graceful_shutdown=drain + 1,
        timeout_keep_alive=limits.idle_seconds,
        h11_max_incomplete_event_size=64 * 1024,
    )
    return Listener(config, app, drain)


class Listener(uvicorn.Server):
    """uvicorn's server, which would answer 500 to calls that outlast the shutdown."""

    def __init__(self, config: uvicorn.Config, app: Starlette, drain: float) -> None:
        super().__init__(config)
        self._app, self._drain = app, drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new and end what runs."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._drain, self._app.state.stop)
        await super().shutdown(sockets)
        timer.cancel()


class Connection(H11Protocol):
    """One connection of HTTP/1.1, with deadlines that uvicorn lacks.

    A client that has begun a request, or just connected, must send the head of it in time. One that
    takes nothing of what it is sent for too long loses its connection. Where too many are open, the
    oldest that waits for its client is closed, so that the newest is answered.
    """

    def __init__(self, *args: Any, limits: Limits, **more: Any) -> None:
        super().__init__(*args, **more)
        self._limits = limits
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(
            0
        )  # `pause_writing` as soon as anything is unsent
        self._watch_head()
        others: list[Any] = [c for c in self.connections if not c.transport.is_closing()]
        if len(others) > self._limits.connections:
            others = [c for c in others if c is not self and not c.answers]
            oldest = min(others, key=lambda c: (c.called, c._since), default=self)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._unread):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    @property
    def called(self) -> bool:
        """Whether the head of a request has come that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def answers(self) -> bool:
        """Whether a whole request has come that is not answered yet."""
        return self.called and not self.cycle.more_body

    def _watch_head(self) -> None:
        if self._head and self.called:
            self._head.cancel()
            self._head = None
        elif not self._head and not self.called:
            seconds = self._limits.head_seconds
            self._head = self.loop.call_later(seconds, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread:
            self._unread.cancel()

    def _unsent(self) -> int:
        """Bytes that the client has not taken, be they here or with the kernel."""
        link = self.transport.get_extra_info("socket")
        [queued] = struct.unpack(
            "i", fcntl.ioctl(link.fileno(), termios.TIOCOUTQ, bytes(4))
        )
        return self.transport.get_write_buffer_size() + queued

    def _watch_unread(self, before: int | None = None) -> None:
        unsent = self._unsent()
        if before is not None and unsent >= before:
            self.transport.abort()  # nothing was taken since; `close` would wait for it
        else:
            seconds = self._limits.read_seconds
            self._unread = self.loop.call_later(seconds, self._watch_unread, unsent)
