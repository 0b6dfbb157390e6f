"""Text to tokens: find the turns of a record, and the tokens that are targets."""

import collections
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from medusa_jax.config import DataConfig
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.text import answers, chat
from medusa_jax.text.repetition import repeated_ngram_share
from medusa_jax.text.tokenizer import Tokenizer, load_tokenizer
from medusa_jax.training.data import sources
from medusa_jax.whole_files import Json

# The field of a `data.format`.
FIELDS = {"sharegpt": "conversations", "messages": "messages"}
# Fields that hold a list of turns.
TURNS = ("conversations", "messages", "conversation")
# Fields of one question, of its subject, and of its answer: Alpaca, Dolly, prompt and completion.
QUESTIONS = ("instruction", "prompt", "question", "query")
ABOUT = ("input", "context")
ANSWERS = ("output", "completion", "response", "answer")
SYSTEMS = ("system", "system_prompt")
# Roles in training data, compared in lower case, and the fields of a turn.
DATA_ROLES = chat.MESSAGE_ROLES | dict.fromkeys(("human", "prompter"), "user")
DATA_ROLES |= dict.fromkeys(
    ("gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", "chatbot"), "assistant"
)
ROLES_IN, TEXTS_IN = ("role", "from"), ("content", "value", "text")
THOUGHTS_IN = ("reasoning_content", "reasoning", "thinking")


def tokenise(
    source: str, tokenizer: str, pack: DataConfig
) -> tuple[list[np.ndarray], list[np.ndarray], Json]:
    """Encode the samples of a source; bad ones are skipped, counted and reported.

    Samples are encoded by Grain's reader threads, in order.

    Args:
      tokenizer: the tokenizer's path.

    Returns: token ids and which of them count, for each sample, and a report.

    Raises:
      UserError: the source is unreadable or has no usable sample, or no tokenizer is given.
    """
    import grain

    encode = Encoder(tokenizer_for(source, tokenizer), pack)
    samples = sources.read_records(source, pack)
    options = grain.ReadOptions(num_threads=min(os.cpu_count() or 1, 16))
    pipeline = grain.MapDataset.source(samples).map(encode).to_iter_dataset(options)
    problems: dict[int, str] = {}
    forms: collections.Counter[str] = collections.Counter()
    pieces: list[tuple[list[int], list[int]]] = []
    with announced(f"tokenising {source}"):
        for i, sample in enumerate(pipeline):
            if sample.problem:
                problems[i] = sample.problem
            else:
                forms[sample.form] += 1
            pieces += sample.pieces
    reasons = sources.reasons(problems, samples)
    if not pieces:
        raise UserError(
            f"none of the {len(samples)} samples of {source} can be used: {reasons}"
        )
    kinds = ", ".join(f"{n} x {form}" for form, n in forms.most_common())
    inform(f"{source}: {forms.total()} of {len(samples)} samples used ({kinds})")
    if problems:
        inform(f"{source}: {len(problems)} samples skipped ({reasons})")
    ids = [np.asarray(piece, np.int32) for piece, _ in pieces]
    counted = [np.asarray(counts, bool) for _, counts in pieces]
    skipped = dict(collections.Counter(problems.values()))
    report = {"source": source, "samples": len(samples), "skipped": skipped}
    return ids, counted, report


def tokenizer_for(source: str, path: str) -> Tokenizer:
    """The tokenizer at a path.

    Raises:
      UserError: the path is empty, so the source cannot be read.
    """
    if not path:
        raise UserError(
            f"{source} needs a tokenizer: set model.tokenizer to a directory or hub id"
        )
    return load_tokenizer(path)


class Encoded(NamedTuple):
    """A sample: the reason to skip it or "", its pieces (token ids, counted), and its form."""

    problem: str
    pieces: Sequence[tuple[list[int], list[int]]] = ()
    form: str = ""


