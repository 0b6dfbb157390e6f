"""The fields of a call's JSON objects, each understood or refused by its name, at every depth."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from medusa_jax.errors import did_you_mean
from medusa_jax.serving.http.refused import Refused

Values = Mapping[str, tuple[Any, ...]]

# Fields of OpenAI's requests that change nothing in an answer.
IGNORED = {
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
}  # fmt: skip
# Fields of OpenAI's and vLLM's requests that are not built, and the values (besides null) that ask
# for nothing.
NEUTRAL: Values = {
    **dict.fromkeys(
        ("add_generation_prompt", "detokenize", "include_reasoning", "skip_special_tokens",
         "spaces_between_special_tokens"),
        (True,),
    ),
    **dict.fromkeys(
        ("continue_final_message", "early_stopping", "echo", "include_stop_str_in_output",
         "return_token_ids", "return_tokens_as_token_ids", "use_beam_search"),
        (False,),
    ),
    **dict.fromkeys(
        ("allowed_token_ids", "audio", "cache_salt", "chat_template", "guided_decoding_backend",
         "guided_whitespace_pattern", "prediction", "prompt_logprobs", "reasoning_effort",
         "request_id", "thinking_token_budget", "truncate_prompt_tokens",
         "web_search_options"),
        (),
    ),
    **dict.fromkeys(("bad_words", "documents", "functions", "logits_processors"), ([],)),
    **dict.fromkeys(
        ("kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs"), ({},)
    ),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "priority": (0,),
    "suffix": ("",),
    "verbosity": ("medium",),
}  # fmt: skip


class Fields:
    """The fields of an object, each read once; `finish` refuses unread ones.

    Args:
      body: the object.
      where: its place in the call, for messages; "" is the call itself.
      ignored: names that change nothing.
      neutral: names that are not built, with the values that ask for nothing.

    Raises:
      Refused: it is no object.
    """

    def __init__(
        self,
        body: Any,
        where: str = "",
        ignored: Collection[str] = (),
        neutral: Values | None = None,
    ) -> None:
        if not isinstance(body, dict):
            what = repr(where) if where else "the body"
            raise Refused(400, f"{what} should be a JSON object", where or None)
        self.body, self._where, self._neutral = body, where, neutral or {}
        self._read = set(ignored)

    def take(self, name: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        """The value of a field; null and absence are the default."""
        self._read.add(name)
        value = self.body.get(name)
        if value is None:
            return default
        wrong_bool = isinstance(value, bool) and bool not in kinds
        if wrong_bool or not isinstance(value, kinds):
            raise self.refused(name, f"should be {what}")
        return value

    def text(self, name: str, default: Any = "") -> Any:
        """Text."""
        return self.take(name, (str,), "text", default)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        return self.take(name, (bool,), "true or false", default)

    def number(self, name: str, default: Any, low: float, high: float = math.inf) -> Any:
        """A number from `low` to `high`."""
        value = self.take(name, (int, float), "a number", default)
        if value is not None and not low <= value <= high:
            most = f"from {low} to {high}" if high < math.inf else f"at least {low}"
            raise self.refused(name, f"should be {most}, not {str(value)[:40]}")
        return value

    def whole(self, name: str, default: Any, low: float, high: float = math.inf) -> Any:
        """A whole number from `low` to `high`."""
        self.take(name, (int,), "a whole number", default)
        return self.number(name, default, low, high)

    def inside(self, name: str, neutral: Values | None = None) -> "Fields":
        """The fields of an object within; absence is an empty one."""
        value = self.take(name, (dict,), "an object", {})
        return Fields(value, f"{self._where}.{name}".lstrip("."), neutral=neutral)

    def refused(self, name: str, problem: str) -> Refused:
        """The error of a field."""
        place = f" in {self._where!r}" if self._where else ""
        return Refused(400, f"{name!r}{place} {problem}", name)

    def finish(self) -> None:
        """Refuse what is unknown, and what is known but cannot be done."""
        for name, value in self.body.items():
            if name in self._read:
                continue
            if name not in self._neutral:
                near = did_you_mean(name, {*self._read, *self._neutral})
                place = f" in {self._where!r}" if self._where else ""
                message = f"unknown field {name!r}{place}{near}"
                raise Refused(400, message, name, "unknown_field")
            # 0 is not false.
            same = [x for x in self._neutral[name] if x == value]
            if value is not None and not any(
                isinstance(x, bool) == isinstance(value, bool) for x in same
            ):
                raise self.refused(name, "is not supported here")
