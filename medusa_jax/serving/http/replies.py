"""The JSON objects of OpenAI's endpoints, whole and in pieces."""

import codecs
import secrets
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from medusa_jax.api import Result
from medusa_jax.serving.http.calls import Call
from medusa_jax.serving.http.fields import HttpError
from medusa_jax.serving.http.tools import CallReader
from medusa_jax.serving.request import Delta, Ending
from medusa_jax.text.token_bytes import TokenBytes
from medusa_jax.text.tokenizer import Tokenizer
from medusa_jax.whole_files import Json


class Vocabulary:
    """Names single tokens for log-probabilities, with a cache.

    Attributes:
      tokenizer: whose tokens they are.
      least_tokens: as `TokenBytes.least_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        token_bytes = TokenBytes(tokenizer)
        self.least_tokens = token_bytes.least_tokens

        def name(token_id: int) -> tuple[str, list[int]]:
            spelling = token_bytes.of(token_id)
            return spelling.decode(errors="replace"), list(spelling)

        # Text and bytes of a token; the text is U+FFFD for part of a character.
        self.name = lru_cache(maxsize=1 << 15)(name)
        self.tokenizer = tokenizer

    def names(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return a unique name for each token: its text if no earlier token has it.

        Otherwise, and for parts of characters, OpenAI's form "bytes:\\xf0\\x9f".
        """
        names: dict[int, str] = {}
        for token_id in token_ids:
            text, spelling = self.name(token_id)
            forms = [text] if text.encode() == bytes(spelling) else []
            forms.append("bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling))
            unused = (form for form in forms if form not in names.values())
            names[token_id] = next(unused, f"token_id:{token_id}")
        return names


class Offsets:
    """Where the texts of tokens begin in a text that grows, in characters.

    Args:
      is_start: decoding may drop the first space of the new tokens, since no text comes before them.
    """

    def __init__(self, vocabulary: Vocabulary, is_start: bool) -> None:
        self._vocabulary, self._is_start = vocabulary, is_start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def push(self, token_ids: Iterable[int], echo: str | None = None) -> list[int]:
        """Return the places of the next tokens; a part of a character has the character's.

        Args:
          echo: the tokens' text if they are the prompt; it may lack a BOS and the space before a word.
        """
        tokenizer, places = self._vocabulary.tokenizer, list[int]()
        for token_id in token_ids:
            is_special = token_id in tokenizer.special_ids
            name, spelling = self._vocabulary.name(token_id)
            is_absent = is_special and echo is None
            text = self._decoder.decode(b"" if is_absent else bytes(spelling))
            # Before the token may come a character that it breaks off.
            places.append(self._at + (len(text) - len(name) if text.endswith(name) else 0))
            if echo is not None:
                forms = text, text.removeprefix(" "), "" if is_special else text
                text = next((f for f in forms if echo.startswith(f, self._at)), text)
            elif text and self._is_start:
                is_kept = tokenizer.decode([token_id]).startswith(" ")
                text, self._is_start = text if is_kept else text.removeprefix(" "), False
            self._at += len(text)
        if echo is not None:
            self._decoder.reset()
            self._at = len(echo)
        return places


class Reply:
    """Builds the answer to one call.

    Attributes:
      endings: the ending of each finished choice.
      echoes: by choice, its prompt, if the answer repeats it.
      readers: by choice, its `CallReader`; empty if the answer can only be text.
    """

    def __init__(self, call: Call, vocabulary: Vocabulary, model: str) -> None:
        self.call, self.vocabulary = call, vocabulary
        kind = "chat.completion" if call.chat else "text_completion"
        number = ("chatcmpl-" if call.chat else "cmpl-") + secrets.token_hex(12)
        self._head: Json = {
            "id": number,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self.endings: dict[int, Ending] = {}
        self.echoes: dict[int, Delta] = {}
        self.readers = [CallReader(*call.calls) for _ in call.requests if call.calls]
        prompts: Any = [request.prompt for request in call.requests]  # token ids
        self._offsets = [
            Offsets(vocabulary, not vocabulary.tokenizer.context(ids)) for ids in prompts
        ]

    def whole(self) -> Json:
        """Return the object of a call that does not stream."""
        choices = [self._choice(i, self.endings[i]) for i in range(len(self.call.requests))]
        return self._head | {"choices": choices, "usage": self.usage()} | self.metrics()

    def _choice(self, index: int, ending: Ending) -> Json:
        result, echo = ending.result, self.echoes.get(index)
        content: Json = {"text": result.text}
        if self.call.chat:
            content = {"message": self._message(index, result)}
        if echo:
            content = {"text": echo.text + result.text}
        logprobs = self._logprobs(index, *([echo] if echo else []), result)
        reason = self._finish_reason(index, ending)
        end = {"logprobs": logprobs, "finish_reason": reason}
        return {"index": index} | content | end | {"medusa": self._stats(ending)}

    def first(self) -> list[Json]:
        """Return the beginning of a stream: the role of each choice of a chat, or the prompts."""
        delta = {"role": "assistant", "content": ""}
        numbers = range(len(self.call.requests)) if self.call.chat else ()
        return [self._piece(i, {"delta": delta}, None) for i in numbers] + [
            self._piece(i, {"text": echo.text}, self._logprobs(i, echo))
            for i, echo in self.echoes.items()
        ]

    def piece(self, index: int, delta: Delta) -> list[Json]:
        """Return the events of the next part of a choice."""
        content: Json = {"text": delta.text}
        if self.call.chat:
            content = {"delta": self._delta(index, delta)}
        piece = self._piece(index, content, self._logprobs(index, delta))
        extension: Json = {"parts": delta.parts, "tokens": len(delta.token_ids)}
        [choice] = piece["choices"]
        if delta.ending:
            self.endings[index] = delta.ending
            choice["finish_reason"] = self._finish_reason(index, delta.ending)
            extension |= self._stats(delta.ending)
        choice["medusa"] = extension
        is_last = len(self.endings) == len(self.call.requests) and not self.call.usage
        return [piece | self.metrics() if is_last else piece]

    def last(self) -> list[Json | str]:
        """Return the end of a stream, with the token counts if requested."""
        if not self.call.usage:
            return ["[DONE]"]
        return [self._event([]) | {"usage": self.usage()} | self.metrics(), "[DONE]"]

    def error(self, error: HttpError) -> Json:
        """Return the event of an error that ends a stream."""
        return error.body()

    def usage(self) -> Json:
        """Return the counts of tokens; a prompt of several choices counts once."""
        endings = self.endings.values()
        # Choices are numbered from 0 for each prompt (`calls._call`).
        firsts = [self.endings[i] for i, r in enumerate(self.call.requests) if r.id == 0]
        prompt_tokens = sum(ending.result.prompt_tokens for ending in firsts)
        new_tokens = sum(ending.result.new_tokens for ending in endings)
        reused = sum(ending.reused_tokens for ending in firsts)
        predicted = sum(len(self.call.requests[i].predicted) for i in self.endings)
        copied = sum(depth < 0 for e in endings for depth in e.result.draft_depths)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "prompt_tokens_details": {"cached_tokens": reused},
            "completion_tokens_details": {
                "accepted_prediction_tokens": min(copied, predicted),
                "rejected_prediction_tokens": max(0, predicted - copied),
            },
        }

    def metrics(self) -> Json:
        """Return vLLM's figures of the drafts of all choices; {} if nothing was drafted."""
        endings = [e for e in self.endings.values() if e.accepted_by_step]
        if not endings:
            return {}
        by_step = [n for ending in endings for n in ending.accepted_by_step]
        depth = max(len(e.result.acceptance_histogram) - 1 for e in endings)
        steps, accepted = len(by_step), sum(by_step)
        drafted = max(accepted, sum(ending.drafted for ending in endings))
        figures = {
            "mean_acceptance_length": 1 + accepted / steps,
            "draft_acceptance_rate": accepted / drafted,
            "acceptance_histogram": [by_step.count(n) for n in range(depth + 1)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": depth,
        }
        return {"metrics": {"speculative_decoding": figures}}

    def counts(self) -> str:
        """Return the counts of tokens in one line, for the log."""
        usage, endings = self.usage(), self.endings.values()
        seconds = max(
            (e.waited_seconds + e.result.prefill_seconds for e in endings), default=0
        )
        prompt_tokens, new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return f"{prompt_tokens} + {new_tokens} tokens, the first of them after {seconds:.2f} s"

    def _message(self, index: int, result: Result) -> Json:
        text, calls = result.text, []
        if self.readers:
            cut = self._is_cut(index, result)
            text, _ = self.readers[index].push(text, ended=True, cut=cut)
            calls = self.readers[index].calls
        content = text.strip() or None if calls else text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        return message | ({"tool_calls": calls} if calls else {})

    def _delta(self, index: int, delta: Delta) -> Json:
        text, calls, ending = delta.text, list[Json](), delta.ending
        if self.readers:
            cut = ending is not None and self._is_cut(index, ending.result)
            text, calls = self.readers[index].push(text, ending is not None, cut)
        content = {"content": text} if text else {}
        return content | ({"tool_calls": calls} if calls else {})

    def _finish_reason(self, index: int, ending: Ending) -> str:
        """Return OpenAI's finish reason, in which a full context counts as "length"."""
        if ending.result.finish_reason != "stop":
            return "length"
        reader = self.readers[index] if self.readers else None
        return "tool_calls" if reader and reader.calls and not reader.half else "stop"

    def _is_cut(self, index: int, result: Result) -> bool:
        """Whether the limit or a stop string ended a chat's answer, and not the model."""
        ends = self.call.requests[index].options.eos_ids or ()
        return not {*result.token_ids[-1:]} & {*ends}

    def _piece(self, index: int, content: Json, logprobs: Json | None) -> Json:
        choice = {"index": index} | content | {"logprobs": logprobs, "finish_reason": None}
        usage = {"usage": None} if self.call.usage else {}  # the last one has the counts
        return self._event([choice]) | usage

    def _event(self, choices: list[Json]) -> Json:
        part = {"object": "chat.completion.chunk"} if self.call.chat else {}
        return self._head | part | {"choices": choices}

    def _stats(self, ending: Ending) -> Json:
        """Return our own field of a choice that has ended (docs/serving.md)."""
        result = ending.result
        return {
            "seed": self.call.requests[0].options.seed,
            "finish_reason": result.finish_reason,
            "new_tokens": result.new_tokens,
            "steps": result.steps,
            "accepted_drafts": ending.accepted_drafts,
            "mean_accepted_length": round(result.mean_accepted_length, 4),
            "acceptance_histogram": result.acceptance_histogram,
            "tree_nodes": ending.tree_nodes,
            "tokens_per_second": round(result.tokens_per_second, 2),
            "waited_seconds": round(ending.waited_seconds, 6),
            "prefill_seconds": round(result.prefill_seconds, 6),
            "decode_seconds": round(result.decode_seconds, 6),
            "reused_tokens": ending.reused_tokens,
        }

    def _logprobs(self, index: int, *parts: Result | Delta) -> Json | None:
        """Return log-probabilities in OpenAI's form, which differs between the two endpoints."""
        if self.call.requests[index].options.logprobs is None:
            return None
        tokens: list[Any] = []
        for of in parts:
            tokens += zip(of.token_ids, of.logprobs or (), of.top_logprobs or ())
        if self.call.chat:
            return {
                "content": [
                    self._entry(i, p) | {"top_logprobs": [self._entry(*x) for x in top]}
                    for i, p, top in tokens
                ],
                "refusal": None,
            }
        echo, push = self.echoes.get(index), self._offsets[index].push
        places = (push(of.token_ids, of.text if of is echo else None) for of in parts)
        names, likeliest = [], []
        for token_id, logprob, top in tokens:
            # The token itself comes last if it is not among the likeliest.
            by_id = {**dict(top or ()), token_id: logprob}
            token_names = self.vocabulary.names(by_id)
            names.append(token_names[token_id])
            best = {token_names[i]: p for i, p in by_id.items()}
            likeliest.append(None if top is None else best)
        return {
            "tokens": names,
            "token_logprobs": [logprob for _, logprob, _ in tokens],
            "top_logprobs": likeliest,
            "text_offset": [at for each in places for at in each],
        }

    def _entry(self, token_id: int, logprob: float) -> Json:
        token, spelling = self.vocabulary.name(token_id)
        return {"token": token, "logprob": logprob, "bytes": spelling}
