"""The endpoints: what is checked before a call, and who answers it."""

import asyncio
import hmac
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from medusa_jax.interop.chat import PLAIN
from medusa_jax.serving.echo import Echo, echo_of
from medusa_jax.serving.http.answering import (
    SCORER,
    Answering,
    EventStream,
    Gone,
    unless_gone,
    whole_answer,
    within,
)
from medusa_jax.serving.http.calls import Call, chat_call, completion_call
from medusa_jax.serving.http.metrics import Metrics
from medusa_jax.serving.http.refused import Refused
from medusa_jax.serving.http.replies import Reply, Vocabulary
from medusa_jax.serving.server import Server
from medusa_jax.whole_files import decode_text, parse_json

# How JSON writes halves of surrogate pairs, whole pairs too.
HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
# The page loads nothing from anywhere, and no page may frame it.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True)
class Limits:
    """What a client may ask of the server's patience.

    Attributes:
      body_bytes: of a call.
      seconds: for an answer, waiting included.
      read_seconds: for a client to send its body, and to take a piece that it was sent.
      head_seconds: for a client to send the head of a request once it has begun.
      idle_seconds: a connection may stay open between two requests.
      connections: open at a time; over that, the oldest that waits for its client is closed.
    """

    body_bytes: int = 1 << 20
    seconds: float = 600.0
    read_seconds: float = 30.0
    head_seconds: float = 10.0
    idle_seconds: int = 30
    connections: int = 1000


def make_app(
    server: Server,
    *,
    name: str,
    template: str,
    key: str = "",
    limits: Limits | None = None,
    hosts: Sequence[str] = (),
) -> Starlette:
    """The ASGI application of one server.

    Its `state.stop` ends every call that is not answered yet (503).

    Args:
      name: what clients call the model.
      template: as for `calls.chat_call`.
      key: what clients must send as `Authorization: Bearer KEY`; "" admits every client.
      hosts: the only names that the `Host` of a request may have, if any are given. Without a key, a
        page of another site could reach a server on this machine by a name that resolves to it.
    """
    port = Port(server, name, template, key, limits or Limits())
    check = Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app = Starlette(
        routes=[
            Route("/", port.page),
            Route("/health", port.health),
            Route("/metrics", port.metrics),
            Route("/v1/models", port.models),
            Route("/v1/models/{name:path}", port.models),
            Route("/v1/completions", port.completions, methods=["POST"]),
            Route("/v1/chat/completions", port.chat, methods=["POST"]),
        ],
        exception_handlers={
            Refused: _refused,
            HTTPException: _not_found,
            Exception: _broken,
        },
        middleware=[check] if hosts else [],
    )
    app.state.stop = port.stop
    return app


def whole_page() -> str:
    """The chat page in one piece: its style and scripts take the place of comments that name them."""
    folder = Path(__file__).parent
    text = (folder / "page.html").read_text(encoding="utf-8")
    for name in ("page.css", "page_text.js", "page.js"):
        text = text.replace(f"/* {name} */", (folder / name).read_text(encoding="utf-8"))
    return text


