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
IGNORED = (
    "cache_prompt id_slot n_cache_reuse n_keep t_max_prompt_ms timings_per_token dry_base dry_allowed_length "
    "dry_penalty_last_n dry_sequence_breakers dynatemp_exponent mirostat_eta mirostat_tau repeat_last_n xtc_threshold"
)
# Unsupported fields, with their neutral values.
NEUTRAL: Values = {
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "n_probs"), (0,)),
    **dict.fromkeys(("min_keep", "xtc_probability", "return_tokens"), (0, False)),
    **dict.fromkeys(("grammar", "json_schema"), ("",)),
    "lora": ([],),
    "typical_p": (1,),
}
# Fields with the same meaning in `/v1/completions`.
SHARED = "drafts frequency_penalty ignore_eos logit_bias model presence_penalty stop stream"
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
    """Read a body of `/infill`, for the model of this name.

    Args:
      most_prompt, most_new: most tokens of a prompt and of a text.

    Raises:
      HttpError: a field that is not understood, or the model cannot fill in a middle.
    """
    fields, tokenizer = BodyFields(body, NEUTRAL), model.tokenizer
    for ignored in IGNORED.split():
        fields.take(ignored, ANYTHING, "", None)
    gap = Gap(_needed(fields, "input_prefix"), _needed(fields, "input_suffix"))
    line, files = fields.text("prompt"), []
    for file in fields.each("input_extra", "a list of objects with 'filename' and 'text'"):
        file.take("time", ANYTHING, "", None)  # of llama.vim's own
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
    seconds = fields.number("t_max_predict_ms", 0, 0) / 1000 or math.inf
    lines = Lines(fields.whole("n_indent", 0, 0), seconds)
    paths = fields.take("response_fields", (list,), "a list of paths", [])
    completion: Json = {
        name: fields.take(name, ANYTHING, "", None) for name in SHARED.split()
    }
    completion |= {"model": completion["model"] or None}  # llama.vim sends ""
    completion |= {"prompt": prompt, "max_tokens": max(1, n_new), **_sampling(fields)}
    if "infill" in (fields.body.get("samplers") or ()):
        biases = {str(i): END_BIAS for i in ends or ()} | (completion["logit_bias"] or {})
        completion |= {"temperature": 0, "logit_bias": biases}
    fields.finish()
    call = completion_call(completion, name, model, lambda prompt: None)
    [request] = call.requests
    options = ending_middles(tokenizer, model.eos_ids, request.options)
    settings: Json = vars(call) | {
        "requests": [replace(request, options=options, lines=lines)]
    }
    text, fields_sent = tokenizer.decode(prompt, skip_special=False), tuple(map(str, paths))
    return InfillCall(**settings, text=text, fields=fields_sent, silent=asked == 0)


def _needed(fields: BodyFields, name: str) -> str:
    text: str | None = fields.text(name, None)
    if text is None:
        raise fields.refused(name, "is missing")
    return text


def _sampling(fields: BodyFields) -> Json:
    """Return the fields of `/v1/completions` that sample as these do."""
    listed = fields.take("samplers", (list, str), "a list of names", None)
    seed = fields.take("seed", (int,), "a whole number", None)
    values: Json = {"seed": None if seed == -1 else seed}
    values["repetition_penalty"] = fields.number("repeat_penalty", 1.0, 1e-3)
    for name, (default, neutral) in SAMPLERS.items():
        value = fields.number(name, default, -math.inf)
        is_left_out = isinstance(listed, list) and name not in listed
        values[name] = neutral if is_left_out else max(0, value)
    return values


class InfillReply(Reply):
    """Builds llama.cpp's answer to one call of `/infill`."""

    call: InfillCall

    def whole(self) -> Json:
        """Return the object of a call that does not stream."""
        return self._end(self.endings[0], self.endings[0].result.text)

    def first(self) -> list[Json]:
        return []

    def piece(self, index: int, delta: Delta) -> list[Json]:
        if delta.ending:
            self.endings[index] = delta.ending
            return [self._end(delta.ending, delta.text)]
        part: Json = {"index": 0, "content": delta.text, "tokens": [], "id_slot": 0}
        return [part | {"stop": False}]

    def last(self) -> list[Json | str]:
        return [""]  # no further event

    def _end(self, ending: Ending, content: str) -> Json:
        """Return the object of a finished text; a stream has sent the text before `content`."""
        call, result = self.call, ending.result
        options, is_eos = call.requests[0].options, False
        n_new, n_prompt = result.new_tokens, result.prompt_tokens
        if call.silent:
            n_new, content = 0, ""
        if result.finish_reason == "stop":
            is_eos = result.token_ids[-1] in (options.eos_ids or ())
        stop = "eos" if is_eos else "word" if result.finish_reason == "stop" else "limit"
        prompt: Any = call.requests[0].prompt  # token ids
        said = self.vocabulary.tokenizer.decode_after(prompt, result.token_ids)
        words = options.stop if stop == "word" else ()
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
        answer = {
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": self._head["model"],
            "tokens_predicted": n_new,
            "tokens_evaluated": n_prompt,
            "generation_settings": {name: getattr(options, name) for name in names},
            "prompt": call.text,
            "has_new_line": not call.silent and "\n" in result.text,
            "truncated": False,
            "stop_type": stop,
            "stopping_word": next((word for word in words if word in said), ""),
            "tokens_cached": n_prompt + max(0, n_new - 1),
            "timings": {
                "cache_n": ending.reused_tokens,
                **_times("prompt", n_prompt - ending.reused_tokens, result.prefill_seconds),
                **_times("predicted", n_new, result.decode_seconds),
                "draft_n": ending.drafted,
                "draft_n_accepted": ending.accepted_drafts,
            },
        }
        inner = ((path, _inner(answer, path)) for path in call.fields)
        return {path: x for path, x in inner if x is not None} if call.fields else answer


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
