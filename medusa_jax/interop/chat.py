"""Conversations to token ids, with a mark on every token that the assistant has to produce.

Which tokens those are comes from the template itself, in this order: a shipped template (or the
tokenizer's own) whose assistant text stands between `{% generation %}` and
`{% endgeneration %}`; else the tokenizer's own template rendered turn by turn, where what an
assistant turn adds behind the generation prompt is the assistant's. An end-of-text token right
behind an assistant turn counts: the model has to learn to stop.
"""

import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.interop.literal_text import Message, Span, literal_text
from medusa_jax.interop.rendering import Renderer
from medusa_jax.interop.tokenizer import Tokenizer

TEMPLATES = {
    "vicuna": "vicuna",
    "llama2": "llama2",
    "llama3": "llama3",
    "zephyr": "zephyr",
    "mistral": "mistral",
    "chatml": "chatml",
    "qwen": "chatml",
}

# What ends a turn where that is not the tokenizer's own EOS.
TURN_ENDS = {"llama3": "<|eot_id|>", "chatml": "<|im_end|>"}

# Of all threads: one conversation at a time.
RENDERER = Renderer()

MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}

MESSAGE_ROLES = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}


# What templates may read beside the messages.
SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")


class SampleError(UserError):
    """One conversation cannot be used; a trainer skips it and counts the reason."""


def parse_sharegpt(record: Any) -> tuple[list[Message], str]:
    """`{"conversations": [{"from": "human", "value": ...}, ...]}` -> (messages, "").

    A conversation that cannot be trained on gives ([], why). Assistant turns before the first
    user turn (ShareGPT has many conversations cut there) and user turns behind the last answer
    are dropped.
    """
    return _parse(record, "conversations", "from", "value", SHAREGPT_ROLES)


def parse_messages(record: Any) -> tuple[list[Message], str]:
    """`{"messages": [{"role": "user", "content": ...}, ...]}` -> (messages, "") or ([], why)."""
    return _parse(record, "messages", "role", "content", MESSAGE_ROLES)


def _parse(
    record: Any, field: str, role_field: str, text_field: str, roles: dict[str, str]
) -> tuple[list[Message], str]:
    turns = record.get(field) if isinstance(record, dict) else None
    if not isinstance(turns, list):
        return [], f"no list {field!r}"
    messages: list[Message] = []
    for turn in turns:
        message, problem = _turn(turn, role_field, text_field, roles)
        if problem:
            return [], problem
        messages.append(message)
    system = messages[:1] if messages and messages[0]["role"] == "system" else []
    rest = messages[len(system) :]
    while rest and rest[0]["role"] == "assistant":
        rest = rest[1:]
    while rest and rest[-1]["role"] == "user":
        rest = rest[:-1]
    if not rest:
        return [], "no answered user turn"
    for i, message in enumerate(rest):
        if message["role"] != ("user", "assistant")[i % 2]:
            return [], "roles do not alternate"
        if not message["content"].strip():
            return [], f"an empty {message['role']} turn"
    return system + rest, ""


def _turn(
    turn: Any, role_field: str, text_field: str, roles: dict[str, str]
) -> tuple[Message, str]:
    """One turn as a message, or ({}, why not)."""
    role = turn.get(role_field) if isinstance(turn, dict) else None
    if not isinstance(role, str) or role not in roles:
        return {}, f"unknown role {role!r}"
    text = _text(turn.get(text_field))
    if text is None:
        return {}, f"a turn without {text_field!r}"
    return {"role": roles[role], "content": text}, ""


def _text(content: Any) -> str | None:
    """A string, or the text parts of the list form; None for anything else."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return None


def encode_conversation(
    tokenizer: Tokenizer,
    messages: list[Message],
    template_name: str = "",
    cut: bool = False,
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and, for each, 1 if the assistant produces it, else 0.

    Args:
      template_name: a shipped template (`TEMPLATES`); "" = the tokenizer's own.
      cut: the last answer was broken off: the end-of-text token that the template puts behind
        it was never said, so it does not count.

    Raises:
      SampleError: the template refuses the conversation, its turns cannot be told apart, or
        no token would count.
      UserError: an unknown template name, or the tokenizer has none.
    """
    source = template_source(tokenizer, template_name)
    hidden = literal_text(tokenizer).hide(messages)
    messages = hidden or messages
    text, spans = render(source, messages, tokenizer.special_texts)
    if not MARKED.search(source):
        spans = _spans_by_prefix(source, messages, tokenizer.special_texts, text)
    ids, offsets = tokenize(tokenizer, text, hidden is not None)
    counted = [0] * len(ids)
    for span in spans:
        _mark(counted, ids, offsets, span, tokenizer.eos_ids)
    if cut:
        last = max((i for i, one in enumerate(counted) if one), default=0)
        counted[last] *= ids[last] not in stop_ids(tokenizer, template_name)
    if not any(counted):
        raise SampleError("no token of the conversation is the assistant's")
    return ids, counted


