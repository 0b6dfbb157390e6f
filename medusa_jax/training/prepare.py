"""Checks before a run, and text of any source to a token directory."""

import collections
import difflib
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from medusa_jax.config import Config, DataConfig
from medusa_jax.console import announced, say
from medusa_jax.errors import UserError
from medusa_jax.interop import chat
from medusa_jax.interop.tokenizer import Tokenizer, load_tokenizer
from medusa_jax.sharding import row_shards
from medusa_jax.training.partition import trained_groups

CHOICES = {
    "train.stage": ("backbone", "medusa1", "medusa2", "native"),
    "train.lambda_0_schedule": ("constant", "sine"),
    "train.backbone_loss": ("labels", "kl"),
    "model.quantise": ("", "int8", "nf4"),
    "train.dtype": ("float32", "bfloat16", "float16", "float64"),
    "model.param_dtype": ("float32", "bfloat16", "float16"),
    "data.format": ("auto", "text", "sharegpt", "messages", "tokens"),
    "data.packing": ("first_fit", "concat"),
    "optim.name": ("adamw", "adamw8bit", "muon"),
    "optim.heads_name": ("", "adamw", "adamw8bit", "muon"),
    "optim.moment_dtype": ("float32", "bfloat16"),
    "optim.schedule": ("cosine", "wsd", "constant"),
}


def check_choices(cfg: Config) -> None:
    """Refuses a name that no field knows, with the nearest one that it does."""
    for path, allowed in CHOICES.items():
        room, name = path.split(".")
        value = getattr(getattr(cfg, room), name)
        if value not in allowed:
            near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.0)[0]
            raise UserError(
                f"{path} is {' or '.join(allowed)}, not {value!r}; did you mean {near!r}?"
            )


def fit_accumulation(cfg: Config, mesh: Mesh) -> None:
    """Fewer microbatches, where one would have fewer rows than there are devices to share them.

    Recipes say how many rows one device takes at a time; the update is the same.
    """
    t, devices = cfg.train, row_shards(mesh)
    if t.batch_size < t.accumulation * devices and t.batch_size % devices == 0:
        t.accumulation = t.batch_size // devices


def check(cfg: Config, mesh: Mesh) -> None:
    """Refuses sizes that do not fit together, before anything is compiled.

    Raises:
      UserError: names the two fields.
    """
    trained_groups(cfg)  # refuses what no stage trains
    t = cfg.train
    positive = {
        "train.batch_size": t.batch_size,
        "train.accumulation": t.accumulation,
        "train.loss_chunk": t.loss_chunk,
        "train.log_every": t.log_every,
        "train.eval_every": t.eval_every,
        "train.save_every": t.save_every,
        "train.max_bad_steps": t.max_bad_steps,
        "data.seq_len": cfg.data.seq_len,
    }
    for name, value in positive.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    shards = row_shards(mesh)
    if t.batch_size % (t.accumulation * shards):
        raise UserError(
            f"train.batch_size {t.batch_size} is not a multiple of accumulation x data x fsdp "
            f"= {t.accumulation} x {shards}"
        )
    if cfg.data.seq_len > cfg.model.arch.max_position:
        raise UserError(
            f"data.seq_len {cfg.data.seq_len} exceeds the model's {cfg.model.arch.max_position} "
            f"positions"
        )


def check_resume(data: dict[str, Any], cfg: Config, rows: Any) -> None:
    """Refuses to go on with other data than the checkpoint was made with."""
    if (data["rows"], data["batch_size"]) != (rows.rows, cfg.train.batch_size):
        raise UserError(
            f"the checkpoint in {cfg.workdir} was made with {data['rows']} rows in batches of "
            f"{data['batch_size']}, now there are {rows.rows} in batches of "
            f"{cfg.train.batch_size}; use another --workdir"
        )


def token_directory(cfg: Config, source: str, pack: DataConfig) -> str:
    """A directory with tokens.npy for any source, tokenised into the workdir if need be.

    Raises:
      UserError: a source that cannot be read, or of which no sample can be used.
    """
    if not source:
        raise UserError("data.source is empty: name a file, a directory or a dataset id")
    if os.path.isfile(os.path.join(source, "tokens.npy")):
        return source
    if pack.format == "tokens":
        raise UserError(f"data.format is tokens, but {source} has no tokens.npy")
    path = tokenizer_path(cfg, source)
    stamp = os.stat(source) if os.path.exists(source) else None
    key: list[Any] = [
        source,
        stamp and (stamp.st_size, stamp.st_mtime_ns),
        path,
        cfg.train.stage,
    ]
    key += [
        pack.split,
        pack.format,
        pack.chat_template,
        pack.max_samples,
        pack.seq_len,
        pack.packing,
    ]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    directory = os.path.join(cfg.workdir, "tokens", digest)
    if jax.process_index() == 0 and not os.path.isdir(directory):
        tokenise(source, load_tokenizer(path), pack, directory)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"tokens {digest}")
    return directory


