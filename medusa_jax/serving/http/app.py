"""The endpoints of the port, and the checks before a call."""

import asyncio
import hmac
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from medusa_jax.console import log
from medusa_jax.errors import UserError
from medusa_jax.evaluate.weight_bytes import stored_as
from medusa_jax.serving.http.answer import Answer, ClientGone, Events, unless_gone
from medusa_jax.serving.http.calls import Call, chat_call, completion_call
from medusa_jax.serving.http.connections import Limits
from medusa_jax.serving.http.fields import ERRORS, HttpError, refusal
from medusa_jax.serving.http.infill import InfillReply, infill_call
from medusa_jax.serving.http.metrics import Metrics
from medusa_jax.serving.http.replies import Reply, Vocabulary
from medusa_jax.serving.http.responses import STORED, ResponsesReply, responses_call
from medusa_jax.serving.request import Busy, Stopped
from medusa_jax.serving.server import Server
from medusa_jax.text.chat import PLAIN
from medusa_jax.whole_files import decode_text, parse_json

# Escapes of surrogates in JSON, single or in pairs.
HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
BROKEN = HttpError(500, "something broke here")  # the reason is in the log
# The page loads no external resources, and no page may frame it.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def make_app(
    server: Server,
    *,
    name: str,
    template: str,
    key: str = "",
    limits: Limits | None = None,
    hosts: Sequence[str] = (),
    log_all: bool = False,
) -> Starlette:
    """Return the ASGI application of one server.

    Args:
      name: the model's, for clients.
      template: as for `calls.chat_call`.
      key: clients must send it as `Authorization: Bearer KEY`; "" admits every client.
      hosts: allowed names in a request's `Host`, if any are given. Without a key, a page of another
        site could otherwise reach a local server by a name that resolves to it.
      log_all: log every call; otherwise only those that are refused or fail.
    """
    port = Port(server, name, template, key, limits or Limits(), log_all)
    refusals: Any = dict.fromkeys((HttpError, *ERRORS, HTTPException), port.refuse)
    handling = Middleware(ExceptionMiddleware, handlers=refusals)
    return Starlette(
        routes=[
            Route("/", port.page),
            Route("/health", port.health),
            Route("/metrics", port.metrics),
            Route("/v1/models", port.models),
            Route("/v1/models/{name:path}", port.models),
            Route("/v1/completions", port.completions, methods=["POST"]),
            Route("/v1/chat/completions", port.chat, methods=["POST"]),
            Route("/v1/responses", port.responses, methods=["POST"]),
            Route(
                "/v1/responses/resp_{id:path}",
                port.stored,
                methods=["GET", "POST", "DELETE"],
            ),
            Route("/infill", port.infill, methods=["POST"]),
        ],
        exception_handlers={**refusals, Exception: _broken},
        middleware=[handling, Middleware(behind_hosts, hosts)] if hosts else [],
    )


def behind_hosts(app: ASGIApp, hosts: Sequence[str]) -> ASGIApp:
    """Return the application, which refuses requests to other hosts."""
    known = {host.lower() for host in hosts}

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        host = dict(scope.get("headers", ())).get(b"host", b"").decode("latin-1").lower()
        if scope["type"] == "http" and re.sub(r":\d*$", "", host) not in known:
            hint = "send localhost or the name given as --host, or serve with a key"
            raise HttpError(400, f"the Host of this request is unknown here: {hint}")
        await app(scope, receive, send)

    return checked


def whole_page() -> str:
    """Return the chat page, with its style and scripts in place of the comments that name them."""
    folder = Path(__file__).parent
    text = (folder / "page.html").read_text(encoding="utf-8")
    for name in ("page.css", "page_text.js", "page.js"):
        text = text.replace(f"/* {name} */", (folder / name).read_text(encoding="utf-8"))
    return text