def encode_prompt(
    tokenizer: Tokenizer,
    messages: str | list[Message],
    template_name: str = "",
    check: Callable[[str], None] = lambda text: None,
) -> list[int]:
    """Ids of a conversation up to where the assistant has to speak next, BOS included.

    They are, token for token, what `encode_conversation` has before that answer. A special token
    that a message spells out is read as text.

    Args:
      messages: a conversation that ends with the user, or one user turn as a string.
      check: told the text before it is tokenised; it may raise.

    Raises:
      UserError: malformed messages, or as for `encode_conversation`.
    """
    turns, literal = _turns_to_answer(messages), literal_text(tokenizer)
    hidden = literal.hide(turns)
    text = _render_prompt(tokenizer, hidden or turns, template_name)
    check(literal.show(text) if hidden else text)
    return tokenize(tokenizer, text, hidden is not None)[0]


def render_prompt(
    tokenizer: Tokenizer, messages: str | list[Message], template_name: str = ""
) -> str:
    """Text of a conversation up to where the assistant has to speak next.

    For reading. To decode from it, use `encode_prompt`, which treats the BOS rightly.
    """
    return _render_prompt(tokenizer, _turns_to_answer(messages), template_name)


def _turns_to_answer(messages: str | list[Message]) -> list[Message]:
    turns = (
        [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    )
    if not isinstance(turns, list) or not turns:
        raise UserError("messages should be a list of turns, with at least one")
    read = [_turn(turn, "role", "content", MESSAGE_ROLES) for turn in turns]
    if problem := next((problem for _, problem in read if problem), ""):
        raise UserError(f"messages: {problem}")
    if read[-1][0]["role"] != "user":
        raise UserError("messages: the last turn has to be the user's")
    return [message for message, _ in read]


def _render_prompt(tokenizer: Tokenizer, turns: list[Message], template_name: str) -> str:
    source = template_source(tokenizer, template_name)
    return render(source, turns, tokenizer.special_texts, add_generation_prompt=True)[0]


def encode_user_opening(
    tokenizer: Tokenizer, messages: list[Message], template_name: str = ""
) -> tuple[list[int], str]:
    """Ids of a conversation up to where the user has to speak next, and what ends that turn.

    For a model that plays both roles. The end is a string to stop at, "" where an end-of-text
    token closes the turn. Where it is comes from the template: it renders one more user turn
    of random content, which no conversation can hold.

    Example (Vicuna): "... ASSISTANT: I am fine</s>USER:" and "ASSISTANT:".
    """
    mark = f"turn{secrets.token_hex(16)}"
    turns = [*messages, {"role": "user", "content": mark}]
    source = template_source(tokenizer, template_name)
    text = render(source, turns, tokenizer.special_texts, add_generation_prompt=True)[0]
    before, _, behind = text.partition(mark)
    # A blank in front belongs to the word that the model writes.
    ids = tokenize(tokenizer, before.rstrip(" "))[0]
    ends = [
        tokenizer.decode([i], skip_special=False)
        for i in stop_ids(tokenizer, template_name)
    ]
    behind = behind.strip()
    if any(end and behind.startswith(end) for end in ends):
        return ids, ""
    return ids, behind.split("\n")[0]


def stop_ids(tokenizer: Tokenizer, template_name: str = "") -> frozenset[int]:
    """Ids that end the assistant's turn: the tokenizer's EOS ids and the template's own."""
    end = tokenizer.token_to_id(TURN_ENDS.get(TEMPLATES.get(template_name, ""), ""))
    return tokenizer.eos_ids | ({end} if end is not None else set())


def template_source(tokenizer: Tokenizer, template_name: str = "") -> str:
    """The Jinja source of a shipped template, or of the tokenizer's own for ""."""
    if template_name:
        source = shipped_template(template_name)
        end = TURN_ENDS.get(TEMPLATES[template_name]) or tokenizer.special_texts.get(
            "eos_token"
        )
        if not end or tokenizer.token_to_id(end) is None:
            raise UserError(
                f"chat template {template_name!r} ends turns with {end or 'the EOS token'}, which "
                "the tokenizer does not have; choose the template that the model was made for"
            )
        return source
    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template; name a shipped one: "
            + ", ".join(TEMPLATES)
        )
    return tokenizer.chat_template


