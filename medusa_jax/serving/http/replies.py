"""The JSON objects of OpenAI's endpoints, whole and in pieces."""

import codecs
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from medusa_jax.api import Result
from medusa_jax.interop.token_bytes import TokenBytes
from medusa_jax.interop.tokenizer import Tokenizer
from medusa_jax.serving.echo import Echo
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
        self._decode, self.skipped = tokenizer.decode, tokenizer.special_ids

    def names(self, token_ids: Iterable[int]) -> dict[int, str]:
        """A different name for each of some tokens; the first ones have their texts.

        Others have the same text, or are parts of characters: "bytes:\\xf0\\x9f", as at OpenAI.
        """
        found: dict[int, str] = {}
        for token_id in token_ids:
            text, spelling = self.name(token_id)
            forms = [text] if text.encode() == bytes(spelling) else []
            forms.append("bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling))
            free = (form for form in forms if form not in found.values())
            found[token_id] = next(free, f"token_id:{token_id}")
        return found

    def dropped(self, token_ids: Iterable[int]) -> str:
        """The space that decoding drops at the beginning of a text with these tokens, or ""."""
        first = next((i for i in token_ids if i not in self.skipped), None)
        if first is None or self.name(first)[1][:1] != [0x20]:
            return ""
        return "" if self._decode([first]).startswith(" ") else " "


class Offsets:
    """Where the texts of tokens begin in a text that grows, in characters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at: int | None = None  # nothing yet

    def push(self, token_ids: Iterable[int]) -> list[int]:
        """The places of the next tokens; parts of a character have that of the character."""
        places = []
        for token_id in token_ids:
            places.append(self._at or 0)
            if token_id not in self._vocabulary.skipped:
                text = self._decoder.decode(bytes(self._vocabulary.name(token_id)[1]))
                if self._at is None:
                    text = text.removeprefix(self._vocabulary.dropped([token_id]))
                self._at = (self._at or 0) + len(text)
        return places


@dataclass
class Reply:
    """The answer to one call, as it is put together.

    Attributes:
      endings: by choice, once it has ended.
      readers: by choice, what tells tool calls from text.
      echoes: by choice, the prompts that come first; none: they do not.
    """

    call: Call
    vocabulary: Vocabulary
    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    endings: dict[int, Ending] = field(default_factory=dict)
    readers: list[CallReader] = field(default_factory=list)
    echoes: list[Echo] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.call.chat else "cmpl-") + secrets.token_hex(12)
        if self.call.calls:
            self.readers = [CallReader(self.call.calls) for _ in self.call.requests]
        self._begun: set[int] = set()
        self._offsets = [Offsets(self.vocabulary) for _ in self.call.requests]

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
                said = {"message": self._message(index, result)}
            before = None
            if self.echoes:
                before = self._logprobs(self.echoes[index], index)
                space = self.vocabulary.dropped(result.token_ids)
                said = {"text": self.echoes[index].text + space + text}
            logprobs = self._logprobs(result, index)
            if before:
                logprobs = {
                    k: [*old, *(logprobs or {}).get(k, [])] for k, old in before.items()
                }
            choices.append(
                {"index": index}
                | said
                | {
                    "logprobs": logprobs,
                    "finish_reason": self._finish_reason(index, ending),
                    "medusa": self._stats(ending),
                }
            )
        return self._object("", choices) | {"usage": self.usage()}

    def first(self) -> list[dict[str, Any]]:
        """What a stream begins with: the role of each choice of a chat, or its prompt."""
        if not self.call.chat:
            return [
                self._piece(i, {"text": echo.text}, self._logprobs(echo, i))
                for i, echo in enumerate(self.echoes)
            ]
        delta = {"role": "assistant", "content": ""}
        return [
            self._piece(i, {"delta": delta}, None) for i in range(len(self.call.requests))
        ]

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """What a stream sends of a delta."""
        said: dict[str, Any] = {"text": delta.text}
        if self.call.chat:
            said = {"delta": self._delta(index, delta)}
        elif self.echoes and delta.token_ids and index not in self._begun:
            said = {"text": self.vocabulary.dropped(delta.token_ids) + delta.text}
            self._begun.add(index)
        asked = self.call.requests[index].options.logprobs is not None
        piece = self._piece(index, said, self._logprobs(delta, index) if asked else None)
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

    def _message(self, index: int, result: Result) -> dict[str, Any]:
        """The message of a whole choice."""
        text, calls = result.text, []
        if self.readers:
            cut = result.finish_reason != "stop"
            text, _ = self.readers[index].push(text, ended=True, cut=cut)
            calls = self.readers[index].calls
        content = text.strip() or None if calls else text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        return message | ({"tool_calls": calls} if calls else {})

    def _delta(self, index: int, delta: Delta) -> dict[str, Any]:
        """The message's part that is new."""
        if not self.readers:
            return {"content": delta.text} if delta.text else {}
        ending = delta.ending
        cut = bool(ending and ending.result.finish_reason != "stop")
        said, calls = self.readers[index].push(delta.text, ending is not None, cut)
        return ({"content": said} if said else {}) | (
            {"tool_calls": calls} if calls else {}
        )

    def _finish_reason(self, index: int, ending: Ending) -> str:
        return finish_reason(ending, bool(self.readers and self.readers[index].calls))

    def _piece(self, index: int, said: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        choice = {"index": index} | said | {"logprobs": logprobs, "finish_reason": None}
        more = {"usage": None} if self.call.usage else {}  # the last one has the counts
        return self._object(".chunk", [choice]) | more

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

    def _logprobs(self, of: Result | Delta | Echo, index: int = 0) -> dict[str, Any] | None:
        """OpenAI's form of log-probabilities, which the two endpoints do not share."""
        if of.logprobs is None or of.top_logprobs is None:
            return None
        tokens = zip(of.token_ids, of.logprobs, of.top_logprobs)
        if not self.call.chat:
            names, likeliest = [], []
            for token_id, logprob, top in tokens:
                # The token itself comes last where it is none of the likeliest.
                by_id = {**dict(top or ()), token_id: logprob}
                named = self.vocabulary.names(by_id)
                names.append(named[token_id])
                likeliest.append(
                    None if top is None else {named[i]: p for i, p in by_id.items()}
                )
            return {
                "tokens": names,
                "token_logprobs": of.logprobs,
                "top_logprobs": likeliest,
                "text_offset": self._offsets[index].push(of.token_ids),
            }

        def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
            token, spelling = self.vocabulary.name(token_id)
            return {"token": token, "logprob": logprob, "bytes": spelling}

        content = [
            entry(i, p) | {"top_logprobs": [entry(*other) for other in top or ()]}
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
