"""The fields of a call's JSON objects: each one is read or refused by its name, at every depth."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.serving.request import Busy, NoScores, Stopped, TooCostly, TooLong

Values = Mapping[str, Sequence[Any]]
NOTHING: Values = MappingProxyType({})

# Fields of OpenAI's requests that change nothing in an answer.
IGNORED = {"metadata", "prompt_cache_key", "prompt_cache_retention"}
IGNORED |= {"safety_identifier", "service_tier", "store", "user"}
# llama.cpp's fields without effect here: hints for its cache, limits of time, parameters of samplers that are off, and
# forms of its replies.
LLAMA_CPP = (
    "adaptive_decay backend_sampling cache_prompt dry_allowed_length dry_base dry_penalty_last_n "
    "dry_sequence_breakers dynatemp_exponent id_slot mirostat_eta mirostat_tau n_cache_reuse n_discard n_keep "
    "repeat_last_n response_fields sse_ping_interval t_max_prompt_ms timings_per_token xtc_threshold"
)
IGNORED |= {*LLAMA_CPP.split()}
# Unsupported fields of OpenAI's, vLLM's and llama.cpp's requests, with their neutral values (in addition to null).
NEUTRAL: Values = {
    name: values
    for names, *values in (
        ("add_generation_prompt detokenize include_reasoning skip_special_tokens", True),
        ("spaces_between_special_tokens", True),
        ("continue_final_message early_stopping echo include_stop_str_in_output", False),
        ("return_token_ids return_tokens_as_token_ids use_beam_search", False),
        ("allowed_token_ids audio cache_salt chat_template guided_decoding_backend",),
        ("guided_whitespace_pattern prompt_logprobs reasoning_effort",),
        ("request_id thinking_token_budget truncate_prompt_tokens web_search_options",),
        ("bad_words documents functions logits_processors lora", []),
        ("kv_transfer_params media_io_kwargs mm_processor_kwargs vllm_xargs", {}),
        ("length_penalty typ_p typical_p", 1),
        ("function_call", "none", "auto"),
        ("modalities", ["text"]),
        ("priority", 0),
        ("grammar json_schema suffix", ""),
        ("verbosity", "medium"),
        (
            "dry_multiplier dynatemp_range min_keep mirostat n_probs xtc_probability",
            0,
            False,
        ),
        ("post_sampling_probs return_progress return_tokens verbose", 0, False),
        ("adaptive_target top_n_sigma", -1),
        ("reasoning_format", "auto", "none"),
    )
    for name in str(names).split()
}
# Fields of one endpoint that a client may send to another.
ELSEWHERE = {
    name: path
    for path, names in (
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "chat_template_kwargs messages tool_choice tools"),
        ("/v1/chat/completions", "parallel_tool_calls top_logprobs"),
        ("/v1/responses", "input instructions max_output_tokens"),
        ("/infill", "input_extra input_prefix input_suffix"),
    )
    for name in names.split()
}


class HttpError(Exception):
    """A call that gets an error instead of an answer.

    Attributes:
      status: HTTP status.
      param: the field at fault, if any.
      code: machine-readable name of the error.
      retry_after: seconds to wait before trying again; 0 if trying again does not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients expect."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        about = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


# Status, code and seconds to wait, for the errors of `Server`; the first row that fits counts.
ERRORS: dict[type[Exception], tuple[int, str | None, int]] = {
    TooLong: (400, "context_length_exceeded", 0),
    UserError: (400, None, 0),
    TooCostly: (400, "constraint_too_costly", 0),
    NoScores: (500, "no_scores", 0),
    Stopped: (503, "closed", 5),
    Busy: (429, "queue_full", 1),
}


def refusal(error: Exception) -> HttpError:
    """Return the refusal that tells a client of an error in `ERRORS`."""
    if isinstance(error, HttpError):
        return error
    status, code, seconds = next(
        row for kind, row in ERRORS.items() if isinstance(error, kind)
    )
    return HttpError(status, str(error), code=code, retry_after=seconds)


