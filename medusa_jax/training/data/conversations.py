"""Conversations to tokens: find the turns of a record, and the tokens that are targets."""

from collections.abc import Sequence
from typing import NamedTuple

from medusa_jax.config import DataConfig
from medusa_jax.text import answers, chat
from medusa_jax.text.tokenizer import Tokenizer
from medusa_jax.training.data.plain_text import Encoded, TextEncoder
from medusa_jax.whole_files import Json

# The field of a `data.format`.
FIELDS = {"sharegpt": "conversations", "messages": "messages"}
# Fields that hold a list of turns.
TURNS = ("conversations", "messages", "conversation")
# Fields of one question, of its subject, and of its answer: Alpaca, Dolly, prompt and completion. `history` has
# earlier pairs of them (LlamaFactory).
QUESTIONS = ("instruction", "prompt", "question", "query")
ABOUT = ("input", "context")
ANSWERS = ("output", "completion", "response", "answer")
SYSTEMS = ("system", "system_prompt")
# Fields of a turn.
ROLES_IN = ("role", "from", "speaker", "sender", "author")
TEXTS_IN = ("content", "value", "text", "message", "utterance")
THOUGHTS_IN = ("reasoning_content", "reasoning", "thinking")
# Fields that `distill` writes besides the conversation.
DISTILLED = ("seed", "answers", "cut", "problem")


class Conversation(NamedTuple):
    """The turns of a record, not parsed.

    Attributes:
      form: the fields that they are read from; "" if the record holds none.
      unread: other fields that hold text, of the record and of its turns.
    """

    form: str = ""
    turns: Sequence[object] = ()
    unread: Sequence[str] = ()


class RecordEncoder(TextEncoder):
    """Encodes records that hold a conversation, a question and its answer, or a text."""

    def __init__(self, tokenizer: Tokenizer, pack: DataConfig):
        super().__init__(tokenizer, pack)
        if pack.chat_template:
            # Raises for an unknown name.
            chat.template_source(self.tokenizer, pack.chat_template)

    def encode(self, record: object) -> Encoded:
        fields = fields_of(record)
        if field := FIELDS.get(self.pack.format):
            if not isinstance(fields.get(field), list):
                return Encoded(f"no list {field!r}")
            other_turns = set(TURNS) - {field}
            record = {k: v for k, v in fields.items() if k not in other_turns}
        found = turns_of(record)
        if found.form:
            cut = bool(fields.get("cut"))  # as `distill` marks it
            encoded = self.conversation(found.turns, cut)
            return encoded._replace(form=found.form, unread=found.unread)
        if isinstance(record, str) or "text" in fields:
            return self.text(fields.get("text", record))
        if "token_ids" in fields:
            return Encoded("tokens that `distill` wrote: name their directory")
        return Encoded(
            f"none of the fields {', '.join(TURNS)}, text, or a question and its answer"
        )

    def conversation(self, turns: Sequence[object], cut: bool) -> Encoded:
        """Encode a conversation: only the assistant's tokens count."""
        messages, problem = parse_turns(turns)
        if problem:
            return Encoded(problem)
        ids, counted = answers.encode_conversation(
            self.tokenizer, messages, self.pack.chat_template, cut
        )
        n = self.pack.seq_len if self.pack.packing == "first_fit" else len(ids)
        # Nothing predicts the first token of a sample.
        if not any(counted[1:n]):
            return Encoded("no counted token within seq_len")
        return Encoded("", [(ids, counted)])


def fields_of(record: object) -> Json:
    """A record's fields. A list counts as a record with the field `messages`; anything else has no fields."""
    record = {"messages": record} if isinstance(record, list) else record
    return record if isinstance(record, dict) else {}


