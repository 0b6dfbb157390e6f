"""Chat templates: conversations to prompts, and the tokens that end a turn."""

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from medusa_jax.errors import UserError, one_of
from medusa_jax.text.jinja import Span, render_template
from medusa_jax.text.literal_text import Message, literal_text
from medusa_jax.text.tokenizer import (
    SPECIALS,
    NoTokenizer,
    Tokenizer,
    TurnPrompt,
    has_tokenizer,
    load_tokenizer,
)
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
# In place of a template's name: turns joined by empty lines, which end at the tokenizer's EOS.
PLAIN = "plain"

MESSAGE_ROLES = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
# Roles in training data, compared in lower case.
DATA_ROLES = MESSAGE_ROLES | dict.fromkeys(("human", "prompter"), "user")
DATA_ROLES |= dict.fromkeys(
    ("gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", "chatbot"), "assistant"
)


def read_turn(
    turn: object, role_field: str, text_field: str, roles: dict[str, str]
) -> tuple[Message, str]:
    """(message, "") of a turn, or ({}, reason)."""
    if not isinstance(turn, Mapping):
        fields = f"{role_field!r} and {text_field!r}"
        return {}, f"a turn is an object with {fields}, not {repr(turn)[:60]}"
    role = turn.get(role_field)
    if not isinstance(role, str) or role not in roles:
        return {}, f"unknown role {role!r}"
    text = _text(turn.get(text_field))
    if text is None:
        return {}, f"a turn of {role!r} without text in {text_field!r}"
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


def encode_prompt(
    tokenizer: Tokenizer, messages: str | list[Message], template_name: str = ""
) -> list[int]:
    """Ids of a conversation up to the assistant's next turn, BOS included.

    `answers.encode_conversation` gives the same ids before that answer, unless the template begins a thought or
    removes earlier ones. Special tokens that are spelled out in a message are read as text.

    Args:
      messages: a conversation that ends with a user turn, or one user turn as a string.

    Raises:
      UserError: malformed messages, or as for `template_source` and `render_template`.
    """
    asked = [{"role": "user", "content": messages}]
    turns = asked if isinstance(messages, str) else messages
    if not isinstance(turns, list) or not turns:
        raise UserError("messages should be a list of turns, with at least one")
    pairs = [read_turn(turn, "role", "content", MESSAGE_ROLES) for turn in turns]
    if problem := next((problem for _, problem in pairs if problem), ""):
        raise UserError(f"messages: {problem}")
    if pairs[-1][0]["role"] != "user":
        raise UserError("messages: the last turn has to be the user's")
    return encode_turns(tokenizer, [message for message, _ in pairs], {}, template_name)


def encode_turns(
    tokenizer: Tokenizer,
    turns: Sequence[Json],
    more: Json,
    template_name: str = "",
    check: Callable[[str], None] = lambda text: None,
    continued: bool = False,
) -> list[int]:
    """Like `encode_prompt`, for turns that are already in the template's form.

    Args:
      more: further variables of the template, such as `tools`.
      check: called with the text before it is tokenised; may raise.
      continued: end the text within the last turn, the assistant's, so that the model continues it.

    Raises:
      UserError: the template leaves out the turn to be continued.
    """
    literal = literal_text(tokenizer)
    shown: Json = {"messages": list(turns), "more": more}
    hidden = literal.hide(shown)
    source = template_source(tokenizer, template_name, bool(more.get("tools")))
    fields, mark = hidden or shown, f"turn{secrets.token_hex(16)}"
    if continued:
        turn = fields["messages"].pop()
        fields["messages"].append(turn | {"content": f"{turn['content']}{mark} "})
    text, _ = render(
        source,
        fields["messages"],
        tokenizer.special_texts,
        add_generation_prompt=not continued,
        more=fields["more"],
    )
    if continued:
        text, found, tail = text.rpartition(mark)
        if not found:
            raise UserError("the chat template leaves out the last turn, the assistant's")
        if not tail.startswith(" "):  # the template strips turns
            text = text.rstrip()
    check(literal.show(text) if hidden else text)
    ids, _ = tokenize(tokenizer, text, template_name, hidden is not None)
    return ids if continued else TurnPrompt(ids)


def is_chat_model(tokenizer: Tokenizer, model: str | None) -> bool:
    """Whether prompts for a model are chat turns by default.

    A chat model has a chat template, and "instruct" or "chat" in its name or its metadata, or the
    token that ends a turn ends its texts (in any of its files).

    Args:
      model: its path, name or hub id.
    """
    if not tokenizer.chat_template:
        return False
    names = f"{os.path.basename(os.path.normpath(model or ''))} {tokenizer.origin}"
    if re.search("instruct|chat", names, re.IGNORECASE):
        return True
    eos = tokenizer.token_to_id(tokenizer.special_texts.get("eos_token", ""))
    # A GGUF file's ends are llama.cpp's list, for a base model as well.
    ends = {eos} if (model or "").lower().endswith(".gguf") else tokenizer.eos_ids
    return not _turn_end(tokenizer, tokenizer.chat_template).isdisjoint(ends)


