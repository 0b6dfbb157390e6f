"""`POST /infill` as llama.cpp's server has it: what its plug-ins for editors send and read."""

import math
from dataclasses import dataclass, replace
from typing import Any

from medusa_jax.api import Model, Options
from medusa_jax.api.prompts import ending_middles
from medusa_jax.errors import UserError
from medusa_jax.serving.http.calls import Call, completion_call
from medusa_jax.serving.http.fields import BodyFields, HttpError, Values
from medusa_jax.serving.http.replies import Reply
from medusa_jax.serving.request import Delta, Ending, Lines
from medusa_jax.text.fill import Gap, fill_of
from medusa_jax.whole_files import Json

ANYTHING = (object, bool)
# Fields that change nothing here: any row's cache is searched, and reading a prompt has no limit of time.
IGNORED = [
    "cache_prompt",
    "id_slot",
    "n_cache_reuse",
    "n_keep",
    "return_progress",
    "sse_ping_interval",
    "t_max_prompt_ms",
    "timings_per_token",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "mirostat_eta",
    "mirostat_tau",
    "repeat_last_n",
    "xtc_threshold",
]
# Unsupported fields, with their neutral values.
NEUTRAL: Values = {
    name: values
    for names, *values in (
        ("dry_multiplier dynatemp_range min_keep mirostat n_probs xtc_probability", 0),
        ("grammar json_schema", ""),
        ("n_cmpl typical_p", 1),
        ("post_sampling_probs return_tokens", False),
        ("lora", []),
        ("top_n_sigma", -1),
    )
    for name in str(names).split()
}
# Fields with the same meaning in `/v1/completions`.
SHARED = [
    "drafts",
    "frequency_penalty",
    "ignore_eos",
    "model",
    "presence_penalty",
    "stop",
    "stream",
]
# llama.cpp's samplers: the default of each one's field, and its value for a sampler that is not listed.
SAMPLERS = {
    "temperature": (0.8, 1.0),
    "top_k": (40, 0),
    "top_p": (0.95, 1.0),
    "min_p": (0.05, 0.0),
}
# Its sampler "infill" draws an end if an end's probability, times 3 and the number of candidates, exceeds that of
# the text; of the text it keeps the likeliest. Here that is greedy, with this bias for ends: two candidates.
END_BIAS = math.log(6)


@dataclass(frozen=True)
class InfillCall(Call):
    """A checked body of `/infill`.

    Attributes:
      text: the prompt.
      fields: paths of the answer's fields to send, such as "timings/prompt_n"; empty: all.
      silent: only the prompt is to be read.
    """

    text: str = ""
    fields: tuple[str, ...] = ()
    silent: bool = False


