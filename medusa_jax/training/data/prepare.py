"""Convert text of any source to a token directory."""

import collections
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from medusa_jax.config import Config, DataConfig
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError, first_line
from medusa_jax.interop import chat
from medusa_jax.interop.tokenizer import Tokenizer, load_tokenizer
from medusa_jax.repetition import repeated_ngram_share
from medusa_jax.training.data import given_states
from medusa_jax.training.data.rows import ARRAYS, REPORT, TokenRows, write_tokens
from medusa_jax.whole_files import Json, checksum, replacing, write_json

# Suffixes of the files of a directory that are read as text.
TEXT_FILES = (".txt", ".md", ".py")


def texts(cfg: Config) -> list[TokenRows]:
    """Rows of each text of `data.source`."""
    return [text_rows(cfg, name, cfg.data) for name in sources(cfg)]


def held_out_text(cfg: Config) -> TokenRows | None:
    """Rows of `data.eval_source` in their order; None if it is not set."""
    if not cfg.data.eval_source:
        return None
    limit = dataclasses.replace(cfg.data, max_samples=cfg.data.eval_samples)
    return text_rows(cfg, cfg.data.eval_source, limit, shuffle=False)


def text_rows(
    cfg: Config, source: str, pack: DataConfig, shuffle: bool = True
) -> TokenRows:
    """Rows of a source."""
    path = token_directory(cfg, source, pack)
    states = list(states_of(source, pack).values())
    return TokenRows(path, cfg.data, cfg.model.arch.vocab_size, shuffle, states)


def choose_features(cfg: Config) -> None:
    """Set `data.cache_features` to the type of given hidden states, if the sources hold any."""
    held_out = [cfg.data.eval_source] if cfg.data.eval_source else []
    given_states.choose_type(cfg, [*sources(cfg), *held_out])


def sources(cfg: Config) -> list[str]:
    """The names in `data.source`."""
    return [name.strip() for name in cfg.data.source.split(",")]


def token_directory(cfg: Config, source: str, pack: DataConfig) -> str:
    """The token directory of a source, tokenised into the workdir if necessary.

    Raises:
      UserError: the source is unreadable or has no usable sample.
    """
    if not source:
        raise UserError("data.source is empty: name a file, a directory or a dataset id")
    if os.path.isfile(os.path.join(source, "tokens.npy")):
        return source
    if pack.format == "tokens":
        raise UserError(f"data.format is tokens, but {source} has no tokens.npy")
    states = states_of(source, pack)
    path = "" if states else tokenizer_path(cfg, source)
    key = [
        source, stamps(source), path, cfg.train.stage, pack.split, pack.format, pack.chat_template,
        pack.max_samples, pack.seq_len, pack.packing, pack.max_repeats,
        *([(name, os.stat(name).st_mtime_ns) for name in states.values()]),
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    directory = os.path.join(cfg.workdir, "tokens", digest)
    if jax.process_index() == 0 and not os.path.isdir(directory):
        if states:
            texts = given_states.texts_in(source, states)
            write_directory(directory, *texts, {"source": source, "samples": len(states)})
        else:
            tokenise(source, load_tokenizer(path), pack, directory)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"tokens {digest}")
    return directory


def states_of(source: str, pack: DataConfig) -> dict[int, str]:
    """The first `max_samples` files of hidden states of a source, {} if it holds none."""
    files = list(given_states.files_in(source).items())
    return dict(files[: pack.max_samples or None])


def stamps(source: str) -> object:
    """Sizes and modification times of the files of a source."""
    if os.path.isdir(source):
        return [(str(path), stamps(str(path))) for path in text_files(source)]
    stamp = os.stat(source) if os.path.exists(source) else None
    return stamp and (stamp.st_size, stamp.st_mtime_ns)


def tokenizer_path(cfg: Config, source: str) -> str:
    """The path of the tokenizer for `source`.

    Raises:
      UserError: neither `model.tokenizer` nor `model.path` is set.
    """
    if not source:
        raise UserError("data.source is empty: name a file, a directory or a dataset id")
    path = cfg.model.tokenizer or cfg.model.path
    if not path:
        raise UserError(
            f"{source} needs a tokenizer: set model.tokenizer to a directory or hub id"
        )
    return path