def is_chat_directory(directory: str, model: str | None) -> bool:
    """Like `is_chat_model`, from the files alone.

    Args:
      directory: the model's or the tokenizer's.
    """
    return has_tokenizer(directory) and is_chat_model(load_tokenizer(directory), model)


def stop_ids(tokenizer: Tokenizer, template_name: str = "") -> frozenset[int]:
    """Ids that end the assistant's turn: the tokenizer's EOS ids and the template's end-of-turn token."""
    if template_name == PLAIN or not (template_name or tokenizer.chat_template):
        return tokenizer.eos_ids
    source = template_source(tokenizer, template_name)
    return tokenizer.eos_ids | _turn_end(tokenizer, source)


@lru_cache(maxsize=8)
def _turn_end(tokenizer: Tokenizer, source: str) -> frozenset[int]:
    """The added token that a template writes after an answer, if it writes one."""
    mark = f"turn{secrets.token_hex(16)}"
    turns = [("user", "a"), ("assistant", mark), ("user", "b")]
    messages = [{"role": role, "content": text} for role, text in turns]
    tail = ""
    for conversation in (messages, messages[:2]):
        with suppress(UserError):
            text = render(source, conversation, tokenizer.special_texts)[0]
            tail = text.partition(mark)[2].lstrip()
        if tail:
            break
    tokens = tokenizer.backend.get_added_tokens_decoder()
    texts = {t.content: i for i, t in tokens.items() if t.special or t.content[:1] in "<["}
    ends = [text for text in texts if text and tail.startswith(text)]
    return frozenset({texts[max(ends, key=len)]} if ends else ())


def template_source(
    tokenizer: Tokenizer, template_name: str = "", tools: bool = False
) -> str:
    """The Jinja source of a template: one of the tokenizer's by name, or a shipped one.

    "" is the tokenizer's for conversations with `tools`, if it has one, else its default, as in transformers.

    Raises:
      UserError: an unknown name, or a shipped template that does not fit the tokenizer; lists the names. Or there is
        no tokenizer.
    """
    if isinstance(tokenizer, NoTokenizer):
        raise tokenizer.missing("chats cannot be told in tokens")
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
    one_of("a chat template", name, TEMPLATES)
    file = Path(__file__).parent / "templates" / f"{TEMPLATES[name]}.jinja"
    return file.read_text(encoding="utf-8")


def render(
    source: str,
    messages: Sequence[Json],
    special_texts: dict[str, str],
    add_generation_prompt: bool = False,
    more: Json | None = None,
) -> tuple[str, list[Span]]:
    """Run a template; return its text and the [start, end) of its generation blocks.

    Args:
      more: further variables, such as `tools`.

    Example: "Q: hi A:{% generation %} yo{% endgeneration %}" -> ("Q: hi A: yo", [(8, 11)]).

    Raises: as `render_template`.
    """
    fields: Json = {"tools": None, "documents": None} | dict.fromkeys(SPECIALS, "")
    fields |= special_texts | (more or {})
    fields |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
    return render_template(source, fields)


def tokenize(
    tokenizer: Tokenizer, text: str, template_name: str, hidden: bool = False
) -> tuple[list[int], list[Span]]:
    """Ids and offsets of text that a template rendered.

    A text of the tokenizer's own template is read as transformers' `apply_chat_template` reads it. What follows the
    BOS of a shipped template is read as a text of its own, as in the code that these models were trained with:
    sentencepiece tokenizers may put a blank before it. So is what follows a BOS that the tokenizer does not find.

    Args:
      hidden: whether the text has stand-ins (`literal_text`).
    """
    encode = (literal_text(tokenizer) if hidden else tokenizer).encode_with_offsets
    bos, bos_id = tokenizer.special_texts.get("bos_token", ""), tokenizer.bos_id
    if not bos or not text.startswith(bos) or bos_id is None:
        return encode(text)
    is_own = template_name in ("", *tokenizer.named_templates)
    if is_own and (found := encode(text))[0][:1] == [bos_id]:
        return found
    ids, offsets = encode(text[len(bos) :])
    shifted = [(start + len(bos), end + len(bos)) for start, end in offsets]
    return [bos_id, *ids], [(0, len(bos)), *shifted]
