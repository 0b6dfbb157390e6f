"""The demo's text: the source code of the running Python's standard library.

    python -m research demo_corpus --out work/demo

reads the `.py` files of the standard library (with its test suite, if installed), drops tables,
licence headers and copies, holds out about 3% of the files by a hash of their path, trains a
byte-level BPE tokenizer on the rest and writes

    tokenizer/                     loads with `transformers.AutoTokenizer`
    train/tokens.npy               uint16, documents in shuffled order, one after another
    train/doc_starts.npy           int64, offset of each document in tokens.npy
    heldout/{tokens,doc_starts}.npy
    heldout/prompts.jsonl          prompt, prompt_ids, continuation, continuation_ids, file
    seeds.jsonl                    prompts from training files, for self-distillation
    corpus.json                    statistics of input and output, checksums

A document is `<|endoftext|>` + its tokens + `<|endoftext|>`, so that the model has seen the start token
as a prompt. The same Python version gives the same bytes.
"""

import dataclasses
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from medusa_jax.commands.flags import CommandLine, flag
from medusa_jax.errors import UserError
from medusa_jax.training.data.rows import write_tokens
from medusa_jax.whole_files import Json, write_json, write_text
from research.demo.sources import SourceFile, limit_files, read_sources, split_files

END_OF_TEXT = "<|endoftext|>"

# Pieces within which BPE may merge. A line break includes the next line's indentation, a word one
# space, dot or underscore before it; digits are separate. Characters per token on held-out files with
# 4096 tokens (Python 3.11): 3.46 if a word includes only a space, 3.50 if names keep their
# underscores, 3.59 this one, 3.66 if a word includes any one character before it, 3.83 if punctuation
# also includes the line break after it. The last two were rejected because a prompt that ends in "("
# or ":" would then end in a token that training rarely saw.
SPLIT = (
    r"\n+[ \t]*"
    r"|[ ._]?\p{L}+"
    r"| ?\p{N}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[ \t]+"
    r"|\s+"
)

CONTINUATION = 256
PROMPT_TOKENS = (64, 192)
SEED_TOKENS = (64, 128)
_OUTPUTS = ("tokenizer", "train", "heldout", "seeds.jsonl")


def train_tokenizer(texts: Iterator[str], vocab_size: int):
    """A byte-level BPE `tokenizers.Tokenizer` of exactly `vocab_size` ids.

    Ids 0..255 are bytes (id 0 is an ordinary token), then merges, `<|endoftext|>` last.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(
            f"the text yields only {tokenizer.get_vocab_size()} tokens, not {vocab_size}: "
            "lower --vocab or raise --limit_mb."
        )
    return tokenizer


def save_tokenizer(tokenizer, folder: Path) -> None:
    """Write the three files that `AutoTokenizer.from_pretrained(folder)` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    specials = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", specials)


def encode_files(tokenizer, files: list[SourceFile], progress: str) -> list[np.ndarray]:
    """One uint16 array per file, without the end tokens."""
    from tqdm import tqdm

    out: list[np.ndarray] = []
    with tqdm(total=len(files), desc=progress, unit="file", disable=None) as bar:
        for i in range(0, len(files), 64):
            batch = [f.text for f in files[i : i + 64]]
            out.extend(
                np.array(e.ids, np.uint16)
                for e in tokenizer.encode_batch(batch, add_special_tokens=False)
            )
            bar.update(len(batch))
    return out


def write_stream(folder: Path, documents: list[np.ndarray], end: int, seed: int) -> int:
    """Write tokens.npy and doc_starts.npy with the documents shuffled; returns the length.

    documents [[5, 6], [7]], end 9, in this order: tokens 9 5 6 9 9 7 9, doc_starts 0 4.
    """
    order = np.random.default_rng(seed).permutation(len(documents))
    parts = [np.concatenate([[end], documents[i], [end]]) for i in order]
    parts = [part.astype(np.uint16) for part in parts]
    write_tokens(folder, parts)
    return sum(map(len, parts))


def cut_prompts(
    tokenizer,
    files: list[SourceFile],
    documents: list[np.ndarray],
    count: int,
    length: tuple[int, int],
    continuation: int,
    seed: int,
) -> Iterator[Json]:
    """Up to `count` non-overlapping prompts of `length` (min, max) tokens.

    Every document is divided into slots of max + continuation tokens, and each chosen slot is cut at a
    random place. The prompt starts at a line break if one leaves at least min tokens. A cut is valid
    only if encoding the prompt's text gives its ids again (otherwise text and ids would be different
    prompts); else the next place is tried.
    """
    low, high = length
    width = high + continuation
    slots = [
        (d, start)
        for d, ids in enumerate(documents)
        for start in range(0, len(ids) - low - continuation + 1, width)
        if min(len(ids) - start, width) >= low + continuation
    ]
    rng = np.random.default_rng(seed)
    cuts = sorted(slots[i] for i in rng.permutation(len(slots))[:count])
    newline = np.zeros(tokenizer.get_vocab_size(), bool)
    for token, i in tokenizer.get_vocab().items():
        newline[i] = token.startswith("Ċ")  # the byte-level alphabet's "\n"
    for d, start in cuts:
        ids = documents[d][start : start + width]
        n = int(rng.integers(low, min(high, len(ids) - continuation) + 1))
        latest = len(ids) - continuation
        offset = int(rng.integers(0, latest - n + 1))
        for cut in [*range(offset + n, latest + 1), *range(offset + n - 1, low - 1, -1)]:
            first = max(0, cut - n)
            breaks = np.flatnonzero(newline[ids[first : cut - low + 1]])
            first += int(breaks[0]) if breaks.size else 0
            prompt_ids = ids[first:cut].tolist()
            if not low <= len(prompt_ids) <= high:
                continue
            prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False)
            if tokenizer.encode(prompt, add_special_tokens=False).ids == prompt_ids:
                break
        else:
            continue
        row = {"file": files[d].path, "prompt": prompt, "prompt_ids": prompt_ids}
        if continuation:
            row["continuation_ids"] = ids[cut : cut + continuation].tolist()
            row["continuation"] = tokenizer.decode(
                row["continuation_ids"], skip_special_tokens=False
            )
        yield row