def tokenise(source: str, tokenizer: Tokenizer, pack: DataConfig, directory: str) -> None:
    """Write the token directory of a source; bad samples are skipped, counted and reported.

    Samples are encoded by Grain's reader threads, in order.
    """
    import grain

    records = read_records(source, pack)
    encode = Encoder(tokenizer, pack, source)
    options = grain.ReadOptions(num_threads=min(os.cpu_count() or 1, 16))
    pipeline = grain.MapDataset.source(records).map(encode).to_iter_dataset(options)
    skipped: collections.Counter[str] = collections.Counter()
    first: dict[str, int] = {}
    ids: list[np.ndarray] = []
    counted: list[np.ndarray] = []
    with announced(f"tokenising {source}"):
        for i, (problem, pieces) in enumerate(pipeline):
            if problem:
                skipped.update([problem])
                first.setdefault(problem, i)
            for piece_ids, piece_counted in pieces:
                ids.append(np.asarray(piece_ids, np.int32))
                counted.append(np.asarray(piece_counted, bool))
    reasons = "; ".join(
        f"{n} x {why}, first in {place(source, records[first[why]], first[why])}"
        for why, n in skipped.most_common()
    )
    if not ids:
        raise UserError(
            f"none of the {len(records)} samples of {source} can be used: {reasons}"
        )
    inform(f"{source}: {len(records) - skipped.total()} of {len(records)} samples used")
    if skipped:
        inform(f"{source}: {skipped.total()} samples skipped ({reasons})")
    report = {"source": source, "samples": len(records), "skipped": dict(skipped)}
    write_directory(directory, ids, counted, report)


def write_directory(
    directory: str, ids: list[np.ndarray], counted: list[np.ndarray], report: Json
) -> None:
    """Write a token directory with its checksums."""
    with replacing(directory) as new:
        write_tokens(new, ids, counted)
        sums = {name: checksum(os.path.join(new, name)) for name in ARRAYS}
        write_json(os.path.join(new, REPORT), report | {"crc32": sums})


def place(source: str, record: object, i: int) -> str:
    """The location of sample i (0-based) of a source: a file, "line 7" or "sample 7"."""
    if isinstance(record, Path):
        return str(record)
    if not source.endswith(".jsonl"):
        return f"sample {i + 1}"
    with open(source, encoding="utf-8", errors="replace") as file:
        lines = (number for number, line in enumerate(file, 1) if line.strip())
        return f"line {next(itertools.islice(lines, i, None))}"


def text_files(directory: str) -> list[Path]:
    """The non-empty text files below a directory, sorted."""
    files = (path for path in Path(directory).rglob("*") if path.suffix in TEXT_FILES)
    return sorted(path for path in files if path.is_file() and path.stat().st_size)


def read_records(source: str, pack: DataConfig) -> Sequence[object]:
    """The samples of a source; those of a directory are its text files.

    Lines of .jsonl files are not parsed here, so that a bad line fails alone.
    """
    if os.path.isdir(source):
        records: Sequence[object] = text_files(source)
    elif os.path.isfile(source):
        try:
            with open(source, encoding="utf-8", errors="replace") as file:
                if source.endswith(".jsonl"):
                    records = [line for line in file if line.strip()]
                elif source.endswith(".json"):
                    records = json.load(file)
                elif source.endswith(".txt"):
                    records = [file.read()]
                else:
                    raise UserError(f"{source}: data files end in .jsonl, .json or .txt")
        except (OSError, ValueError) as error:
            raise UserError(f"{source} cannot be read: {error}") from error
        if not isinstance(records, list):
            raise UserError(f"{source} must hold a JSON list of samples")
    else:
        return hub_records(source, pack)
    if not records:
        raise UserError(f"{source} has no samples")
    return records[: pack.max_samples or None]


