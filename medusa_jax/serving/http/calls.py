"""From the JSON body of a call to requests: every field is understood or refused by its name."""

import dataclasses
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_jax.api import Model, Options
from medusa_jax.api.results import bias_of
from medusa_jax.errors import UserError
from medusa_jax.evaluate.conversation import ending_turns
from medusa_jax.interop.chat import PLAIN, SPECIALS, encode_turns, template_source
from medusa_jax.interop.literal_text import literal_text
from medusa_jax.interop.tool_chat import CallForm, call_form
from medusa_jax.serving.batch import MOST_BEST
from medusa_jax.serving.http.fields import NEUTRAL, Fields
from medusa_jax.serving.http.formats import asked_constraint
from medusa_jax.serving.http.messages import read_messages
from medusa_jax.serving.http.refused import Refused
from medusa_jax.serving.http.tools import Tools, asked_tools
from medusa_jax.serving.request import Request
from medusa_jax.whole_files import Json

# Most choices of a call, and most stop strings.
MOST_CHOICES, MOST_STOPS = 16, 16
# New tokens of a completion that does not say; a chat goes on until it ends.
COMPLETION_TOKENS = 16
# Variables of chat templates that `chat_template_kwargs` cannot set.
OURS = {"messages", "tools", "add_generation_prompt", *SPECIALS}


@dataclass(frozen=True)
class Call:
    """What a body asks for.

    Attributes:
      requests: one for each choice.
      stream: pieces as they come, not a whole answer.
      usage: streaming ends with the counts of tokens.
      seed: that of all choices, drawn if none was given.
      chat: of `/v1/chat/completions`.
      calls: the form of the tool calls that an answer may hold; None: it is text.
      echo: for each request the text of its prompt, which comes first; (): it does not.
      empty: no token is to be generated.
    """

    requests: list[Request]
    stream: bool
    usage: bool
    seed: int
    chat: bool
    calls: CallForm | None = None
    echo: Sequence[str] = ()
    empty: bool = False