def _write_jsonl(path: Path, rows: Iterable[Json]) -> int:
    lines = [json.dumps(row) + "\n" for row in rows]
    write_text(path, "".join(lines))
    return len(lines)


def build(
    out: Path,
    root: Path | None = None,
    vocab: int = 4096,
    limit_mb: float = 0.0,
    heldout: float = 0.03,
    prompts: int = 320,
    seeds: int = 20000,
    seed: int = 0,
) -> Json:
    """Build the whole corpus below `out` and return the content of corpus.json.

    root: standard library to read (default: that of the running Python). limit_mb: budget in
    million characters, 0 = everything. heldout: expected share of held-out files.
    """
    from tqdm import tqdm

    if not 258 <= vocab <= 65536:
        raise UserError(f"--vocab must be from 258 to 65536, not {vocab}")
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files, left_out = read_sources(root)
    train, held_out, near_copies = split_files(limit_files(files, limit_mb), heldout)
    texts = (f.text for f in tqdm(train, desc="learning BPE", unit="file", disable=None))
    tokenizer = train_tokenizer(texts, vocab)
    end = tokenizer.token_to_id(END_OF_TEXT)
    save_tokenizer(tokenizer, out / "tokenizer")

    splits = {}
    for name, part in (("train", train), ("heldout", held_out)):
        documents = encode_files(tokenizer, part, f"encoding {name}")
        n_bytes = sum(len(f.text.encode()) for f in part)
        n_tokens = sum(map(len, documents))
        splits[name] = {
            "files": len(part),
            "bytes": n_bytes,
            "stream_tokens": write_stream(out / name, documents, end, seed),
            "characters_per_token": round(sum(len(f.text) for f in part) / n_tokens, 4),
            "bytes_per_token": round(n_bytes / n_tokens, 4),
        }
        if name == "heldout":
            rows = cut_prompts(
                tokenizer, part, documents, prompts, PROMPT_TOKENS, CONTINUATION, seed + 1
            )
            n_prompts = _write_jsonl(out / "heldout" / "prompts.jsonl", rows)
        else:
            rows = cut_prompts(tokenizer, part, documents, seeds, SEED_TOKENS, 0, seed + 2)
            bar = tqdm(rows, desc="cutting seeds", unit="prompt", disable=None)
            n_seeds = _write_jsonl(out / "seeds.jsonl", bar)

    outputs = [p for p in sorted(out.rglob("*")) if p.is_file() and p.name != "corpus.json"]
    outputs = [p for p in outputs if p.relative_to(out).parts[0] in _OUTPUTS]
    report = {
        "python": platform.python_version(),
        "settings": {
            "vocab": vocab,
            "limit_mb": limit_mb,
            "heldout": heldout,
            "seed": seed,
            "split": SPLIT,
        },
        "left_out": {**left_out, "near_duplicate": len(near_copies)},
        "splits": splits,
        "heldout_prompts": n_prompts,
        "seeds": n_seeds,
        "heldout_files": [f.path for f in held_out],
        "near_duplicates": near_copies,
        "sha256": {
            p.relative_to(out).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in outputs
        },
    }
    write_json(out / "corpus.json", report)
    return report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Build the demo's training text from Python's standard library."""

    out: str = flag("folder to write to")
    root: str | None = flag("standard library (default: this Python's)", None)
    vocab: int = flag("tokens in the vocabulary", 4096)
    limit_mb: float = flag("text budget; 0 = all", 0.0)
    heldout: float = flag("share of files", 0.03)
    prompts: int = flag("held-out prompts at most", 320)
    seeds: int = flag("seed prompts at most", 20000)
    seed: int = flag("of all random choices", 0)


def run(flags: Flags) -> int:
    """Build the corpus; returns the exit status."""
    arguments = vars(flags) | {"out": Path(flags.out)}
    arguments["root"] = flags.root and Path(flags.root)
    return show(build(**arguments), arguments["out"])


def show(report: Json, out: Path) -> int:
    for name, part in report["splits"].items():
        print(
            f"{name}: {part['files']} files, {part['bytes'] / 1e6:.2f} MB, "
            f"{part['stream_tokens']:,} tokens, "
            f"{part['characters_per_token']:.2f} characters per token"
        )
    print(f"{report['heldout_prompts']} held-out prompts, {report['seeds']} seeds in {out}")
    return 0


main = CommandLine("python -m research demo_corpus", Flags, run)