def tokenizer_path(cfg: Config, source: str) -> str:
    """Where the tokenizer lies that reads `source`.

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
    ids, counted, lengths = [], [], []
    with announced(f"tokenising {source}"):
        for problem, pieces in pipeline:
            skipped.update([problem] if problem else [])
            for piece_ids, piece_counted in pieces:
                ids.append(np.asarray(piece_ids, np.int32))
                counted.append(np.asarray(piece_counted, bool))
                lengths.append(len(piece_ids))
    reasons = ", ".join(f"{n} x {why}" for why, n in skipped.most_common())
    if not ids:
        raise UserError(
            f"none of the {len(records)} samples of {source} can be used: {reasons}"
        )
    say(f"{source}: {len(records) - skipped.total()} of {len(records)} samples used")
    if skipped:
        say(f"{source}: {skipped.total()} samples skipped ({reasons})")
    new = directory + ".new"
    shutil.rmtree(new, ignore_errors=True)
    os.makedirs(new)
    np.save(os.path.join(new, "tokens.npy"), np.concatenate(ids))
    np.save(os.path.join(new, "counted.npy"), np.concatenate(counted))
    np.save(
        os.path.join(new, "doc_starts.npy"), np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    )
    report = {"source": source, "samples": len(records), "skipped": dict(skipped)}
    with open(os.path.join(new, "report.json"), "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    os.rename(new, directory)


def read_records(source: str, pack: DataConfig) -> Sequence[Any]:
    """The samples of a source, unparsed where one bad sample must not spoil the rest."""
    if os.path.isfile(source):
        try:
            with open(source, encoding="utf-8", errors="replace") as file:
                if source.endswith(".jsonl"):
                    records: Any = [line for line in file if line.strip()]
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
        records = hub_records(source, pack.split)
    if pack.max_samples:
        take = range(min(pack.max_samples, len(records)))
        records = (
            records[: len(take)] if isinstance(records, list) else records.select(take)
        )
    if not len(records):
        raise UserError(f"{source} has no samples")
    return records


def hub_records(source: str, split: str) -> Any:
    """A Hugging Face dataset by id."""
    is_path = source.startswith((".", "/")) or source.endswith((".jsonl", ".json", ".txt"))
    if is_path or source.count("/") > 1:
        raise UserError(f"there is no file or token directory {source}")
    import datasets

    try:
        return datasets.load_dataset(source, split=split)
    except Exception as error:  # the library raises many types for missing, gated, offline
        reason = str(error).strip().splitlines()[0][:200] if str(error) else repr(error)
        raise UserError(
            f"{source} is neither a file nor a dataset that can be loaded ({reason}); give a "
            f"path, check the id and split {split!r}, or log in with `hf auth login`"
        ) from error


class Encoder:
    """A sample -> (why it is skipped or "", [(token ids, counted), ...])."""

    def __init__(self, tokenizer: Tokenizer, pack: DataConfig, source: str):
        self.tokenizer, self.pack = tokenizer, pack
        self.kind = pack.format
        self.lines = source.endswith(".jsonl")
        if self.kind == "auto" and source.endswith(".txt"):
            self.kind = "text"
        end = tokenizer.special_texts.get("eos_token", "")
        self.eos = tokenizer.token_to_id(end) if end else None
        if self.kind != "text" and pack.chat_template:
            chat.template_source(
                tokenizer, pack.chat_template
            )  # an unknown name fails here

    def __call__(self, record: Any) -> tuple[str, list[tuple[list[int], list[int]]]]:
        if self.lines:
            try:
                record = json.loads(record)
            except ValueError:
                return "broken JSON", []
        kind = self.kind
        if kind == "auto":
            fields = {"conversations": "sharegpt", "messages": "messages", "text": "text"}
            keys = record if isinstance(record, dict) else {}
            kind = next((k for field, k in fields.items() if field in keys), "")
            if not kind:
                return "none of the fields conversations, messages, text", []
        return self.text(record) if kind == "text" else self.conversation(record, kind)

    def text(self, record: Any) -> tuple[str, list[tuple[list[int], list[int]]]]:
        """Every token counts; a long text becomes pieces of one row each."""
        text = record.get("text") if isinstance(record, dict) else record
        if not isinstance(text, str) or not text.strip():
            return "no text", []
        ids = self.tokenizer.encode(text, add_bos=True)
        ids += [self.eos] if self.eos is not None else []
        T = self.pack.seq_len if self.pack.packing == "first_fit" else len(ids)
        pieces = [ids[i : i + T] for i in range(0, len(ids), T)]
        return "", [(piece, [1] * len(piece)) for piece in pieces]

    def conversation(
        self, record: Any, kind: str
    ) -> tuple[str, list[tuple[list[int], list[int]]]]:
        """Only what the assistant says counts."""
        parse = chat.parse_sharegpt if kind == "sharegpt" else chat.parse_messages
        messages, problem = parse(record)
        if problem:
            return problem, []
        try:
            cut = bool(record.get("cut"))  # as `distill` marks it
            ids, counted = chat.encode_conversation(
                self.tokenizer, messages, self.pack.chat_template, cut
            )
        except chat.SampleError as error:
            return str(error), []
        # The first token of a sample has nothing before it that could predict it.
        if not any(counted[1 : self.pack.seq_len]):
            return "no counted token within seq_len", []
        return "", [(ids, counted)]
