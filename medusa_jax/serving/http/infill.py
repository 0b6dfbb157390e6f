"""`POST /infill` as llama.cpp's server has it: what its plug-ins for editors send and read."""

import math
from dataclasses import replace
from typing import Any

from medusa_jax.api import Model, Options
from medusa_jax.errors import UserError
from medusa_jax.serving.http.calls import Call, completion_call
from medusa_jax.serving.http.fields import NEUTRAL, BodyFields, HttpError
from medusa_jax.serving.http.options import limit_of, lists_sampler
from medusa_jax.serving.http.replies import Reply
from medusa_jax.serving.request import Delta, Ending, Lines
from medusa_jax.text.fill import Gap, fill_of
from medusa_jax.whole_files import Json

ANYTHING = (object, bool)
# Fields with the same meaning in `/v1/completions`.
SHARED = "drafts frequency_penalty ignore_eos logit_bias model n n_cmpl presence_penalty"
SHARED += " n_indent repeat_penalty samplers seed stop stream t_max_predict_ms"
# llama.cpp's defaults of fields that have others in `/v1/completions`.
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# Its sampler "infill" ends the text if 3 x candidates x P(end) > P(text), else it keeps the likeliest tokens. Here:
# greedy decoding that adds log(3 x 2) to the ends, as with two candidates.
END_BIAS = math.log(6)


def infill_call(
    body: Any, name: str, model: Model, most_prompt: int, most_new: int
) -> Call:
    """Read a body of `/infill`, for the model of this name; `own` has the prompt's text and `response_fields`.

    Args:
      most_prompt, most_new: most tokens of a prompt and of a text.

    Raises:
      HttpError: a field that is not understood, or the model cannot fill in a middle.
    """
    fields, tokenizer = BodyFields(body, NEUTRAL), model.tokenizer
    gap = Gap(_needed(fields, "input_prefix"), _needed(fields, "input_suffix"))
    line, files = fields.text("prompt"), []
    for file in fields.each("input_extra", "a list of objects with 'filename' and 'text'"):
        file.take("time", ANYTHING, "", None)  # of llama.vim's own
        files.append((file.text("filename", "tmp"), _needed(file, "text")))
    n_new = min(most_new, limit_of(fields, most_new))
    try:
        ends = model.ending_middles(Options()).eos_ids
    except UserError as error:
        raise HttpError(501, str(error), code="not_supported") from error
    context = model.config.max_position
    room = min(most_prompt, context - min(n_new, context // 4))
    prompt = fill_of(tokenizer).editor_prompt(gap, line, files, room)
    paths = fields.take("response_fields", (list,), "a list of paths", [])
    completion: Json = {
        name: fields.take(name, ANYTHING, "", None) for name in SHARED.split()
    }
    completion |= {"prompt": prompt, "max_tokens": n_new}
    for sampling, default in DEFAULTS.items():
        completion[sampling] = max(0, fields.number(sampling, default, -math.inf))
    fields.finish()
    call = completion_call(completion, name, model, lambda prompt: None)
    options = model.ending_middles(call.requests[0].options)
    if completion["samplers"] and lists_sampler(fields, "infill", "i"):
        biases = dict.fromkeys(ends or (), END_BIAS) | dict(options.logit_bias)
        options = replace(options, temperature=0.0, logit_bias=tuple(biases.items()))
    lines = call.requests[0].lines or Lines()
    requests = [replace(one, options=options, lines=lines) for one in call.requests]
    text = tokenizer.decode(prompt, skip_special=False)
    own = {"prompt": text, "response_fields": [*map(str, paths)]}
    return replace(call, requests=requests, own=own)


def _needed(fields: BodyFields, name: str) -> str:
    text: str | None = fields.text(name, None)
    if text is None:
        raise fields.refused(name, "is missing")
    return text


class InfillReply(Reply):
    """Builds llama.cpp's answer to one call of `/infill`."""

    def whole(self) -> Any:
        """Return the object of a call that does not stream; a list for several choices."""
        ends = sorted(self.endings.items())
        objects = [self._end(i, ending, ending.result.text) for i, ending in ends]
        return objects if len(objects) > 1 else objects[0]

    def first(self) -> list[Json]:
        return []

    def piece(self, index: int, delta: Delta) -> list[Json]:
        if delta.ending:
            self.endings[index] = delta.ending
            return [self._end(index, delta.ending, delta.text)]
        part: Json = {"index": index, "content": delta.text, "tokens": [], "id_slot": 0}
        return [part | {"stop": False}]

    def last(self) -> list[Json | str]:
        return [""]  # no further event

    def _end(self, index: int, ending: Ending, content: str) -> Json:
        """Return the object of a finished text; a stream has sent the text before `content`."""
        call, result = self.call, ending.result
        options, is_eos = call.requests[0].options, False
        n_new, n_prompt = result.new_tokens, result.prompt_tokens
        if result.finish_reason == "stop":
            is_eos = result.token_ids[-1] in (options.eos_ids or ())
        stop = "eos" if is_eos else "word" if result.finish_reason == "stop" else "limit"
        prompt: Any = call.requests[0].prompt  # token ids
        tokenizer, last = self.vocabulary.tokenizer, result.token_ids[-1:]
        said = tokenizer.decode_after(prompt, result.token_ids)
        said += tokenizer.decode(last, skip_special=False)  # a special token's text
        words = [(said.find(w), w) for w in options.stop if stop == "word" and w in said]
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
        answer = {
            "index": index,
            "content": content,
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": self._head["model"],
            "tokens_predicted": n_new,
            "tokens_evaluated": n_prompt,
            "generation_settings": {name: getattr(options, name) for name in names},
            "prompt": call.own["prompt"],
            "has_new_line": "\n" in result.text,
            "truncated": False,
            "stop_type": stop,
            "stopping_word": min(words, default=(0, ""))[1],
            "tokens_cached": n_prompt + max(0, n_new - 1),
            "timings": {
                "cache_n": ending.reused_tokens,
                **_times("prompt", n_prompt - ending.reused_tokens, result.prefill_seconds),
                **_times("predicted", n_new, result.decode_seconds),
                "draft_n": ending.drafted,
                "draft_n_accepted": ending.accepted_drafts,
            },
        }
        paths = call.own["response_fields"]  # such as "timings/prompt_n"; empty: all
        inner = ((path, _inner(answer, path)) for path in paths)
        return {path: x for path, x in inner if x is not None} if paths else answer


def _times(name: str, n: int, seconds: float) -> Json:
    return {
        f"{name}_n": n,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / max(1, n),
        f"{name}_per_second": n / max(seconds, 1e-6),
    }


def _inner(value: Any, path: str) -> Any:
    """Return the value at a path such as "timings/prompt_n"; None if there is none."""
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value
