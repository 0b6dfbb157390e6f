"""Convert conversations to token ids and mark the tokens that the assistant has to produce.

The template determines these tokens: the text between `{% generation %}` and `{% endgeneration %}`, if it has such
blocks (all shipped templates do). Otherwise the template is rendered turn by turn, and the text that an assistant
turn adds after the generation prompt is the assistant's. An end-of-text token directly after an assistant turn
counts, so that the model learns to stop.
"""

import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.interop.literal_text import Message, Span, literal_text
from medusa_jax.interop.rendering import Renderer
from medusa_jax.interop.tokenizer import Tokenizer
from medusa_jax.whole_files import Json

TEMPLATES = {
    "vicuna": "vicuna",
    "llama2": "llama2",
    "llama3": "llama3",
    "zephyr": "zephyr",
    "mistral": "mistral",
    "chatml": "chatml",
    "qwen": "chatml",
}

# End-of-turn tokens that differ from the tokenizer's EOS.
TURN_ENDS = {"llama3": "<|eot_id|>", "chatml": "<|im_end|>"}

# Shared by all threads; renders one conversation at a time.
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


# Variables of templates in addition to the messages.
SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")


class SampleError(UserError):
    """A conversation is unusable; a trainer skips it and counts the reason."""


def parse_sharegpt(record: object) -> tuple[list[Message], str]:
    """`{"conversations": [{"from": "human", "value": ...}, ...]}` -> (messages, "").

    An unusable conversation gives ([], reason). Assistant turns before the first user turn (ShareGPT has many such
    conversations) and user turns after the last answer are dropped.
    """
    return _parse(record, "conversations", "from", "value", SHAREGPT_ROLES)


def parse_messages(record: object) -> tuple[list[Message], str]:
    """`{"messages": [{"role": "user", "content": ...}, ...]}` -> (messages, "") or ([], reason)."""
    return _parse(record, "messages", "role", "content", MESSAGE_ROLES)


def _parse(
    record: object, field: str, role_field: str, text_field: str, roles: dict[str, str]
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
    turn: object, role_field: str, text_field: str, roles: dict[str, str]
) -> tuple[Message, str]:
    """(message, "") of a turn, or ({}, reason)."""
    turn = turn if isinstance(turn, dict) else {}
    role = turn.get(role_field)
    if not isinstance(role, str) or role not in roles:
        return {}, f"unknown role {role!r}"
    text = _text(turn.get(text_field))
    if text is None:
        return {}, f"a turn without {text_field!r}"
    return {"role": roles[role], "content": text}, ""


def _text(content: object) -> str | None:
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
      template_name: a shipped template (`TEMPLATES`); "" = the tokenizer's.
      cut: the last answer is incomplete, so that the end-of-text token after it does not count.

    Raises:
      SampleError: the template refuses the conversation, its turns cannot be separated, or no token would count.
      UserError: an unknown template name, or the tokenizer has no template.
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
        last = max((i for i, counts in enumerate(counted) if counts), default=0)
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
    """Ids of a conversation up to the assistant's next turn, BOS included.

    The same ids as those of `encode_conversation` before that answer. Special tokens that are spelled out in a
    message are read as text.

    Args:
      messages: a conversation that ends with a user turn, or one user turn as a string.
      check: called with the text before it is tokenised; may raise.

    Raises:
      UserError: malformed messages, or as for `encode_conversation`.
    """
    turns, literal = _turns_to_answer(messages), literal_text(tokenizer)
    hidden = literal.hide(turns)
    text = render_prompt(tokenizer, hidden or turns, template_name)
    check(literal.show(text) if hidden else text)
    return tokenize(tokenizer, text, hidden is not None)[0]


def render_prompt(
    tokenizer: Tokenizer, messages: str | list[Message], template_name: str = ""
) -> str:
    """Text of a conversation up to the assistant's next turn.

    For display. For decoding use `encode_prompt`, which handles the BOS correctly.
    """
    turns, source = _turns_to_answer(messages), template_source(tokenizer, template_name)
    return render(source, turns, tokenizer.special_texts, add_generation_prompt=True)[0]


