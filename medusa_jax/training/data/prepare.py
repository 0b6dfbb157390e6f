"""Turn the text of any source into rows of tokens, tokenised once per workdir."""

import collections
import dataclasses
import hashlib
import importlib
import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from medusa_jax.config import DataConfig, ModelConfig
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.interop import chat
from medusa_jax.interop.tokenizer import Tokenizer, load_tokenizer
from medusa_jax.repetition import repeated_ngram_share
from medusa_jax.training.data import sources
from medusa_jax.training.data.rows import ARRAYS, REPORT, TokenRows, write_tokens
from medusa_jax.whole_files import Json, checksum, replacing, write_json

# The field of a `data.format`.
FIELDS = {"sharegpt": "conversations", "messages": "messages"}


def with_given_states(data: DataConfig, stage: str) -> DataConfig:
    """`data` with `cache_features` set to the type of given hidden states, if its sources hold any."""
    texts = [*data.source.split(","), *filter(None, [data.eval_source])]
    files = {name: sources.states_in(name.strip()) for name in texts}
    if not any(files.values()):
        return data
    if stage != "medusa1":
        raise UserError(
            f"data.source holds hidden states, of a backbone that does not change: train.stage "
            f"medusa1, not {stage}"
        )
    # Seam: chosen by the files of the source.
    given = importlib.import_module("medusa_jax.training.data.given_states")
    kind = given.stored_type(files, data.cache_features)
    return dataclasses.replace(data, cache_features=kind)


def texts(
    data: DataConfig, model: ModelConfig, workdir: str, vocab_size: int
) -> list[TokenRows]:
    """Rows of each text of `data.source`."""
    return [
        text_rows(name, data, model, workdir, vocab_size)
        for name in sources.names(data.source)
    ]


def held_out_text(
    data: DataConfig, model: ModelConfig, workdir: str, vocab_size: int
) -> TokenRows | None:
    """Rows of `data.eval_source` in their order; None if it is not set."""
    if not data.eval_source:
        return None
    pack = dataclasses.replace(data, max_samples=data.eval_samples)
    return text_rows(data.eval_source, pack, model, workdir, vocab_size, shuffle=False)


def text_rows(
    source: str, pack: DataConfig, model: ModelConfig, workdir: str, vocab_size: int,
    shuffle: bool = True,
) -> TokenRows:  # fmt: skip
    """Rows of a source."""
    path = token_directory(source, pack, model, workdir)
    states = list(sources.states_in(source, pack.max_samples).values())
    return TokenRows(path, pack, vocab_size, shuffle, states)


def token_directory(source: str, pack: DataConfig, model: ModelConfig, workdir: str) -> str:
    """The token directory of a source, tokenised into the workdir if necessary.

    Raises:
      UserError: the source is unreadable or has no usable sample.
    """
    if os.path.isfile(os.path.join(source, "tokens.npy")):
        return source
    if pack.format == "tokens":
        raise UserError(f"data.format is tokens, but {source} has no tokens.npy")
    states = sources.states_in(source, pack.max_samples)
    path = "" if states else tokenizer_path(source, model)
    key = [
        source, stamps(source), path, pack.split, pack.format, pack.chat_template,
        pack.max_samples, pack.seq_len, pack.packing, pack.max_repeats,
        *([(name, os.stat(name).st_mtime_ns) for name in states.values()]),
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    directory = os.path.join(workdir, "tokens", digest)
    if jax.process_index() == 0 and not os.path.isdir(directory):
        if states:  # seam: chosen by the files of the source
            given = importlib.import_module("medusa_jax.training.data.given_states")
            ids, counted = given.texts_in(source, states)
            report = {"source": source, "samples": len(states)}
            write_directory(directory, ids, counted, report)
        else:
            tokenise(source, load_tokenizer(path), pack, directory)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"tokens {digest}")
    return directory


def stamps(source: str) -> object:
    """Sizes and modification times of the files of a source."""
    if os.path.isdir(source):
        return [(str(path), stamps(str(path))) for path in sources.files_in(source)]
    stamp = os.stat(source) if os.path.exists(source) else None
    return stamp and (stamp.st_size, stamp.st_mtime_ns)


def tokenizer_path(source: str, model: ModelConfig) -> str:
    """The path of the tokenizer for `source`.

    Raises:
      UserError: neither `model.tokenizer` nor `model.path` is set.
    """
    if not (path := model.tokenizer or model.path):
        raise UserError(
            f"{source} needs a tokenizer: set model.tokenizer to a directory or hub id"
        )
    return path


def tokenise(source: str, tokenizer: Tokenizer, pack: DataConfig, directory: str) -> None:
    """Write the token directory of a source; bad samples are skipped, counted and reported.

    Samples are encoded by Grain's reader threads, in order.
    """
    import grain

    samples = sources.read_records(source, pack)
    encode = Encoder(tokenizer, pack)
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
    write_directory(directory, ids, counted, report)


def write_directory(
    directory: str, ids: list[np.ndarray], counted: list[np.ndarray], report: Json
) -> None:
    """Write a token directory with its checksums, and the directories above it."""
    os.makedirs(os.path.dirname(os.path.abspath(directory)), exist_ok=True)
    with replacing(directory) as new:
        write_tokens(new, ids, counted)
        sums = {name: checksum(os.path.join(new, name)) for name in ARRAYS}
        write_json(os.path.join(new, REPORT), report | {"crc32": sums})


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
        end = tokenizer.special_texts.get("eos_token", "")
        self.eos = tokenizer.token_to_id(end) if end else None
        if self.kind != "text" and pack.chat_template:
            # Raises for an unknown name.
            chat.template_source(tokenizer, pack.chat_template)

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
            other_turns = set(sources.TURNS) - {field}
            record = {k: v for k, v in fields.items() if k not in other_turns}
        form, turns = ("", []) if self.kind == "text" else sources.turns_of(record)
        if form:
            cut = bool(fields.get("cut"))  # as `distill` marks it
            found = self.conversation(turns, cut)
        elif self.kind == "text" or isinstance(record, str) or "text" in fields:
            form, found = "text", self.text(fields.get("text", record))
        else:
            return Encoded(
                f"none of the fields {', '.join(sources.TURNS)}, text, or a question and its answer"
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
        messages, problem = sources.parse_turns(turns)
        if problem:
            return Encoded(problem)
        ids, counted = chat.encode_conversation(
            self.tokenizer, messages, self.pack.chat_template, cut
        )
        # Nothing predicts the first token of a sample.
        if not any(counted[1 : self.pack.seq_len]):
            return Encoded("no counted token within seq_len")
        return Encoded("", [(ids, counted)])