def turns_of(record: object, answered: bool = True) -> Conversation:
    """The conversation of a record.

    Example: {"instruction": "Add.", "input": "1, 2", "output": "3"} ->
    "instruction, input, output", [{"role": "user", "content": "Add.\\n\\n1, 2"}, {"role": "assistant", ...}].

    Args:
      answered: whether a question needs an answer.
    """
    fields = fields_of(record)
    if name := field_of(fields, TURNS):
        value = fields[name]
        if isinstance(value, dict) and all(isinstance(x, list) for x in value.values()):
            # A list of structs, as `datasets` keeps some: a list of each field.
            value = [dict(zip(value, row)) for row in zip(*value.values())]
        turns = list(value) if isinstance(value, list) else []
        first = next((turn for turn in turns if isinstance(turn, dict)), {})
        keys = [field_of(first, names) for names in (ROLES_IN, TEXTS_IN)]
        form = f"{name} ({', '.join(filter(None, keys))})"
        keys = [name]
    else:
        keys = [field_of(fields, names) for names in (QUESTIONS, ABOUT, ANSWERS)]
        question, about, answer = (fields.get(key) for key in keys)
        if not keys[0] or (answered and not keys[2]):
            return Conversation()
        if about and isinstance(question, str):
            question = f"{question}\n\n{about}"
        history = fields.get("history") or []
        turns = [turn for pair in _as_turns("", history) for turn in _turns_of_pair(pair)]
        turns += _as_turns("user", question) + _as_turns("assistant", answer)
        keys += ["history"] if history else []
        form = ", ".join(filter(None, keys))
    system_key = field_of(fields, SYSTEMS)
    system = fields.get(system_key)
    opening = parse_turn(turns[0])[0] if turns else {}
    if isinstance(system, str) and system.strip() and opening.get("role") != "system":
        turns = _as_turns("system", system) + turns
    unread = _texts_of(fields, (*keys, system_key, *DISTILLED))
    for turn in turns:
        fields = turn if isinstance(turn, dict) else {}
        unread += _texts_of(fields, (*ROLES_IN, *TEXTS_IN, *THOUGHTS_IN))
    return Conversation(form, turns, [*dict.fromkeys(unread)])


def _turns_of_pair(pair: object) -> list[object]:
    """The turns of a question and its answer, or a turn as it is."""
    if not isinstance(pair, list) or len(pair) != 2:
        return [pair]
    return _as_turns("user", pair[0]) + _as_turns("assistant", pair[1])


def _texts_of(fields: Json, known: Sequence[str]) -> list[str]:
    """The fields besides the known ones that hold text."""

    def holds_text(value: object) -> bool:
        if isinstance(value, dict | list):
            return any(
                map(holds_text, value.values() if isinstance(value, dict) else value)
            )
        return isinstance(value, str) and bool(value.strip())

    return [
        name for name, value in fields.items() if name not in known and holds_text(value)
    ]


def _as_turns(role: str, content: object) -> list[object]:
    """A list of turns as it is, a text as the one turn of `role`, none of None."""
    if isinstance(content, list):
        return content
    return [] if content is None else [{"role": role, "content": content}]


def parse_turns(
    turns: Sequence[object], answered: bool = True
) -> tuple[list[chat.Message], str]:
    """Parse turns of training data, `[{"from": "human", "value": ...}, ...]` -> (messages, "") or ([], reason).

    Assistant turns before the first user turn (ShareGPT has many such conversations) and user turns after the last
    answer are dropped; the first of these is kept if questions need no answer (`answered`).
    """
    messages: list[chat.Message] = []
    for turn in turns:
        message, problem = parse_turn(turn)
        if problem:
            return [], problem
        messages.append(message)
    system = messages[:1] if messages and messages[0]["role"] == "system" else []
    talk = messages[len(system) :]
    while talk and talk[0]["role"] == "assistant":
        talk = talk[1:]
    end = len(talk)
    while end and talk[end - 1]["role"] == "user":
        end -= 1
    talk = talk[: end if answered else end + 1]
    if not talk:
        return [], "no answered user turn" if answered else "no user turn"
    for i, message in enumerate(talk):
        if message["role"] != ("user", "assistant")[i % 2]:
            return [], "roles do not alternate"
        if not message["content"].strip():
            return [], f"an empty {message['role']} turn"
    return system + talk, ""


def parse_turn(turn: object) -> tuple[chat.Message, str]:
    """(message, "") of a turn of training data, or ({}, reason). An answer not to be learned has the `weight` "0"."""
    if not isinstance(turn, dict):
        return {}, "a turn that is no object"
    fields: Json = turn
    role_field, text_field = field_of(fields, ROLES_IN), field_of(fields, TEXTS_IN)
    for field, names in ((role_field, ROLES_IN), (text_field, TEXTS_IN)):
        if not field:
            keys = ", ".join(k for k, v in fields.items() if v is not None) or "nothing"
            return {}, f"a turn with {keys}, but none of {', '.join(names)}"
    if isinstance(role := fields.get(role_field), str):
        fields = fields | {role_field: role.strip().lower()}
    message, problem = chat.read_turn(fields, role_field, text_field, chat.DATA_ROLES)
    thoughts = [x for x in THOUGHTS_IN if message and isinstance(fields.get(x), str)]
    message |= {name: fields[name] for name in thoughts}
    weight = fields.get("weight") if message.get("role") == "assistant" else None
    if weight not in (None, 0, 1):
        return {}, f"a turn with the weight {weight!r}, not 0 or 1"
    return message | ({"weight": "0"} if weight == 0 else {}), problem


def field_of(record: Json, names: Sequence[str]) -> str:
    """The first of these fields that a record has, "" if none; data sets fill others with None."""
    return next((name for name in names if record.get(name) is not None), "")