def infill_call(
    body: Any, name: str, model: Model, most_prompt: int, most_new: int
) -> InfillCall:
    """Read a body of `/infill`.

    Args:
      name: of the model.
      most_prompt, most_new: most tokens of a prompt and of a text.

    Raises:
      HttpError: a field that is not understood, or the model cannot fill in a middle.
    """
    fields, tokenizer = BodyFields(body, NEUTRAL), model.tokenizer
    for ignored in IGNORED:
        fields.take(ignored, ANYTHING, "anything", None)
    gap = Gap(_needed(fields, "input_prefix"), _needed(fields, "input_suffix"))
    line, files = fields.text("prompt"), []
    for file in fields.each("input_extra", "a list of objects with 'filename' and 'text'"):
        file.take("time", ANYTHING, "anything", None)  # of llama.vim's own
        files.append((file.text("filename", "tmp"), _needed(file, "text")))
    asked = fields.whole("n_predict", -1, -1, 2**31 - 1)
    n_new = min(most_new, asked if asked >= 0 else most_new)
    try:
        ends = ending_middles(tokenizer, model.eos_ids, Options()).eos_ids
    except UserError as error:
        raise HttpError(501, str(error), code="not_supported") from error
    context = model.config.max_position
    room = min(most_prompt, context - min(n_new, context // 4))
    prompt = fill_of(tokenizer).editor_prompt(gap, line, files, room)
    indent = fields.whole("n_indent", 0, 0)
    seconds = fields.number("t_max_predict_ms", 0, 0) / 1000 or math.inf
    paths = fields.take("response_fields", (list,), "a list of paths", [])
    completion: Json = {name: fields.take(name, ANYTHING, "", None) for name in SHARED}
    completion |= _sampling(fields, ends)
    completion |= {"prompt": prompt, "max_tokens": max(1, n_new)}
    # llama.vim sends "" for the only model.
    completion["model"] = completion["model"] or None
    fields.finish()
    call = completion_call(completion, name, model, lambda prompt: None)
    [request] = call.requests
    options = ending_middles(tokenizer, model.eos_ids, request.options)
    request = replace(request, options=options, lines=Lines(indent, seconds))
    settings: Json = vars(call) | {"requests": [request]}
    text = tokenizer.decode(prompt, skip_special=False)
    return InfillCall(
        **settings, text=text, fields=tuple(map(str, paths)), silent=asked == 0
    )


def _needed(fields: BodyFields, name: str) -> str:
    text = fields.text(name, None)
    if text is None:
        raise fields.refused(name, "is missing")
    return str(text)


def _sampling(fields: BodyFields, ends: tuple[int, ...]) -> Json:
    """Return the fields of `/v1/completions` that sample as these do.

    Args:
      ends: the tokens that end a text.
    """
    listed = fields.take("samplers", (list, str), "a list of names", None)
    values: Json = {}
    for name, (default, neutral) in SAMPLERS.items():
        value = fields.number(name, default, -math.inf)
        is_listed = not isinstance(listed, list) or name in listed
        values[name] = max(0, value) if is_listed else neutral
    problem = "a list of pairs of a token id and a number"
    pairs = fields.take("logit_bias", (list, dict), problem, [])
    pairs = [*pairs.items()] if isinstance(pairs, dict) else pairs
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise fields.refused("logit_bias", f"should be {problem}")
    values["logit_bias"] = {str(token): bias for token, bias in pairs}
    if isinstance(listed, list) and "infill" in listed:
        values["temperature"] = 0
        values["logit_bias"] = {str(i): END_BIAS for i in ends} | values["logit_bias"]
    seed = fields.take("seed", (int,), "a whole number", None)
    values["seed"] = None if seed == -1 else seed
    values["repetition_penalty"] = fields.number("repeat_penalty", 1.0, 1e-3)
    return values


class InfillReply(Reply):
    """Builds llama.cpp's answer to one call of `/infill`."""

    call: InfillCall
    last_event = ""

    def whole(self) -> Json:
        """Return the object of a call that does not stream."""
        return self._end(self.endings[0], self.endings[0].result.text)

    def first(self) -> list[Json]:
        return []

    def piece(self, index: int, delta: Delta) -> Json:
        if delta.ending:
            self.endings[index] = delta.ending
            return self._end(delta.ending, delta.text)
        return {
            "index": 0,
            "content": delta.text,
            "tokens": [],
            "stop": False,
            "id_slot": 0,
        }

    def last(self) -> list[Json]:
        return []

    def _end(self, ending: Ending, content: str) -> Json:
        """Return the object of a finished text; a stream has sent the text before `content`."""
        call, result = self.call, ending.result
        options = call.requests[0].options
        n_new = 0 if call.silent else result.new_tokens
        kind, word = self._stop()
        whole = {
            "index": 0,
            "content": "" if call.silent else content,
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": self._head["model"],
            "tokens_predicted": n_new,
            "tokens_evaluated": result.prompt_tokens,
            "generation_settings": {
                "n_predict": 0 if call.silent else options.max_new_tokens,
                "seed": options.seed,
                "temperature": options.temperature,
                "top_k": options.top_k,
                "top_p": options.top_p,
                "min_p": options.min_p,
                "stop": list(options.stop),
            },
            "prompt": call.text,
            "has_new_line": not call.silent and "\n" in result.text,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": result.prompt_tokens + max(0, n_new - 1),
            "timings": {
                "cache_n": ending.reused_tokens,
                "draft_n": ending.drafted,
                "draft_n_accepted": ending.accepted_drafts,
                **_times(
                    "prompt",
                    result.prompt_tokens - ending.reused_tokens,
                    result.prefill_seconds,
                ),
                **_times("predicted", n_new, result.decode_seconds),
            },
        }
        return (
            {path: x for path in call.fields if (x := _inner(whole, path)) is not None}
            if call.fields
            else whole
        )

    def _stop(self) -> tuple[str, str]:
        """Return why the text ended in llama.cpp's terms, and the stop string that ended it."""
        result, options = self.endings[0].result, self.call.requests[0].options
        if result.finish_reason != "stop":
            return "limit", ""
        if result.token_ids[-1] in (options.eos_ids or ()):
            return "eos", ""
        text = self.vocabulary.decode(result.token_ids)
        return "word", next((stop for stop in options.stop if stop in text), "")


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