class Encoder:
    """Encodes samples."""

    def __init__(self, tokenizer: Tokenizer, pack: DataConfig):
        self.tokenizer, self.pack = tokenizer, pack
        self.kind = pack.format
        end = self.tokenizer.special_texts.get("eos_token", "")
        self.eos = self.tokenizer.token_to_id(end) if end else None
        if self.kind != "text" and pack.chat_template:
            # Raises for an unknown name.
            chat.template_source(self.tokenizer, pack.chat_template)

    def __call__(self, record: object) -> Encoded:
        try:
            return self.encode(sources.parse(record))
        except UserError as error:
            return Encoded(str(error))

    def encode(self, record: object) -> Encoded:
        """Encode a parsed sample."""
        fields = record if isinstance(record, dict) else {}
        if field := FIELDS.get(self.kind):
            if not isinstance(fields.get(field), list):
                return Encoded(f"no list {field!r}")
            other_turns = set(TURNS) - {field}
            record = {k: v for k, v in fields.items() if k not in other_turns}
        form, turns = ("", []) if self.kind == "text" else turns_of(record)
        if form:
            cut = bool(fields.get("cut"))  # as `distill` marks it
            found = self.conversation(turns, cut)
        elif self.kind == "text" or isinstance(record, str) or "text" in fields:
            form, found = "text", self.text(fields.get("text", record))
        else:
            return Encoded(
                f"none of the fields {', '.join(TURNS)}, text, or a question and its answer"
            )
        kept = [piece for piece in found.pieces if not self.too_repetitive(*piece)]
        return Encoded(found.problem or ("" if kept else "repeats itself"), kept, form)

    def too_repetitive(self, ids: list[int], counted: list[int]) -> bool:
        """Whether the share of repeated 4-grams among counted tokens exceeds `data.max_repeats`."""
        if self.pack.max_repeats >= 1:
            return False
        targets = [i for i, counts in zip(ids, counted) if counts]
        return repeated_ngram_share(targets) > self.pack.max_repeats

    def text(self, text: object) -> Encoded:
        """Encode plain text: every token counts; long texts are cut into pieces of one row each."""
        if not isinstance(text, str) or not text.strip():
            return Encoded("no text")
        ids = self.tokenizer.encode(text, add_bos=True)
        ids += [self.eos] if self.eos is not None else []
        T = self.pack.seq_len if self.pack.packing == "first_fit" else len(ids)
        pieces = [ids[i : i + T] for i in range(0, len(ids), T)]
        return Encoded("", [(piece, [1] * len(piece)) for piece in pieces])

    def conversation(self, turns: list[object], cut: bool) -> Encoded:
        """Encode a conversation: only the assistant's tokens count."""
        messages, problem = parse_turns(turns)
        if problem:
            return Encoded(problem)
        ids, counted = answers.encode_conversation(
            self.tokenizer, messages, self.pack.chat_template, cut
        )
        # Nothing predicts the first token of a sample.
        if not any(counted[1 : self.pack.seq_len]):
            return Encoded("no counted token within seq_len")
        return Encoded("", [(ids, counted)])


def turns_of(record: object, answered: bool = True) -> tuple[str, list[object]]:
    """The form of a conversation and its turns, not parsed; ("", []) of a record that holds none.

    Example: {"instruction": "Add.", "input": "1, 2", "output": "3"} ->
    ("instruction, input, output", [{"role": "user", "content": "Add.\\n\\n1, 2"}, {"role": "assistant", ...}]).

    Args:
      answered: whether a question needs an answer.
    """
    record = {"messages": record} if isinstance(record, list) else record
    fields: dict[str, object] = record if isinstance(record, dict) else {}
    if name := field_of(fields, TURNS):
        found = fields[name]
        if isinstance(found, dict) and all(isinstance(x, list) for x in found.values()):
            # A list of structs, as `datasets` keeps some: a list of each field.
            found = [dict(zip(found, row)) for row in zip(*found.values())]
        turns = list(found) if isinstance(found, list) else []
        first = next((turn for turn in turns if isinstance(turn, dict)), {})
        keys = [field_of(first, known) for known in (ROLES_IN, TEXTS_IN)]
        form = f"{name} ({', '.join(filter(None, keys))})"
    else:
        keys = [field_of(fields, known) for known in (QUESTIONS, ABOUT, ANSWERS)]
        question, about, answer = (fields.get(key) for key in keys)
        if not keys[0] or (answered and not keys[2]):
            return "", []
        if about and isinstance(question, str):
            question = f"{question}\n\n{about}"
        turns = _as_turns("user", question) + _as_turns("assistant", answer)
        form = ", ".join(filter(None, keys))
    system = fields.get(field_of(fields, SYSTEMS))
    opening = parse_turn(turns[0])[0] if turns else {}
    if isinstance(system, str) and system.strip() and opening.get("role") != "system":
        turns = _as_turns("system", system) + turns
    return form, turns


def _as_turns(role: str, said: object) -> list[object]:
    """A list of turns as it is, a text as the one turn of `role`, none of None."""
    if isinstance(said, list):
        return said
    return [] if said is None else [{"role": role, "content": said}]


def parse_turns(turns: Sequence[object]) -> tuple[list[chat.Message], str]:
    """Parse turns of training data, `[{"from": "human", "value": ...}, ...]` -> (messages, "") or ([], reason).

    Assistant turns before the first user turn (ShareGPT has many such conversations) and user turns after the last
    answer are dropped.
    """
    messages: list[chat.Message] = []
    for turn in turns:
        message, problem = parse_turn(turn)
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


def parse_turn(turn: object) -> tuple[chat.Message, str]:
    """(message, "") of a turn of training data, or ({}, reason)."""
    fields: Json = turn if isinstance(turn, dict) else {}
    role_field = field_of(fields, ROLES_IN) or ROLES_IN[0]
    text_field = field_of(fields, TEXTS_IN) or TEXTS_IN[0]
    if isinstance(role := fields.get(role_field), str):
        fields = fields | {role_field: role.strip().lower()}
    message, problem = chat.read_turn(fields, role_field, text_field, DATA_ROLES)
    thoughts = [x for x in THOUGHTS_IN if message and isinstance(fields.get(x), str)]
    return message | {name: fields[name] for name in thoughts}, problem


def field_of(record: Json, known: Sequence[str]) -> str:
    """The first of these fields that a record has, "" if none; data sets fill others with None."""
    return next((name for name in known if record.get(name) is not None), "")