def _turns_to_answer(messages: str | list[Message]) -> list[Message]:
    turns = (
        [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    )
    if not isinstance(turns, list) or not turns:
        raise UserError("messages should be a list of turns, with at least one")
    parsed = [_turn(turn, "role", "content", MESSAGE_ROLES) for turn in turns]
    if problem := next((problem for _, problem in parsed if problem), ""):
        raise UserError(f"messages: {problem}")
    if parsed[-1][0]["role"] != "user":
        raise UserError("messages: the last turn has to be the user's")
    return [message for message, _ in parsed]


def encode_user_opening(
    tokenizer: Tokenizer, messages: list[Message], template_name: str = ""
) -> tuple[list[int], str]:
    """Ids of a conversation up to the next user turn, and the string that ends that turn.

    For a model that plays both roles. The string is "" if an end-of-text token ends the turn. It is found by
    rendering another user turn with random content.

    Example (Vicuna): "... ASSISTANT: I am fine</s>USER:" and "ASSISTANT:".
    """
    mark = f"turn{secrets.token_hex(16)}"
    turns = [*messages, {"role": "user", "content": mark}]
    source = template_source(tokenizer, template_name)
    text = render(source, turns, tokenizer.special_texts, add_generation_prompt=True)[0]
    before, _, after = text.partition(mark)
    # A space before the turn belongs to the first word that the model writes.
    ids = tokenize(tokenizer, before.rstrip(" "))[0]
    ends = [
        tokenizer.decode([i], skip_special=False)
        for i in stop_ids(tokenizer, template_name)
    ]
    after = after.strip()
    if any(end and after.startswith(end) for end in ends):
        return ids, ""
    return ids, after.split("\n")[0]


def stop_ids(tokenizer: Tokenizer, template_name: str = "") -> frozenset[int]:
    """Ids that end the assistant's turn: the tokenizer's EOS ids and the template's end-of-turn token."""
    shipped = TEMPLATES.get(template_name, "")
    end = tokenizer.token_to_id(TURN_ENDS.get(shipped, ""))
    if not shipped and tokenizer.chat_template:
        end = _turn_end(tokenizer, template_source(tokenizer, template_name))
    return tokenizer.eos_ids | ({end} if end is not None else set())


@lru_cache(maxsize=8)
def _turn_end(tokenizer: Tokenizer, source: str) -> int | None:
    """The added token that a template writes after an answer, None if there is none."""
    mark = f"turn{secrets.token_hex(16)}"
    turns = [("user", "a"), ("assistant", mark), ("user", "b")]
    messages = [{"role": role, "content": text} for role, text in turns]
    after = ""
    for conversation in (messages, messages[:2]):
        with suppress(UserError):
            text = render(source, conversation, tokenizer.special_texts)[0]
            after = text.partition(mark)[2].lstrip()
        if after:
            break
    added = tokenizer.backend.get_added_tokens_decoder()
    texts = {t.content: i for i, t in added.items() if t.special or t.content[:1] in "<["}
    found = [text for text in texts if text and after.startswith(text)]
    return texts[max(found, key=len)] if found else None


def template_source(
    tokenizer: Tokenizer, template_name: str = "", tools: bool = False
) -> str:
    """The Jinja source of a template: one of the tokenizer's by name, or a shipped one.

    "" is the tokenizer's for conversations with `tools`, if it has one, else its default, as in transformers.
    """
    name = template_name or ("tool_use" if tools else "")
    if name in tokenizer.named_templates:
        return tokenizer.named_templates[name]
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
    tools: list[Json] | None = None,
) -> tuple[str, list[Span]]:
    """Run a template; return its text and the [start, end) of its generation blocks.

    Example: "Q: hi A:{% generation %} yo{% endgeneration %}" -> ("Q: hi A: yo", [(8, 11)]).

    Raises:
      SampleError: the template refuses the conversation.
      UserError: the template is invalid or exceeds its limits.
    """
    specials: Json = dict.fromkeys(SPECIALS, "") | special_texts
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
    """Assistant spans of a template without generation blocks, from renderings of growing prefixes.

    With p = text of messages[:i] plus generation prompt and q = text of messages[:i+1], the assistant turn i is
    the part of q after p. This requires that p is a prefix of q and q of the whole text, which is checked: some
    templates rewrite earlier turns.
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
                "assistant's part cannot be identified; name a shipped template"
            )
        spans.append((len(before), len(after)))
    return spans


def tokenize(
    tokenizer: Tokenizer, text: str, hidden: bool = False
) -> tuple[list[int], list[Span]]:
    """Ids and offsets of rendered text; a leading BOS is removed and added as an id.

    Sentencepiece tokenizers treat the start of a text specially, which a spelled-out BOS would prevent.

    Args:
      hidden: whether the text has stand-ins (`literal_text`).
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
    """Set the tokens that overlap `span`, up to and including the turn's end-of-text token.

    Text of the template after that token (often a line break) is never generated. An end-of-text token directly
    after the span counts too.
    """
    start, end = span
    inside = [
        i
        for i, (a, b) in enumerate(offsets)
        # Tokens of zero width represent the space before them (byte-level BPE trims spaces).
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