def _stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.take("stop", (str, list), "a string or a list of strings", [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > MOST_STOPS or any(not isinstance(s, str) or not s for s in stop):
        raise Refused(
            400, f"'stop' should be up to {MOST_STOPS} strings, none empty", "stop"
        )
    return tuple(stop)


def _biases(fields: Fields) -> tuple[tuple[int, float], ...]:
    given = fields.take("logit_bias", (dict,), "numbers by token id", {})
    try:
        biases = bias_of(given)
    except UserError as error:
        raise Refused(400, str(error), "logit_bias") from error
    if any(not -100 <= bias <= 100 for _, bias in biases):
        raise Refused(400, "'logit_bias' should be numbers from -100 to 100", "logit_bias")
    return biases


def _stop_ids(fields: Fields, model: Model) -> frozenset[int]:
    size, problem = model.config.vocab_size, "token ids of the vocabulary"
    found = fields.take("stop_token_ids", (list,), problem, [])
    if not all(type(i) is int and 0 <= i < size for i in found):
        raise fields.refused("stop_token_ids", f"should be {problem} 0..{size - 1}")
    return frozenset(found)


def _common(
    fields: Fields, name: str, model: Model, limit: Callable[[], int], chat: bool
) -> tuple[Options, dict[str, Any], int]:
    """Options, what else requests have in common, and how many choices a prompt gets."""
    asked = fields.take("model", (str,), "text", name)
    if asked != name:
        raise Refused(404, f"there is no model {asked!r} here", "model", "model_not_found")
    n = fields.whole("n", 1, 1, MOST_CHOICES)
    seed = fields.take("seed", (int,), "a whole number", None)
    most = limit()
    options: dict[str, Any] = {
        "max_new_tokens": max(1, most),
        "temperature": float(fields.number("temperature", 1.0, 0, 2)),
        "top_p": float(fields.number("top_p", 1.0, 0, 1)),
        "top_k": max(0, fields.whole("top_k", 0, -1, 2**31 - 1)),  # vLLM: -1 keeps all
        "min_p": float(fields.number("min_p", 0.0, 0, 1)),
        "epsilon": float(fields.number("epsilon", 0.09, 0, 1)),
        "delta": float(fields.number("delta", 0.3, 0, 100)),
        "seed": secrets.randbits(32) if seed is None else seed % 2**32,
        "stop": _stops(fields),
        "presence_penalty": float(fields.number("presence_penalty", 0.0, -2, 2)),
        "frequency_penalty": float(fields.number("frequency_penalty", 0.0, -2, 2)),
        "repetition_penalty": float(fields.number("repetition_penalty", 1.0, 1e-3, 1e3)),
        "logit_bias": _biases(fields),
        "constraint": asked_constraint(fields, chat),
    }
    rest: dict[str, Any] = {
        "drafts": fields.flag("drafts", True),
        "acceptance": fields.take("acceptance", (str,), "the name of a rule", "auto"),
        "stop_ids": _stop_ids(fields, model),
        "min_tokens": fields.whole("min_tokens", 0, 0, max(1, most)),
    }
    if fields.flag("ignore_eos"):
        options["eos_ids"] = ()
    if chat:
        best = fields.whole("top_logprobs", 0, 0, MOST_BEST)
        options["logprobs"] = best if fields.flag("logprobs") else None
        if best and options["logprobs"] is None:
            raise Refused(400, "'top_logprobs' needs 'logprobs'", "top_logprobs")
    else:
        options["logprobs"] = fields.whole("logprobs", None, 0, MOST_BEST)
    try:
        return Options(**options), rest, n
    except UserError as error:
        raise Refused(400, str(error)) from error


def _streaming(fields: Fields) -> tuple[bool, bool]:
    stream = fields.flag("stream")
    more = fields.inside("stream_options", {"continuous_usage_stats": (False,)})
    usage = more.flag("include_usage")
    more.flag("include_obfuscation")
    return stream, usage


def _limit(
    fields: Fields, names: tuple[str, ...], default: int, least: int = 1
) -> Callable[[], int]:
    def read() -> int:
        given = [fields.whole(name, None, least, 2**31 - 1) for name in names]
        return next((n for n in given if n is not None), default)

    return read


def _call(
    fields: Fields, prompts: list[Any], common: tuple[Options, Json, int], **more: Any
) -> Call:
    options, rest, n = common
    if len(prompts) * n > MOST_CHOICES:
        raise Refused(400, f"a call has at most {MOST_CHOICES} choices", "n")
    for name in ("ignore_eos", "min_tokens"):
        # The constraint may leave no token but an end.
        if options.constraint is not None and fields.body.get(name):
            raise fields.refused(name, "does not go together with tools or a constraint")
    stream, usage = _streaming(fields)
    fields.finish()
    requests = [Request(p, options, i, **rest) for p in prompts for i in range(n)]
    return Call(requests, stream, usage, options.seed, **more)


def completion_call(
    body: Any, name: str, model: Model, check: Callable[[str | list[int]], None]
) -> Call:
    """What a body of `/v1/completions` asks of the model of that name.

    Args:
      check: raises where a prompt is too long to be tokenised.

    Raises:
      Refused: a field that is not understood.
    """
    fields = Fields(body, {**NEUTRAL, "add_special_tokens": (True,)})
    echo = fields.flag("echo")
    limit = _limit(fields, ("max_tokens",), COMPLETION_TOKENS, least=int(not echo))
    common = _common(fields, name, model, limit, chat=False)
    problem = "text, token ids, or a list of one of these"
    prompt = fields.take("prompt", (str, list), problem, "")
    single = isinstance(prompt, str) or (prompt and type(prompt[0]) is int)
    prompts = [prompt] if single else prompt
    for one in prompts:
        ids = isinstance(one, list) and all(type(i) is int for i in one)
        if not (ids or isinstance(one, str)):
            raise Refused(400, f"'prompt' should be {problem}", "prompt")
        check(one)
    if not prompts:
        raise Refused(400, "'prompt' is an empty list", "prompt")
    try:
        tokens = [model.encode(one) for one in prompts]  # once, not for each choice
    except UserError as error:
        raise Refused(400, str(error), "prompt") from error
    texts: list[str] = []
    if echo:
        for given, read in zip(prompts, tokens):
            check(read)
            own = given if isinstance(given, str) else model.tokenizer.decode(read)
            texts += [own] * common[2]
    return _call(fields, tokens, common, chat=False, echo=texts, empty=limit() == 0)


def chat_call(
    body: Any,
    name: str,
    model: Model,
    template: str,
    most_new: int,
    check: Callable[[str | list[int]], None],
) -> Call:
    """What a body of `/v1/chat/completions` asks for.

    Args:
      name: what the model is called.
      template: the chat template, "" for the tokenizer's own, or "plain": turns one after the
        other with an empty line between, for models that have none.
      check: as for `completion_call`.

    Raises:
      Refused: a field that is not understood, or a conversation that the template refuses.
    """
    fields = Fields(body, {**NEUTRAL, "add_special_tokens": (False,)})
    limit = _limit(fields, ("max_completion_tokens", "max_tokens"), most_new)
    options, rest, n = _common(fields, name, model, limit, chat=True)
    turns, tools, form = read_messages(fields), asked_tools(fields), None
    tokenizer, more = model.tokenizer, _variables(fields, model, template, bool(tools))
    try:
        if tools or any("tool_calls" in t or t["role"] == "tool" for t in turns):
            options, form = with_tools(options, tools, model, template)
        if template == PLAIN:
            text = "\n\n".join(turn["content"] for turn in turns)
            check(text)
            prompt = model.encode(literal_text(tokenizer).encode(text))
        else:
            more |= {"tools": tools.given} if tools else {}
            prompt = encode_turns(tokenizer, turns, more, template, check)
            options = ending_turns(model, options, template)
    except UserError as error:
        raise Refused(400, str(error), "messages") from error
    return _call(fields, [prompt], (options, rest, n), chat=True, calls=form)


def _variables(fields: Fields, model: Model, template: str, tools: bool) -> Json:
    """What a body gives the chat template in addition, such as Qwen's `enable_thinking`."""
    given = fields.take("chat_template_kwargs", (dict,), "an object", {})
    plain = template == PLAIN or not given
    source = "" if plain else template_source(model.tokenizer, template, tools)
    known = set(re.findall(r"[^\W\d]\w*", source)) - OURS
    if unknown := next((name for name in given if name not in known), None):
        problem = f"the chat template has no variable {unknown!r} to be set"
        raise Refused(400, f"'chat_template_kwargs': {problem}", "chat_template_kwargs")
    return dict(given)


def with_tools(
    options: Options, tools: Tools | None, model: Model, template: str
) -> tuple[Options, CallForm | None]:
    """Options whose text may call these tools, and the form of the calls.

    Raises:
      Refused: the template knows none, or the text has another constraint.
    """
    if template == PLAIN:
        raise Refused(400, "the model has no chat template, which tools need", "tools")
    try:
        form = call_form(model.tokenizer, template)
    except UserError as error:
        raise Refused(400, str(error), "tools") from error
    if tools is None:
        return options, None
    if options.constraint is not None:
        raise Refused(400, "an answer has tools or a constraint, not both", "tools")
    return dataclasses.replace(options, constraint=tools.constraint(form)), form
