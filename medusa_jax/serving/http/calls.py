"""From the JSON body of a call to requests: every field is understood or refused by its name."""

import dataclasses
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_jax.api import Model, Options
from medusa_jax.api.prompts import ending_middles, ending_turns
from medusa_jax.constraints import Constraint, constraint_of
from medusa_jax.serving.echo import MOST_BEST
from medusa_jax.serving.http.fields import NEUTRAL, BodyFields, HttpError, Values
from medusa_jax.serving.http.messages import content_of, read_messages
from medusa_jax.serving.http.tools import Tools, asked_tools
from medusa_jax.serving.request import Lines, Request
from medusa_jax.text.chat import PLAIN, SPECIALS, encode_turns, template_source
from medusa_jax.text.fill import Gap, fill_of
from medusa_jax.text.literal_text import literal_text
from medusa_jax.text.tokenizer import Tokenizer, TurnPrompt
from medusa_jax.text.tool_chat import CallForm, call_form
from medusa_jax.whole_files import Json

# Most choices of a call (as many as OpenAI allows), and most stop strings.
MOST_CHOICES, MOST_STOPS = 128, 16
# Characters of a `prediction` that are read: more than there is room for tokens.
MOST_PREDICTED = 1 << 16
# Default number of new tokens of a completion; a chat has no such limit.
COMPLETION_TOKENS = 16
# Letters of llama.cpp's samplers. The options of those that `samplers` leaves out have their defaults.
SAMPLERS = {"temperature": "t", "top_k": "k", "top_p": "p", "min_p": "m"}
# Variables of chat templates that `chat_template_kwargs` cannot set.
RESERVED = {"messages", "tools", "add_generation_prompt", *SPECIALS}
# Defaults of options, and bounds of those that are real numbers.
DEFAULTS = Options(temperature=1.0)
NUMBERS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "epsilon": (0, 1),
    "delta": (0, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-3, 1e3),
}
# vLLM's names of constraints: as fields guided_..., and within `structured_outputs`.
GUIDED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
ANYTHING = (dict, list, str, bool)
NUMBER = re.compile(r"\s*[-+]?[0-9_.]+\s*")
Form = tuple[str, Json]  # the field of a constraint, and its form
# Other fields of `structured_outputs`, with their neutral values.
STRUCTURED: Values = dict.fromkeys(
    ("disable_additional_properties", "disable_any_whitespace", "disable_fallback"),
    (False,),
) | {"structural_tag": (), "whitespace_pattern": ()}


@dataclass(frozen=True)
class Call:
    """A checked body.

    Attributes:
      requests: one for each choice.
      stream: answer in pieces as they come.
      usage: end a stream with the counts of tokens.
      seed: of all choices; drawn if none was given.
      chat: whether it came to `/v1/chat/completions`.
      calls: form of tool calls in the answer and names of the tools; None if it can only be text.
      echo: the text of each request's prompt, if the answer repeats it; else empty.
      empty: whether only the prompt is to be read.
      repeated: fields of the body that a response repeats.
    """

    requests: list[Request]
    stream: bool
    usage: bool
    seed: int
    chat: bool
    calls: tuple[CallForm, Sequence[str]] | None = None
    echo: Sequence[str] = ()
    empty: bool = False
    repeated: Json = field(default_factory=dict)