class Port:
    """The endpoints of one server."""

    def __init__(
        self,
        server: Server,
        name: str,
        template: str,
        key: str,
        limits: Limits,
        log_all: bool,
    ) -> None:
        self._server, self._name, self._template = server, name, template
        self._key, self._limits, self._log_all = key, limits, log_all
        self._metrics = Metrics(server)
        self._page = whole_page()
        self._vocabulary = Vocabulary(server.model.tokenizer)
        self._started = int(time.time())

    async def page(self, request: HttpRequest) -> Response:
        return HTMLResponse(self._page, headers=PAGE_HEADERS)

    async def health(self, request: HttpRequest) -> Response:
        """Return 200 while requests are taken and need not wait for a first compilation."""
        if not self._server.running:
            return answer_to(Stopped("no requests are taken"))
        if not self._server.ready:
            message = "compiling the first program"
            return answer_to(HttpError(503, message, None, "compiling", 1))
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: HttpRequest) -> Response:
        """Return the counters for Prometheus."""
        self._check_key(request)
        page = generate_latest(self._metrics.registry)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    async def models(self, request: HttpRequest) -> Response:
        """Return the one model, with the numbers that the page shows."""
        self._check_key(request)
        model_name, model = request.path_params.get("name"), self._server.model
        if model_name not in (None, self._name):
            problem = f"there is no model {model_name!r} here: the model is {self._name!r}"
            raise HttpError(404, problem, code="model_not_found")
        stored = stored_as(model)
        entry = {
            "id": self._name,
            "object": "model",
            "created": self._started,
            "owned_by": "medusa_jax",
            "medusa": {
                "context": model.config.max_position,
                "drafter": model.drafts_by(),
                "tree_nodes": model.tree.n_nodes,
                "depth": model.tree.drafted.depth,
                "copies": bool(model.tree.copied_C.size),
                "dtype": str(model.dtype),
                "weights": max(stored, key=stored.__getitem__),
                "slots": self._server.slots,
                "chat": self._template != PLAIN,
            },
        }
        return JSONResponse(entry if model_name else {"object": "list", "data": [entry]})

    async def completions(self, request: HttpRequest) -> ASGIApp:
        return self._endpoint(completion_call, Reply, self._check_length)

    async def chat(self, request: HttpRequest) -> ASGIApp:
        more = self._template, self._server.most_new, self._check_length
        return self._endpoint(chat_call, Reply, *more)

    async def responses(self, request: HttpRequest) -> ASGIApp:
        more = self._template, self._server.most_new, self._check_length
        return self._endpoint(responses_call, ResponsesReply, *more)

    async def stored(self, request: HttpRequest) -> Response:
        """Refuse to look up an answer."""
        self._check_key(request)
        raise HttpError(404, f"{request.url.path} {STORED}", code="not_found")

    async def infill(self, request: HttpRequest) -> ASGIApp:
        limits = self._server.most_prompt, self._server.most_new
        return self._endpoint(infill_call, InfillReply, *limits)

    def _endpoint(
        self, read: Callable[..., Call], kind: type[Reply], *settings: Any
    ) -> ASGIApp:
        """Return the endpoint whose calls `read` reads with these settings, and replies of this kind answer."""
        given = self._name, self._server.model, *settings
        more = self._vocabulary, self._name
        return partial(self._call, lambda body: kind(read(body, *given), *more))

    async def _call(
        self, reply_of: Callable[[Any], Reply], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a call; count it, and log it when it has ended.

        Args:
          reply_of: reads a JSON body, and makes the reply to it.
        """
        request, start = HttpRequest(scope, receive), time.perf_counter()
        events, response, error = Events(send), None, None
        status, note = 499, "the client left"
        try:
            self._check_key(request)
            reply = await asyncio.to_thread(reply_of, await self._body(request))
            response = await unless_gone(receive, self._answer(reply, events))
            status, note = 200, reply.counts()
        except (ClientGone, ClientDisconnect):
            pass
        except (HttpError, UserError, Busy, Stopped) as refused:
            error = refusal(refused)
        except asyncio.CancelledError:  # uvicorn ends, and its time to drain is over
            error = refusal(Stopped("the server is ending"))
        except Exception as broken:
            status, note = 500, f"{type(broken).__name__}: {broken}"
            if events.headers_sent:
                await events.end(reply.error(BROKEN))
            raise
        finally:
            if error:
                status, note = error.status, str(error)
            endpoint = request.url.path.removeprefix("/v1/").removesuffix("/completions")
            note += f", after {time.perf_counter() - start:.2f} s"
            self._ended(request, endpoint, status, note)
        if error and events.headers_sent:
            await events.end(reply.error(error))
        elif error:
            await answer_to(error)(scope, receive, send)
        elif response:
            await response(scope, receive, send)

    def _ended(self, request: HttpRequest, endpoint: str, status: int, note: str) -> None:
        """Count a request, and log it if it was refused or failed, or all are logged."""
        self._metrics.calls.labels(endpoint, str(status)).inc()
        if self._log_all or (status >= 400 and status != 499):
            log(f"{request.method} {quote(request.url.path)} {status}: {note}")

    async def refuse(self, request: HttpRequest, error: Exception) -> Response:
        """Refuse a request that began no call: of an unknown path or host, or without the key."""
        note, headers = getattr(error, "detail", str(error)), getattr(error, "headers", {})
        if isinstance(error, HTTPException):
            message = f"{request.method} {request.url.path}: {note}"
            error = HttpError(error.status_code, message)
        response = answer_to(error)
        response.headers.update(headers or {})
        self._ended(request, "other", response.status_code, note)
        return response

    async def _answer(self, reply: Reply, events: Events) -> Response | None:
        """Return the answer to a call, or send it as a stream.

        Raises:
          HttpError: no answer in time.
          UserError, Busy, Stopped: as for `Server.submit`; the server ended before the answer did.
        """
        seconds, stream = self._limits.seconds, reply.call.stream
        answering = Answer(self._server, reply, self._metrics)
        try:
            async with asyncio.timeout(seconds), answering:
                if stream:
                    await events.begin()
                    for piece in reply.first():
                        await events.push(piece)
                async for index, delta in answering.deltas():
                    if stream:
                        for piece in reply.piece(index, delta):
                            await events.push(piece)
                    elif delta.ending:
                        reply.endings[index] = delta.ending
        except TimeoutError as error:
            message = f"no answer within {seconds:g} seconds"
            raise HttpError(504, message, code="timeout") from error
        if not stream:
            # In a thread, since the log-probabilities of a long answer take time.
            return await asyncio.to_thread(lambda: JSONResponse(reply.whole()))
        *counts, last = reply.last()
        for count in counts:
            await events.push(count)
        await events.end(last)
        return None

    def _check_length(self, prompt: str | list[int]) -> None:
        """Refuse a prompt that is too long however it is tokenised: some texts of a megabyte take minutes to tokenise."""
        limit, n_tokens = self._server.most_prompt, len(prompt)
        if isinstance(prompt, str):
            n_tokens = self._vocabulary.least_tokens(prompt)
        if n_tokens > limit:
            message = f"the prompt has at least {n_tokens} tokens, this server takes {limit}: shorten it"
            raise HttpError(400, message, code="context_length_exceeded")

    def _check_key(self, request: HttpRequest) -> None:
        if not self._key:
            return
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(sent.strip().encode(), self._key.encode())
        if scheme.lower() != "bearer" or not is_right:
            message = "the key is wrong or missing: send Authorization: Bearer KEY"
            raise HttpError(401, message, code="invalid_api_key")

    async def _body(self, request: HttpRequest) -> Any:
        """Return the JSON of a call.

        Raises:
          HttpError: the body is not JSON, is too large, or took too long.
        """
        # Pages of other sites can send other types without a CORS preflight, but not JSON.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, "the body should be application/json")
        limit = self._limits.body_bytes
        message = f"the body is larger than {limit} bytes"
        too_large = HttpError(413, message, code="too_large")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.read_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as error:
            raise HttpError(408, "the body took too long", code="timeout") from error
        try:
            value = parse_json(decode_text(body), parse_constant=_no_constant)
            if HALF_PAIR.search(body):
                json.dumps(
                    value, ensure_ascii=False
                ).encode()  # raises if one half is alone
            return value
        except UnicodeEncodeError as error:
            problem = "the body has an unpaired surrogate, which is not a valid character"
            raise HttpError(400, problem) from error
        except ValueError as error:
            raise HttpError(400, f"the body is not JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def answer_to(error: Exception) -> Response:
    """Return the answer that tells a client of an error."""
    refused = refusal(error)
    headers = {"retry-after": str(refused.retry_after)} if refused.retry_after else {}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(refused.body(), refused.status, headers)


async def _broken(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(BROKEN.body(), BROKEN.status)
