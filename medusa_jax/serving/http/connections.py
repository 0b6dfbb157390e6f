"""The listening side: connections with deadlines, and a limit on their number."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

# Connections accepted in one go, before any of them is counted.
BACKLOG = 128


@dataclass(frozen=True)
class Limits:
    """Limits on one client.

    Attributes:
      body_bytes: size of a call's body.
      seconds: time for an answer, waiting and compiling a constraint included.
      read_seconds: time for a client to send its body, and to read anything of its answer.
      head_seconds: time for a client to send the head of a request after its first byte.
      idle_seconds: time that a connection may be idle between requests.
      connections: open connections; beyond it, the oldest that waits for its client is closed.
    """

    body_bytes: int = 1 << 20
    seconds: float = 600.0
    read_seconds: float = 30.0
    head_seconds: float = 10.0
    idle_seconds: int = 30
    connections: int = 1000


def make_listener(app: Starlette, limits: Limits, drain: int = 60) -> uvicorn.Server:
    """Return the server of an application of `make_app` on given sockets (`run`).

    Args:
      drain: seconds that running answers have to end after SIGTERM.
    """
    protocol: Any = partial(Connection, limits=limits)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level="warning",
        backlog=BACKLOG,
        timeout_graceful_shutdown=drain,
        timeout_keep_alive=limits.idle_seconds,
        h11_max_incomplete_event_size=64 * 1024,
    )
    return uvicorn.Server(config)


class Connection(H11Protocol):
    """One connection of HTTP/1.1, with deadlines that uvicorn lacks.

    A client that has begun a request, or has just connected, must send the head in time. A client that
    reads nothing of its answer for too long loses its connection. If too many are open, the oldest one
    that waits for its client is closed, so that the newest is answered.
    """

    def __init__(self, *args: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` with the first unsent byte
        self._watch_head()
        idle: list[Any] = [c for c in self.connections if not c.transport.is_closing()]
        if len(idle) > self._limits.connections:
            idle = [c for c in idle if c is not self and not c.answers]
            oldest = min(idle, key=lambda c: (c.called, c._since), default=self)
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
        """Whether the head of an unanswered request has arrived."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def answers(self) -> bool:
        """Whether a whole unanswered request has arrived."""
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
        self._watch_unread(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread:
            self._unread.cancel()

    def _watch_unread(self, previous: int | None) -> None:
        size = self.transport.get_write_buffer_size()
        if previous is not None and size >= previous:
            self.transport.abort()  # `close` would wait for the client
        else:
            seconds = self._limits.read_seconds
            self._unread = self.loop.call_later(seconds, self._watch_unread, size)