class Port:
    """The endpoints of one server."""

    def __init__(
        self, server: Server, name: str, template: str, key: str, limits: Limits
    ) -> None:
        self._server, self._name, self._template = server, name, template
        self._key, self._limits = key, limits
        self._counts = Metrics(server)
        self._page = whole_page()
        self._vocabulary = Vocabulary(server.model.tokenizer)
        self._stops: set[Callable[[], Any]] = set()  # what ends each call
        self._stopped = False
        self._scoring = 0  # calls whose prompts are scored
        self._started = int(time.time())

    def stop(self) -> None:
        """End every call that is not answered yet; called in the event loop."""
        self._stopped = True
        for stop in list(self._stops):
            stop()

    async def page(self, request: HttpRequest) -> Response:
        """The chat page."""
        return HTMLResponse(self._page, headers=PAGE_HEADERS)

    async def health(self, request: HttpRequest) -> Response:
        """200 while requests are taken."""
        if not self._server.running:
            raise Refused(503, "no requests are taken", code="closed", retry_after=5)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: HttpRequest) -> Response:
        """Counters for Prometheus."""
        self._check_key(request)
        return PlainTextResponse(
            self._counts.page(), media_type="text/plain; version=0.0.4"
        )

    async def models(self, request: HttpRequest) -> Response:
        """The one model, and what the page shows of it."""
        self._check_key(request)
        asked, model = request.path_params.get("name"), self._server.model
        if asked not in (None, self._name):
            raise Refused(404, f"there is no model {asked!r} here", code="model_not_found")
        drafter = model.drafts_by()
        one = {
            "id": self._name,
            "object": "model",
            "created": self._started,
            "owned_by": "medusa_jax",
            "medusa": {
                "context": model.config.max_position,
                "drafter": drafter,
                "tree_nodes": model.tree.n_nodes,
                "dtype": str(model.dtype),
                "slots": self._server.slots,
                "chat": self._template != PLAIN,
            },
        }
        return JSONResponse(one if asked else {"object": "list", "data": [one]})

    async def completions(self, request: HttpRequest) -> Response | EventStream:
        """`POST /v1/completions`."""

        def read(body: Any) -> Call:
            return completion_call(body, self._name, self._server.model, self._check_length)

        return await self._counted("completions", request, read)

    async def chat(self, request: HttpRequest) -> Response | EventStream:
        """`POST /v1/chat/completions`."""

        def read(body: Any) -> Call:
            model, most = self._server.model, self._server.most_new
            return chat_call(
                body, self._name, model, self._template, most, self._check_length
            )

        return await self._counted("chat", request, read)

    async def _counted(
        self, endpoint: str, request: HttpRequest, read: Callable[[Any], Call]
    ) -> Response | EventStream:
        def count(status: int) -> None:
            self._counts.calls.labels(endpoint, str(status)).inc()

        try:
            response = await self._answer(request, read, count)
        except Refused as error:
            count(error.status)
            raise
        except (Gone, ClientDisconnect):
            count(499)  # the client has left
            return Response(status_code=499)
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            count(503)
            raise self._ended() from None
        except Exception:
            count(500)
            raise
        if not isinstance(response, EventStream):
            count(200)
        return response

    async def _answer(
        self,
        request: HttpRequest,
        read: Callable[[Any], Call],
        count: Callable[[int], None],
    ) -> Response | EventStream:
        self._check_key(request)
        task = asyncio.current_task()
        assert task
        limits = self._limits
        self._stops.add(task.cancel)
        try:
            body = await self._within(self._body(request))
            call = await asyncio.to_thread(read, body)
            if self._stopped:
                raise self._ended()
            n, most = len(call.requests), self._server.queue
            if n > most:
                message = f"a call has at most {most} choices here, this one {n}"
                raise Refused(400, message, "n")
            reply = Reply(call, self._vocabulary, self._name)
            if call.echo:
                scored = within(limits.seconds, self._echoes(call))
                reply.echoes = await unless_gone(request.receive, scored)
            answering = Answering(
                self._server, call.requests, self._counts, self._stops, call.empty
            )
            entering = within(limits.seconds, answering.__aenter__())
            await unless_gone(request.receive, entering)
        finally:
            self._stops.discard(task.cancel)
        if self._stopped:
            answering.stop()
        if call.stream:
            return EventStream(answering, reply, limits.seconds, limits.read_seconds, count)
        try:
            await whole_answer(request, answering, reply, limits.seconds)
        finally:
            await answering.__aexit__()
        # In a thread: with the log-probabilities of a long answer it takes its time.
        return await asyncio.to_thread(lambda: JSONResponse(reply.whole()))

    async def _echoes(self, call: Call) -> list[Echo]:
        """The prompts of a call that come back; choices of one prompt share it."""
        loop, echoes = asyncio.get_running_loop(), list[Echo]()
        if self._scoring >= self._server.queue:
            message = f"{self._scoring} calls wait for their prompts to be scored"
            raise Refused(429, message, code="queue_full", retry_after=1)
        self._scoring += 1
        try:
            for text, request in zip(call.echo, call.requests):
                if request.id == 0:
                    work = partial(echo_of, self._server.model, text, request)
                    echo = await loop.run_in_executor(SCORER, work)
                echoes.append(echo)
        finally:
            self._scoring -= 1
        return echoes

    def _check_length(self, prompt: str | list[int]) -> None:
        """Refuse what is too long whatever its tokens are; tokenising a megabyte takes a second."""
        most = self._server.most_prompt
        least = len(prompt)
        if isinstance(prompt, str):
            least = self._vocabulary.least_tokens(prompt)
        if least > most:
            message = f"the prompt has at least {least} tokens, this server takes {most}: shorten it"
            raise Refused(400, message, code="context_length_exceeded")

    @staticmethod
    def _ended() -> Refused:
        return Refused(503, "the server is ending", code="closed", retry_after=5)

    def _check_key(self, request: HttpRequest) -> None:
        if not self._key:
            return
        given = request.headers.get("authorization", "").encode("latin-1")  # as it was sent
        if not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            message = "the key is wrong or missing: send Authorization: Bearer KEY"
            raise Refused(401, message, code="invalid_api_key")

    async def _within(self, work: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(work, self._limits.read_seconds)
        except TimeoutError as error:
            raise Refused(408, "the body took too long", code="timeout") from error

    async def _body(self, request: HttpRequest) -> Any:
        """The JSON of a call.

        Raises:
          Refused: no JSON, by its name or by itself, or too much of it.
        """
        # Pages of other sites can send other types without asking; JSON they cannot.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, "the body should be application/json")
        most = self._limits.body_bytes
        too_large = Refused(413, f"the body is larger than {most} bytes", code="too_large")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise too_large
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise too_large
        try:
            found = parse_json(decode_text(body), parse_constant=_no_constant)
            if HALF_PAIR.search(body):
                json.dumps(found, ensure_ascii=False).encode()  # half of one is no text
            return found
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def _refused(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


async def _not_found(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refused = Refused(
        error.status_code, f"{request.method} {request.url.path}: {error.detail}"
    )
    return JSONResponse(refused.body(), error.status_code, error.headers)


async def _broken(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(Refused(500, "something broke here").body(), 500)
