"""The JSON objects of OpenAI's endpoints, whole and in pieces."""

import secrets
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from medusa_jax.api import Result
from medusa_jax.interop.token_bytes import TokenBytes
from medusa_jax.interop.tokenizer import Tokenizer
from medusa_jax.serving.http.calls import Call
from medusa_jax.serving.http.tools import CallReader
from medusa_jax.serving.request import Delta, Ending


class Vocabulary:
    """Single tokens as log-probabilities name them; the likely ones are named again and again.

    Attributes:
      least_tokens: as `TokenBytes.least_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        spelled = TokenBytes(tokenizer)
        self.least_tokens = spelled.least_tokens

        def name(token_id: int) -> tuple[str, list[int]]:
            spelling = spelled.of(token_id)
            return spelling.decode(errors="replace"), list(spelling)

        # Text and bytes of a token; of a part of a character the text is U+FFFD.
        self.name = lru_cache(maxsize=1 << 15)(name)


@dataclass
class Reply:
    """The answer to one call, as it is put together.

    Attributes:
      endings: by choice, once it has ended.
      readers: by choice, what tells tool calls from text.
    """

    call: Call
    vocabulary: Vocabulary
    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    endings: dict[int, Ending] = field(default_factory=dict)
    readers: list[CallReader] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.call.chat else "cmpl-") + secrets.token_hex(12)
        if self.call.calls:
            self.readers = [CallReader(self.call.calls) for _ in self.call.requests]

    @property
    def done(self) -> bool:
        return len(self.endings) == len(self.call.requests)

    def take(self, index: int, delta: Delta) -> None:
        """A piece of choice `index`."""
        if delta.ending:
            self.endings[index] = delta.ending

    def whole(self) -> dict[str, Any]:
        """The object of a call that does not stream."""
        choices = []
        for index in range(len(self.call.requests)):
            ending = self.endings[index]
            result, text = ending.result, ending.result.text
            said: dict[str, Any] = {"text": text}
            if self.call.chat:
                said = {"message": self._message(index, text)}
            choices.append(
                {"index": index}
                | said
                | {
                    "logprobs": self._logprobs(result),
                    "finish_reason": self._finish_reason(index, ending),
                    "medusa": self._stats(ending),
                }
            )
        return self._object("", choices) | {"usage": self.usage()}

    def first(self) -> list[dict[str, Any]]:
        """What a stream begins with: the role of each choice of a chat."""
        if not self.call.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._piece(i, {"delta": delta}, None) for i in range(len(self.call.requests))
        ]

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """What a stream sends of a delta."""
        said: dict[str, Any] = {"text": delta.text}
        if self.call.chat:
            said = {"delta": self._delta(index, delta)}
        asked = self.call.requests[index].options.logprobs is not None
        piece = self._piece(index, said, self._logprobs(delta) if asked else None)
        more: dict[str, Any] = {"parts": delta.parts, "tokens": len(delta.token_ids)}
        if delta.ending:
            reason = self._finish_reason(index, delta.ending)
            piece["choices"][0]["finish_reason"] = reason
            more |= self._stats(delta.ending)
        piece["choices"][0]["medusa"] = more
        return piece

    def last(self) -> list[dict[str, Any]]:
        """What a stream ends with."""
        if not self.call.usage:
            return []
        return [self._object(".chunk", []) | {"usage": self.usage()}]

    def usage(self) -> dict[str, Any]:
        """The counts of tokens; a prompt of several choices counts once."""
        results = [self.endings[i].result for i in sorted(self.endings)]
        # Choices are numbered from 0 for each prompt (`calls._call`).
        firsts = [self.endings[i] for i, r in enumerate(self.call.requests) if r.id == 0]
        read = sum(ending.result.prompt_tokens for ending in firsts)
        made = sum(result.new_tokens for result in results)
        reused = sum(ending.reused_tokens for ending in firsts)
        accepted = sum(ending.accepted_drafts for ending in self.endings.values())
        drafted = sum(ending.drafted for ending in self.endings.values())
        return {
            "prompt_tokens": read,
            "completion_tokens": made,
            "total_tokens": read + made,
            "prompt_tokens_details": {"cached_tokens": reused},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": max(0, drafted - accepted),
            },
        }

    def _message(self, index: int, text: str) -> dict[str, Any]:
        """The message of a whole choice."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.readers:
            said, _ = self.readers[index].push(text, ended=True)
            if calls := self.readers[index].calls:
                message |= {"content": said.strip() or None, "tool_calls": calls}
        return message

    def _delta(self, index: int, delta: Delta) -> dict[str, Any]:
        """The message's part that is new."""
        if not self.readers:
            return {"content": delta.text} if delta.text else {}
        said, calls = self.readers[index].push(delta.text, ended=delta.ending is not None)
        return ({"content": said} if said else {}) | (
            {"tool_calls": calls} if calls else {}
        )

    def _finish_reason(self, index: int, ending: Ending) -> str:
        return finish_reason(ending, bool(self.readers and self.readers[index].calls))

    def _piece(self, index: int, said: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        choice = {"index": index} | said | {"logprobs": logprobs, "finish_reason": None}
        return self._object(".chunk", [choice])

    def _object(self, part: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion" + part if self.call.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _stats(self, ending: Ending) -> dict[str, Any]:
        """Our own field of a choice that has ended; docs/serving.md explains it."""
        result = ending.result
        return {
            "seed": self.call.seed,
            "finish_reason": result.finish_reason,
            "new_tokens": result.new_tokens,
            "steps": result.steps,
            "mean_accepted_length": round(result.mean_accepted_length, 4),
            "acceptance_histogram": result.acceptance_histogram,
            "tree_nodes": ending.tree_nodes,
            "tokens_per_second": round(result.tokens_per_second, 2),
            "waited_seconds": round(ending.waited_seconds, 6),
            "prefill_seconds": round(result.prefill_seconds, 6),
            "decode_seconds": round(result.decode_seconds, 6),
            "reused_tokens": ending.reused_tokens,
        }

    def _token(self, token_id: int) -> str:
        return self.vocabulary.name(token_id)[0]

    def _logprobs(self, of: Result | Delta) -> dict[str, Any] | None:
        """OpenAI's form of log-probabilities, which the two endpoints do not share."""
        if of.logprobs is None or of.top_logprobs is None:
            return None
        tokens = zip(of.token_ids, of.logprobs, of.top_logprobs)
        if not self.call.chat:
            return {
                "tokens": [self._token(i) for i in of.token_ids],
                "token_logprobs": of.logprobs,
                "top_logprobs": [{self._token(i): p for i, p in top} for *_, top in tokens],
            }

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            token, spelling = self.vocabulary.name(token_id)
            return {"token": token, "logprob": logprob, "bytes": spelling}

        content = [
            entry(i, p) | {"top_logprobs": [entry(*other) for other in top]}
            for i, p, top in tokens
        ]
        return {"content": content, "refusal": None}


def finish_reason(ending: Ending, calls: bool = False) -> str:
    """As OpenAI has it, which knows no "context".

    Args:
      calls: whether the answer calls tools.
    """
    if ending.result.finish_reason != "stop":
        return "length"
    return "tool_calls" if calls else "stop"