def completion_call(
    body: Any, name: str, model: Model, check: Callable[[str | list[int]], None]
) -> Call:
    """Read a body of `/v1/completions`.

    Args:
      name: of the model.
      check: raises if a prompt is too long to be tokenised.

    Raises:
      HttpError: a field that is not understood.
    """
    fields = BodyFields(body, {**NEUTRAL, "add_special_tokens": (True,)})
    echo = fields.flag("echo")
    limit = limit_of(fields, COMPLETION_TOKENS)
    options = _options(fields, name, model, limit)
    logprobs = fields.whole("logprobs", None, 0, MOST_BEST)
    options = dataclasses.replace(options, logprobs=logprobs)
    problem = "text, token ids, or a list of one of these"
    prompt = fields.take("prompt", (str, list), problem, "")
    is_single = isinstance(prompt, str) or (prompt and type(prompt[0]) is int)
    prompts = [prompt] if is_single else prompt
    for text in prompts:
        is_ids = isinstance(text, list) and all(type(i) is int for i in text)
        if not (is_ids or isinstance(text, str)):
            raise fields.refused("prompt", f"should be {problem}")
        check(text)
    if not prompts:
        raise fields.refused("prompt", "is an empty list")
    suffix = fields.text("suffix")
    check(suffix)
    if suffix and (echo or not all(isinstance(text, str) for text in prompts)):
        raise fields.refused("suffix", "needs a prompt of text, and no 'echo'")
    with fields.blamed("suffix" if suffix else "prompt"):
        if suffix:
            options = ending_middles(model.tokenizer, model.eos_ids, options)
            fill = fill_of(model.tokenizer)
            tokens = [fill.prompt(Gap(text, suffix)) for text in prompts]
        else:
            tokens = [model.encode(text) for text in prompts]  # once, not for each choice
    call = _call(fields, model, tokens, options, chat=False, empty=limit == 0)
    texts = []
    for text, ids in zip(prompts, tokens) if echo else ():
        check(ids)  # it is scored before the server checks its length
        text = text if isinstance(text, str) else model.tokenizer.decode(ids)
        texts += [text] * (len(call.requests) // len(prompts))
    return dataclasses.replace(call, echo=texts)


def chat_call(
    body: Any,
    name: str,
    model: Model,
    template: str,
    most_new: int,
    check: Callable[[str | list[int]], None],
) -> Call:
    """Read a body of `/v1/chat/completions`.

    Args:
      name: of the model.
      template: the chat template; "" for the tokenizer's own, or "plain": turns one after the
        other with an empty line between, for models without a template.
      most_new: most tokens of an answer.
      check: as for `completion_call`.

    Raises:
      HttpError: a field that is not understood, or a conversation that the template refuses.
    """
    fields = BodyFields(body, {**NEUTRAL, "add_special_tokens": (False,)})
    limit = limit_of(fields, most_new)
    options = _options(fields, name, model, limit, _response_format(fields))
    best = fields.whole("top_logprobs", 0, 0, MOST_BEST)
    if fields.flag("logprobs"):
        options = dataclasses.replace(options, logprobs=best)
    elif best:
        raise HttpError(400, "'top_logprobs' needs 'logprobs'", "top_logprobs")
    turns, tools, form = read_messages(fields), asked_tools(fields), None
    is_answer = turns[-1]["role"] == "assistant"
    if (continued := fields.flag("continue_final_message", is_answer)) and not is_answer:
        raise fields.refused("continue_final_message", "needs a last turn of the assistant")
    if continued:
        fields.flag("add_generation_prompt")  # which vLLM's clients set to false
    tokenizer, variables = model.tokenizer, _variables(fields, model, template, bool(tools))
    with fields.blamed("messages"):
        if tools or any("tool_calls" in t or t["role"] == "tool" for t in turns):
            options, form = _with_tools(fields, options, tools, model, template)
        if template == PLAIN:
            text = "\n\n".join(turn["content"] for turn in turns)
            check(text)
            ids = literal_text(tokenizer).encode(text)
            prompt = model.encode(ids if continued else TurnPrompt(ids))
        else:
            variables |= {"tools": tools.given} if tools else {}
            prompt = encode_turns(tokenizer, turns, variables, template, check, continued)
            options = ending_turns(tokenizer, model.eos_ids, options, template)
    calls = (form, list(tools.callable)) if form and tools else None
    return _call(fields, model, [prompt], options, chat=True, calls=calls, empty=limit == 0)


def limit_of(fields: BodyFields, default: int) -> int:
    """Return the most new tokens: 0 reads only the prompt, and -1 is llama.cpp's "no limit"."""
    names = ("n_predict", "max_completion_tokens", "max_tokens")  # llama.cpp's order
    limits = [fields.whole(name, None, -1) for name in names]
    limit = next((n for n in limits if n is not None), default)
    return 2**31 - 1 if limit < 0 else limit


def lists_sampler(fields: BodyFields, name: str, letter: str) -> bool:
    """Whether `samplers`, names or a text of letters, has this one; it need not be given."""
    listed = fields.take("samplers", (list, str), "a list of names", (name,))
    return name in listed or letter in listed


def _options(
    fields: BodyFields, name: str, model: Model, limit: int, constraint: Form | None = None
) -> Options:
    """Read the options of both endpoints.

    Args:
      limit: maximum number of new tokens.
      constraint: the constraint in `response_format`.
    """
    asked = fields.text("model") or name  # llama.vim sends ""
    if asked != name:
        raise HttpError(
            404, f"there is no model {asked!r} here", "model", "model_not_found"
        )
    options: Json = {
        name: fields.number(name, getattr(DEFAULTS, name), *bounds)
        for name, bounds in NUMBERS.items()
    }
    seed = fields.take("seed", (int,), "a whole number", None)
    options |= {
        "max_new_tokens": max(1, limit),
        "top_k": max(0, fields.whole("top_k", 0, -1)),  # vLLM: -1 keeps all
        "seed": secrets.randbits(32) if seed in (None, -1) else seed % 2**32,
        "stop": _stops(fields),
        "logit_bias": _biases(fields, model.tokenizer),
        "constraint": _constraint(fields, constraint),
    }
    for sampler, letter in SAMPLERS.items():
        if not lists_sampler(fields, sampler, letter):
            options[sampler] = getattr(DEFAULTS, sampler)
    if penalty := fields.number("repeat_penalty", None, *NUMBERS["repetition_penalty"]):
        options["repetition_penalty"] = penalty  # llama.cpp's name
    if fields.flag("ignore_eos"):
        options["eos_ids"] = ()
    return Options(**options)


def _call(
    fields: BodyFields, model: Model, prompts: list[Any], options: Options, **settings: Any
) -> Call:
    """Read the remaining fields; every prompt gets `n` choices."""
    n = fields.whole("n", 1, 1, MOST_CHOICES)
    n = fields.whole("n_cmpl", n, 1, MOST_CHOICES)  # llama.cpp's name
    if (total := len(prompts) * n) > MOST_CHOICES:
        sent = f"{len(prompts)} prompts with n = {n} are {total} choices"
        problem = f"{sent}, more than {MOST_CHOICES}: send several calls"
        raise HttpError(400, problem, "prompt")
    if fields.whole("best_of", n, 1, MOST_CHOICES) not in (1, n):
        raise fields.refused("best_of", "should be n: choices are not ranked here")
    size, problem = model.config.vocab_size, "token ids of the vocabulary"
    stop_ids = fields.take("stop_token_ids", (list,), problem, [])
    if not all(type(i) is int and 0 <= i < size for i in stop_ids):
        raise fields.refused("stop_token_ids", f"should be {problem} 0..{size - 1}")
    request_fields: Json = {
        "drafts": fields.flag("drafts", True),
        "acceptance": fields.take("acceptance", (str,), "the name of a rule", "auto"),
        "stop_ids": frozenset(stop_ids),
        "min_tokens": fields.whole("min_tokens", 0, 0, options.max_new_tokens),
        "predicted": _predicted(fields, model),
        "lines": _lines(fields),
    }
    for name in ("ignore_eos", "min_tokens"):
        # The constraint may leave no token but an end.
        if options.constraint is not None and fields.body.get(name):
            raise fields.refused(name, "does not go together with tools or a constraint")
    stream = fields.flag("stream")
    streaming = fields.inside("stream_options", {"continuous_usage_stats": (False,)})
    usage = streaming.flag("include_usage")
    streaming.flag("include_obfuscation")
    fields.finish()
    requests = [Request(p, options, i, **request_fields) for p in prompts for i in range(n)]
    return Call(requests, stream, usage, options.seed, **settings)


def _lines(fields: BodyFields) -> Lines | None:
    """Read llama.cpp's limits of a completion."""
    indent = fields.whole("n_indent", 0, 0)
    milliseconds = max(0, fields.number("t_max_predict_ms", 0, -1))
    lines = Lines(indent, milliseconds / 1000 or Lines.seconds)
    return None if lines == Lines() else lines


def _predicted(fields: BodyFields, model: Model) -> list[int]:
    """Read OpenAI's `prediction`: text that is expected in the answer."""
    prediction = fields.inside("prediction")
    if not prediction.body:
        return []
    if prediction.text("type") != "content":
        raise prediction.refused("type", "should be content")
    text = content_of(prediction)[:MOST_PREDICTED]
    with fields.blamed("prediction"):
        return model.encode(text) if text else []


def _stops(fields: BodyFields) -> tuple[str, ...]:
    stop = fields.take("stop", (str, list), "a string or a list of strings", [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > MOST_STOPS or any(not isinstance(s, str) or not s for s in stop):
        raise fields.refused("stop", f"should be up to {MOST_STOPS} strings, none empty")
    return tuple(stop)


def _biases(fields: BodyFields, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Read OpenAI's biases by token id, or llama.cpp's, whose tokens may also be text."""
    given = fields.take("logit_bias", (dict, list), "numbers by token id, or pairs", {})
    pairs: Any = [[*one] for one in given.items()] if isinstance(given, dict) else given
    weights: Any = {}
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise fields.refused("logit_bias", "should be pairs of a token and a number")
    for token, bias in pairs:
        is_text = isinstance(token, str) and (pairs is given or not NUMBER.fullmatch(token))
        ids = literal_text(tokenizer).encode(token, add_bos=False) if is_text else [token]
        weights |= {str(i): -100 if bias is False else bias for i in ids}  # False bars
    with fields.blamed("logit_bias"):
        biases = Options(logit_bias=weights).penalties.bias
    if any(not -100 <= bias <= 100 for _, bias in biases):
        raise fields.refused("logit_bias", "should be numbers from -100 to 100")
    return biases


def _constraint(fields: BodyFields, tools: Form | None) -> Constraint | None:
    """Read vLLM's constraints.

    Args:
      tools: name and value of a constraint already read.

    Raises:
      HttpError: a constraint that cannot be served, or two of them.
    """
    forms = [tools] if tools else []
    for name, kind in GUIDED.items():
        value = fields.take(f"guided_{name}", ANYTHING, "a constraint", None)
        if value is not None:
            forms.append((f"guided_{name}", {kind: value}))
    structured = fields.inside("structured_outputs", STRUCTURED)
    for name, kind in {**GUIDED, "json_object": "json_object"}.items():
        value = structured.take(name, ANYTHING, "a constraint", None)
        if value is not None and value is not False:
            forms.append(("structured_outputs", {kind: value}))
    if len(forms) > 1:
        names = " and ".join(repr(name) for name, _ in forms)
        raise HttpError(400, f"an answer has one constraint, not {names}", forms[1][0])
    for name, form in forms:
        with fields.blamed(name):
            return constraint_of(form)
    return None


def _response_format(fields: BodyFields) -> Form | None:
    """Read OpenAI's forms; also a `schema` next to the type, as llama.cpp and Together have it."""
    name = "response_format"
    schema_format = fields.inside(name)
    kind = schema_format.take("type", ANYTHING, "a type", "text")
    if kind not in ("text", "json_object", "json_schema"):
        problem = "should be of type text, json_object, or json_schema with a 'json_schema'"
        raise fields.refused(name, problem)
    if kind == "text":
        return None
    holder = schema_format
    if kind == "json_schema" and "schema" not in schema_format.body:
        holder = schema_format.inside("json_schema")
        holder.text("name"), holder.text("description"), holder.flag("strict")
    schema = holder.take("schema", ANYTHING, "a JSON schema", None)
    if kind == "json_object" and schema in (None, {}, True):
        return name, {"json_object": True}
    if schema is None:
        raise fields.refused(name, "has no 'schema' in 'json_schema'")
    return name, {"json_schema": schema}


def _variables(fields: BodyFields, model: Model, template: str, tools: bool) -> Json:
    """Read the variables of the chat template, such as Qwen's `enable_thinking`."""
    name = "chat_template_kwargs"
    variables = fields.take(name, (dict,), "an object", {})
    ignored = template == PLAIN or not variables
    source = "" if ignored else template_source(model.tokenizer, template, tools)
    names = set(re.findall(r"[^\W\d]\w*", source)) - RESERVED
    if unknown := next((key for key in variables if key not in names), None):
        problem = f"the chat template has no variable {unknown!r} to be set"
        raise HttpError(400, f"{name!r}: {problem}", name)
    return dict(variables)


def _with_tools(
    fields: BodyFields, options: Options, tools: Tools | None, model: Model, template: str
) -> tuple[Options, CallForm | None]:
    """Return options whose text may call these tools, and the form of the calls.

    Raises:
      HttpError: the template knows no tools, or the text has another constraint.
    """
    if template == PLAIN:
        raise HttpError(400, "tools need the model's chat template (serve --chat)", "tools")
    with fields.blamed("tools"):
        form = call_form(model.tokenizer, template)
    if tools is None:
        return options, None
    if options.constraint is not None:
        raise HttpError(400, "an answer has tools or a constraint, not both", "tools")
    return dataclasses.replace(options, constraint=tools.constraint(form)), form
