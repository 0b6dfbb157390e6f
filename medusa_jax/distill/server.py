"""Answers of a server with OpenAI's chat completions, for `distill --server`; tokenised here."""

import http.client
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from medusa_jax.arch import LlamaConfig
from medusa_jax.console import inform
from medusa_jax.distill.conversation import Take, Turn
from medusa_jax.distill.writer import Writer
from medusa_jax.errors import UserError, first_line
from medusa_jax.files.hf import model_shape
from medusa_jax.text.tokenizer import Tokenizer, load_tokenizer
from medusa_jax.training.data.conversations import THOUGHTS_IN
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json

# Seconds for one answer, and statuses with which a server refuses one conversation.
TIMEOUT, REFUSED = 1800, (400, 413, 422)
# What calls and malformed replies raise.
NO_API = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)


class ServedModel(NamedTuple):
    """A server's model, as far as `distill` needs it.

    Attributes:
      url, name: of the API, and of the first model that it lists.
      tokenizer, config: of the model that heads will draft for.
    """

    url: str
    name: str
    tokenizer: Tokenizer
    config: LlamaConfig
    tree: Tree = Tree.none()

    @classmethod
    def open(cls, url: str, directory: str) -> "ServedModel":
        """Ask the server for its model; the tokenizer is that of a directory."""
        url = url.rstrip("/")
        name = call(f"{url}/models", lambda reply: str(reply["data"][0]["id"]))
        return cls(url, name, load_tokenizer(directory), model_shape(directory))


@dataclass
class ServerWriter(Writer):
    """A `Writer` whose answers are a server's, `batch_size` at a time; its model is a `ServedModel`."""

    model: Any

    def decode(self, turns: list[Turn], numbers: list[int], take: Take) -> None:
        """Ask for all turns, on threads; they are taken here."""
        jobs, done = deque(range(len(turns))), queue.SimpleQueue[Any]()

        def work() -> None:
            while jobs:
                i = jobs.popleft()
                try:
                    done.put((i, self.ask(turns[i], numbers[i])))
                except Exception as error:
                    jobs.clear()
                    done.put((i, error))

        for _ in turns[: self.batch_size]:
            threading.Thread(target=work, daemon=True).start()
        start, spent, current = time.perf_counter(), self.seconds, 0
        encode = self.model.tokenizer.encode
        for _ in turns:
            i, result = done.get()
            if isinstance(result, Exception):
                raise result
            current += len(result.token_ids) + len(encode(result.thoughts))
            self.seconds = spent + time.perf_counter() - start
            self.show(current)
            take(i, result)
        self.tokens += current

    def ask(self, turn: Turn, number: int) -> SimpleNamespace:
        """The server's answer in the form of a `Result`; an empty one if it refuses this conversation."""
        options, fields = self.options, ("role", "content")
        body = {
            "model": self.model.name,
            "messages": [{x: said[x] for x in fields} for said in turn.messages],
            "max_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "seed": options.seed + number,
        }
        try:
            answer = call(f"{self.model.url}/chat/completions", answer_of, body)
        except urllib.error.HTTPError as error:
            inform(f"seed {number} is refused: {error.reason}")
            answer = SimpleNamespace(text="", thoughts="", finish_reason="stop")
        answer.token_ids, answer.steps = self.model.tokenizer.encode(answer.text), 0
        return answer


def answer_of(reply: Any) -> SimpleNamespace:
    """A reply in the form of a `Result`, with the reasoning, under llama.cpp's or vLLM's name, as `thoughts`."""
    message = reply["choices"][0]["message"]
    fields = (message.get(name) for name in THOUGHTS_IN)
    return SimpleNamespace(
        text=message["content"] or "",
        thoughts=next((x.strip() for x in fields if isinstance(x, str) and x), ""),
        finish_reason=reply["choices"][0]["finish_reason"],
    )


def call(url: str, read: Any, body: Json | None = None) -> Any:
    """Send a request (POST if there is a body) and return `read(reply)`.

    Raises:
      HTTPError: it refuses this body; the reason is its text.
      UserError: it cannot be reached, refuses every call or answers something else.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
            return read(json.load(reply))
    except urllib.error.HTTPError as error:
        error.msg = f"{error.code} {error.read(200).decode(errors='replace')}"
        if error.code in REFUSED and body:
            raise
        raise UserError(f"{url} answers {error.reason}") from error
    except NO_API as error:
        raise UserError(
            f"{url} does not answer as OpenAI's API: {first_line(error)}"
        ) from error