class BodyFields:
    """The fields of an object. `finish` refuses those that were not read, in inner objects too.

    Args:
      neutral: unsupported names, with their neutral values.
      path: of the object in the call, for messages; "" is the call itself.

    Raises:
      HttpError: the body is not an object.
    """

    def __init__(self, body: Any, neutral: Values, path: str = "") -> None:
        if not isinstance(body, dict):
            subject = repr(path) if path else "the body"
            raise HttpError(400, f"{subject} should be a JSON object", path or None)
        self.body, self.path, self._neutral = body, path, neutral
        self._place = f" in {path!r}" if path else ""
        self._read, self._inside = set() if path else {*IGNORED}, list[BodyFields]()

    def take(self, name: str, kinds: tuple[type, ...], meaning: str, default: Any) -> Any:
        """Return a field's value; the default if it is null or absent."""
        self._read.add(name)
        value = self.body.get(name)
        if value is None:
            return default
        wrong_bool = isinstance(value, bool) and bool not in kinds
        if wrong_bool or not isinstance(value, kinds):
            raise self.refused(name, f"should be {meaning}")
        return value

    def text(self, name: str, default: Any = "") -> Any:
        return self.take(name, (str,), "text", default)

    def flag(self, name: str, default: bool = False) -> bool:
        return self.take(name, (bool,), "true or false", default)

    def number(self, name: str, default: Any, low: float, high: float = math.inf) -> Any:
        value = self.take(name, (int, float), "a number", default)
        if value is not None and not low <= value <= high:
            bounds = f"from {low} to {high}" if high < math.inf else f"at least {low}"
            raise self.refused(name, f"should be {bounds}, not {str(value)[:40]}")
        return value

    def whole(self, name: str, default: Any, low: int, high: int = 2**31 - 1) -> Any:
        """Return a whole number from `low` to `high`."""
        self.take(name, (int,), "a whole number", default)
        return self.number(name, default, low, high)

    def inside(self, name: str, neutral: Values = NOTHING) -> "BodyFields":
        """Return the fields of an inner object; none if it is absent."""
        return self._inner(self.take(name, (dict,), "an object", {}), name, neutral)

    def each(self, name: str, what: str, neutral: Values = NOTHING) -> list["BodyFields"]:
        """Return the fields of each object of a list; [] if it is absent."""
        items = enumerate(self.take(name, (list,), what, []))
        return [self._inner(value, f"{name}[{i}]", neutral) for i, value in items]

    def _inner(self, value: Any, name: str, neutral: Values) -> "BodyFields":
        path = f"{self.path}.{name}".lstrip(".")
        self._inside.append(BodyFields(value, neutral, path))
        return self._inside[-1]

    def refused(self, name: str, problem: str) -> HttpError:
        """Return the error of a field."""
        return HttpError(400, f"{name!r}{self._place} {problem}", name)

    @contextmanager
    def blamed(self, name: str) -> Iterator[None]:
        """Refuse a `UserError` of the block as the fault of a field."""
        try:
            yield
        except UserError as error:
            raise HttpError(400, str(error), name) from error

    def finish(self) -> None:
        """Refuse unknown fields, and unsupported ones with other than neutral values."""
        for inner in self._inside:
            inner.finish()
        for name, value in self.body.items():
            if name in self._read or value is None:
                continue
            if name not in self._neutral:
                hint = did_you_mean(name, self._read)
                if not self.path and name in ELSEWHERE:
                    hint = f": it is one of {ELSEWHERE[name]}"
                message = f"unknown field {name!r}{self._place}{hint}"
                raise HttpError(400, message, name, "unknown_field")
            kinds = [isinstance(x, bool) for x in self._neutral[name] if x == value]
            if isinstance(value, bool) not in kinds:  # 0 is not false
                raise self.refused(name, "is not supported here")