def shipped_template(name: str) -> str:
    """The source of a template that comes with the package."""
    if name not in TEMPLATES:
        raise UserError(
            f"unknown chat template {name!r} (there are: {', '.join(TEMPLATES)})"
            f"{did_you_mean(name, TEMPLATES)}"
        )
    file = Path(__file__).parent / "templates" / f"{TEMPLATES[name]}.jinja"
    return file.read_text(encoding="utf-8")


def render(
    source: str,
    messages: list[Message],
    special_texts: dict[str, str],
    add_generation_prompt: bool = False,
    tools: list[Any] | None = None,
) -> tuple[str, list[Span]]:
    """Run a template; returns its text and the [start, end) of its generation blocks.

    Example: "Q: hi A:{% generation %} yo{% endgeneration %}" -> ("Q: hi A: yo", [(8, 11)]).

    Raises:
      SampleError: the template refuses the conversation.
      UserError: the template itself is broken, or does not come to an end.
    """
    specials: dict[str, Any] = dict.fromkeys(SPECIALS, "") | special_texts
    answer = RENDERER(
        source,
        messages=messages,
        tools=tools,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **specials,
    )
    if problem := answer.get("broken"):
        raise UserError(f"the chat template is broken: {problem}")
    if "refused" in answer:
        raise SampleError(
            f"the chat template refuses the conversation: {answer['refused']}"
        )
    return answer["text"], [(start, end) for start, end in answer["spans"]]


def _spans_by_prefix(
    source: str, messages: list[Message], special_texts: dict[str, str], full: str
) -> list[Span]:
    """Assistant spans of a template without marks, from renderings of growing prefixes.

    With p = text of messages[:i] plus generation prompt and q = text of messages[:i+1], the
    assistant turn i is q behind p. That holds only if p begins q and q begins the whole text,
    which is checked: some templates rewrite earlier turns.
    """
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(source, messages[:i], special_texts, add_generation_prompt=True)[0]
        after = render(source, messages[: i + 1], special_texts)[0]
        if not (after.startswith(before) and full.startswith(after)):
            raise SampleError(
                "the chat template has no generation marks and rewrites earlier turns, so the "
                "assistant's part cannot be told; name a shipped template"
            )
        spans.append((len(before), len(after)))
    return spans


def tokenize(
    tokenizer: Tokenizer, text: str, hidden: bool = False
) -> tuple[list[int], list[Span]]:
    """Ids and offsets of rendered text, a leading BOS taken off first and put back as an id.

    Args:
      hidden: the text holds stand-ins (`literal_text`).

    Sentencepiece tokenizers treat the start of a text in a special way, which a BOS written
    out in front would prevent.
    """
    encode = (literal_text(tokenizer) if hidden else tokenizer).encode_with_offsets
    bos = tokenizer.special_texts.get("bos_token", "")
    if not bos or not text.startswith(bos) or tokenizer.bos_id is None:
        return encode(text)
    ids, offsets = encode(text[len(bos) :])
    shifted = [(start + len(bos), end + len(bos)) for start, end in offsets]
    return [tokenizer.bos_id, *ids], [(0, len(bos)), *shifted]


def _mark(
    counted: list[int],
    ids: list[int],
    offsets: list[Span],
    span: Span,
    eos_ids: frozenset[int],
) -> None:
    """Set the tokens that overlap `span`, up to and with the turn's end-of-text token.

    What a template writes behind that token (a line break, often) is never generated. Where
    the span ends just before an end-of-text token, that one counts too.
    """
    start, end = span
    inside = [
        i
        for i, (a, b) in enumerate(offsets)
        # Tokens of no width stand for the blank before them (byte-level BPE trims blanks).
        if (a < end and b > start) or (a == b and start < a <= end)
    ]
    if not inside:
        return
    last = inside[-1]
    ends = [i for i in inside if ids[i] in eos_ids]
    if ends:
        last = ends[-1]
    elif last + 1 < len(ids) and ids[last + 1] in eos_ids:
        last += 1
    for i in range(inside[0], last + 1):
        counted[i] = 1
