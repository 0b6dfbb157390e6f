"""From the JSON body of a call to requests: every field is understood or refused by its name."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_jax.api import Model, Options
from medusa_jax.serving.http.fields import NEUTRAL, BodyFields, HttpError
from medusa_jax.serving.http.messages import content_of, read_messages
from medusa_jax.serving.http.options import limit_of, options_of
from medusa_jax.serving.http.tools import Tools, asked_tools
from medusa_jax.serving.request import MOST_BEST, Lines, Request
from medusa_jax.text.chat import PLAIN, SPECIALS, encode_turns, template_source
from medusa_jax.text.fill import Gap, fill_of
from medusa_jax.text.jinja import variables_of
from medusa_jax.text.literal_text import literal_text
from medusa_jax.text.tokenizer import TurnPrompt
from medusa_jax.text.tool_chat import CallForm, call_form
from medusa_jax.whole_files import Json

# Most choices of a call, as many as OpenAI allows.
MOST_CHOICES = 128
# Characters of a `prediction` that are read: more than there is room for tokens.
MOST_PREDICTED = 1 << 16
# Default number of new tokens of a completion; a chat has no such limit.
COMPLETION_TOKENS = 16
# Variables of chat templates that `chat_template_kwargs` cannot set.
RESERVED = {"messages", "tools", "add_generation_prompt", *SPECIALS}


@dataclass(frozen=True)
class Call:
    """A checked body.

    Attributes:
      requests: one for each choice.
      stream: answer in pieces as they come.
      usage: end a stream with the counts of tokens.
      chat: whether it came to `/v1/chat/completions`.
      calls: form of tool calls in the answer and names of the tools; None if it can only be text.
      echo: the text of each request's prompt, if the answer repeats it; else empty.
      empty: whether only the prompt is to be read.
      own: fields that only the replies of this endpoint read.
    """

    requests: list[Request]
    stream: bool
    usage: bool
    chat: bool
    calls: tuple[CallForm, Sequence[str]] | None = None
    echo: Sequence[str] = ()
    empty: bool = False
    own: Json = field(default_factory=dict)


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
    options = options_of(fields, name, model, limit)
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
            options = model.ending_middles(options)
            fill = fill_of(model.tokenizer)
            tokens = [fill.prompt(Gap(text, suffix)) for text in prompts]
        else:
            tokens = [model.encode(text) for text in prompts]  # once, not for each choice
    call = _call(fields, model, tokens, options, chat=False, empty=limit == 0)
    texts = []
    for text, ids in zip(prompts, tokens) if echo else ():
        check(ids)  # it is scored before the server checks its length
        if not isinstance(text, str):
            text = model.tokenizer.decode(ids, skip_special=False)
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
    options = options_of(fields, name, model, limit)
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
            options = model.ending_turns(options, template)
    calls = (form, list(tools.callable)) if form and tools else None
    return _call(fields, model, [prompt], options, chat=True, calls=calls, empty=limit == 0)


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
        "stop_ids": stop_ids,
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
    fields.take("metadata", (dict,), "an object", {})
    fields.finish()
    requests = [Request(p, options, i, **request_fields) for p in prompts for i in range(n)]
    return Call(requests, stream, usage, **settings)


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


def _variables(fields: BodyFields, model: Model, template: str, tools: bool) -> Json:
    """Read the variables of the chat template, such as Qwen's `enable_thinking`."""
    name = "chat_template_kwargs"
    variables = fields.take(name, (dict,), "an object", {})
    ignored = template == PLAIN or not variables
    source = "" if ignored else template_source(model.tokenizer, template, tools)
    with fields.blamed(name):
        names = variables_of(source) - RESERVED
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