def hub_records(source: str, pack: DataConfig) -> Sequence[object]:
    """A Hugging Face dataset by id."""
    is_path = source.startswith((".", "/")) or source.endswith((".jsonl", ".json", ".txt"))
    if is_path or source.count("/") > 1:
        raise UserError(f"there is no file or token directory {source}")
    import datasets

    try:
        records = datasets.load_dataset(source, split=pack.split)
    except Exception as error:  # the library raises many types for missing, gated, offline
        raise UserError(
            f"{source} is neither a file nor a dataset that can be loaded ({first_line(error)}); give a "
            f"path, check the id and split {pack.split!r}, or log in with `hf auth login`"
        ) from error
    return records.select(range(min(pack.max_samples or len(records), len(records))))


# (reason to skip a sample or "", [(token ids, counted), ...])
Encoded = tuple[str, list[tuple[list[int], list[int]]]]


class Encoder:
    """Encodes a sample: (reason to skip it or "", [(token ids, counted), ...])."""

    def __init__(self, tokenizer: Tokenizer, pack: DataConfig, source: str):
        self.tokenizer, self.pack = tokenizer, pack
        self.kind = pack.format
        self.lines = source.endswith(".jsonl")
        if self.kind == "auto" and (source.endswith(".txt") or os.path.isdir(source)):
            self.kind = "text"
        end = tokenizer.special_texts.get("eos_token", "")
        self.eos = tokenizer.token_to_id(end) if end else None
        if self.kind != "text" and pack.chat_template:
            # Raises for an unknown name.
            chat.template_source(tokenizer, pack.chat_template)

    def __call__(self, record: object) -> Encoded:
        try:
            if isinstance(record, Path):
                record = record.read_text(encoding="utf-8", errors="replace")
            elif self.lines and isinstance(record, str):
                record = json.loads(record)
            return self.encode(record)
        except (ValueError, RecursionError):
            return "broken JSON", []
        except (UserError, OSError) as error:
            return str(error), []

    def encode(self, record: object) -> Encoded:
        """Encode a parsed sample."""
        kind = self.kind
        if kind == "auto":
            fields = {"conversations": "sharegpt", "messages": "messages", "text": "text"}
            keys = record if isinstance(record, dict) else {}
            kind = next((k for field, k in fields.items() if field in keys), "")
            if not kind:
                return "none of the fields conversations, messages, text", []
        problem, pieces = (
            self.text(record) if kind == "text" else self.conversation(record, kind)
        )
        kept = [piece for piece in pieces if not self.too_repetitive(*piece)]
        return (problem, kept) if kept or problem else ("repeats itself", [])

    def too_repetitive(self, ids: list[int], counted: list[int]) -> bool:
        """Whether the share of repeated 4-grams among counted tokens exceeds `data.max_repeats`."""
        if self.pack.max_repeats >= 1:
            return False
        targets = [i for i, counts in zip(ids, counted) if counts]
        return repeated_ngram_share(targets) > self.pack.max_repeats

    def text(self, record: object) -> Encoded:
        """Encode plain text: every token counts; long texts are cut into pieces of one row each."""
        text = record.get("text") if isinstance(record, dict) else record
        if not isinstance(text, str) or not text.strip():
            return "no text", []
        ids = self.tokenizer.encode(text, add_bos=True)
        ids += [self.eos] if self.eos is not None else []
        T = self.pack.seq_len if self.pack.packing == "first_fit" else len(ids)
        pieces = [ids[i : i + T] for i in range(0, len(ids), T)]
        return "", [(piece, [1] * len(piece)) for piece in pieces]

    def conversation(self, record: object, kind: str) -> Encoded:
        """Encode a conversation: only the assistant's tokens count."""
        parse = chat.parse_sharegpt if kind == "sharegpt" else chat.parse_messages
        messages, problem = parse(record)
        if problem:
            return problem, []
        try:
            cut = isinstance(record, dict) and bool(
                record.get("cut")
            )  # as `distill` marks it
            ids, counted = chat.encode_conversation(
                self.tokenizer, messages, self.pack.chat_template, cut
            )
        except chat.SampleError as error:
            return str(error), []
        # Nothing predicts the first token of a sample.
        if not any(counted[1 : self.pack.seq_len]):
            return "no counted token within seq_len", []
        return "", [(ids, counted)]
