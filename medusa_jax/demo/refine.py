"""`python -m medusa_jax.demo.refine`: teach the demo's backbone not to run in circles.

Small language models fall into loops when they are decoded greedily. Here the model continues
training prompts in two ways, new ones every few steps, so that the loops are always its own:

    plain      greedy: what its text is. Where it repeats itself too much, each token that
               completes a 4-gram which the text has held before is marked; where it is made of
               stock phrases, each that completes a 4-gram which many texts hold. The rest is
               context (likelihood of it would make the model surer of its loops)
    varied     greedy, but what would repeat too much gives way to the likeliest token that does
               not (`varied.py`): what its text should be

A step lowers

    sum of -log p over varied text and text of the corpus  +  u sum of -log(1 - p) over marks

divided by the number of both, u being `train.unlikelihood`: likelihood and unlikelihood (Welleck
et al. 2020, section 5.2). Varied text is off by default: with half of it the repeats went, from
0.49 to 0.15 of the 4-grams in 300 steps, but so did all variety: from 0.2 to 0.85 of them came to
stand in other texts of the same writing (0.06 of those of real code).

It is a training run like others (checkpoints, resuming, log); only the rows are made on the way:

    python -m medusa_jax.demo.refine --model work/demo/native/export --work work/demo \\
        --out work/demo/refined
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from medusa_jax.api import load
from medusa_jax.cli.train import parse
from medusa_jax.config import Config
from medusa_jax.console import run_main, say, use_compilation_cache
from medusa_jax.demo.varied import NGRAM, write_varied
from medusa_jax.errors import UserError
from medusa_jax.model.llama import prepare
from medusa_jax.text_stats import repeated_ngram_share, shared_ngram_share
from medusa_jax.training.export import write_json
from medusa_jax.training.trainer import train

CONFIG = "configs/demo_refine.py"


def parser() -> argparse.ArgumentParser:
    """All flags but those of the training run, which are `--config.field=value`."""
    p = argparse.ArgumentParser(
        prog="python -m medusa_jax.demo.refine",
        description="Train a small backbone against its own greedy loops.",
        epilog="Fields of the training run (configs/demo_refine.py) are set as in train.py, "
        "e.g. --config.train.steps=100.",
    )
    p.add_argument("--model", required=True, help="directory of the backbone")
    p.add_argument("--work", default="work/demo", help="folder of the corpus")
    p.add_argument("--out", default="work/demo/refined", help="folder of the run")
    p.add_argument("--own", type=int, default=8,
                   help="rows of each batch that hold the model's own text; the others are corpus")  # fmt: skip
    p.add_argument("--varied", type=int, default=0,
                   help="those of --own that are varied text (with it texts became alike)")  # fmt: skip
    p.add_argument("--common", type=int, default=4,
                   help="in how many plain texts of a writing a 4-gram may stand unmarked")  # fmt: skip
    p.add_argument("--renew", type=int, default=8, help="steps between writings")
    p.add_argument("--max_new_tokens", type=int, default=200)
    p.add_argument("--allowed", type=float, default=0.12,
                   help="share of repeated 4-grams that a text may hold unmarked (that of code)")  # fmt: skip
    return p


def completes_repeat(tokens: np.ndarray, n: int = NGRAM) -> np.ndarray:
    """Which tokens are the last of an n-gram that began earlier in the sequence: [T] bool.

    Example, n = 2:  a b a b c a b  ->  no no no YES no no YES
    """
    repeat = np.zeros(len(tokens), bool)
    seen: set[tuple[int, ...]] = set()
    values = tokens.tolist()
    for end in range(n, len(values) + 1):
        gram = tuple(values[end - n : end])
        repeat[end - 1] = gram in seen
        seen.add(gram)
    return repeat


def stock_phrases(texts: Sequence[Sequence[int]], most: int) -> set[tuple[int, ...]]:
    """4-grams that stand in more than `most` of the texts."""
    held = Counter(
        gram
        for text in texts
        for gram in {tuple(text[i : i + NGRAM]) for i in range(len(text) - NGRAM + 1)}
    )
    return {gram for gram, n in held.items() if n > most}


def marked_row(
    prompt: Sequence[int],
    text: Sequence[int],
    allowed: float,
    seq_len: int,
    stock: Set[tuple[int, ...]] = frozenset(),
) -> dict[str, np.ndarray]:
    """A row of a batch: prompt and plain text, in the text repeats and the last token of stock
    phrases -1, else 0 (context).

    A text with a share of repeats up to `allowed` has no marks for repeats, one with a share of
    stock phrases up to it none for those.
    """
    marks = np.zeros(len(text), bool)
    phrase = np.array(
        [tuple(text[max(i - NGRAM, 0) : i]) in stock for i in range(1, len(text) + 1)], bool
    )
    for found in (completes_repeat(np.asarray(text)), phrase):
        if found.sum() > allowed * (len(text) - NGRAM + 1):
            marks |= found
    counted = np.concatenate([np.zeros(len(prompt)), -marks.astype(np.int8)])
    return row(np.concatenate([prompt, text]), counted, seq_len)


def learnt_row(
    prompt: Sequence[int], text: Sequence[int], seq_len: int
) -> dict[str, np.ndarray]:
    """A row of a batch: the prompt 0 (context), the varied text 1."""
    counted = np.repeat(np.array([0, 1], np.int8), [len(prompt), len(text)])
    return row(np.concatenate([prompt, text]), counted, seq_len)


def row(tokens: np.ndarray, counted: np.ndarray, seq_len: int) -> dict[str, np.ndarray]:
    """One text, padded to seq_len (segment 0)."""
    n = min(len(tokens), seq_len)
    out = {
        name: np.zeros(seq_len, np.int32) for name in ("tokens", "positions", "segment_ids")
    }
    out |= {"counted": np.zeros(seq_len, np.int8)}
    out["tokens"][:n], out["counted"][:n] = tokens[:n], counted[:n]
    out["positions"][:n], out["segment_ids"][:n] = np.arange(n), 1
    return out


def changed(varied: Sequence[dict[str, Any]]) -> float:
    """Share of the tokens of varied texts that were not the likeliest."""
    tokens = sum(len(v["token_ids"]) for v in varied)
    return sum(v["swapped"] for v in varied) / max(tokens, 1)


class OwnText:
    """The batches of the run: `own` rows of what the model writes, the others from the corpus.

    Attributes:
      rows: number of prompts.
    """

    def __init__(self, flags: argparse.Namespace, cfg: Config):
        self.flags, self.cfg = flags, cfg
        self.model = load(flags.model, "none")
        work = Path(flags.work)
        seeds = (work / "answer_seeds.jsonl").read_text().splitlines()
        self.prompts = [json.loads(line)["prompt_ids"] for line in seeds]
        self.order = np.random.default_rng(cfg.train.seed).permutation(len(seeds))
        self.corpus = np.load(work / "train" / "tokens.npy", mmap_mode="r")
        self.rows = len(seeds)
        self.written: list[dict[str, np.ndarray]] = []
        self.fuse = jax.jit(
            lambda params: prepare(params, self.model.config, self.model.dtype)
        )

    def before_step(self, n: int, params: Any) -> None:
        """Write new text with the model as it is, every `renew` steps.

        It is kept in a file: a run that was stopped in between goes on with the same text.
        """
        number, late = divmod(n - 1, self.flags.renew)
        if late and self.written:
            return
        own, varied = self.flags.own, self.flags.varied
        size, cut = (self.flags.renew * k for k in (own, own - varied))
        prompts = [
            self.prompts[self.order[(number * size + i) % self.rows]] for i in range(size)
        ]
        file = Path(self.flags.out) / "texts" / f"{number:05d}.json"
        if late and file.exists():
            texts = json.loads(file.read_text())
            if len(texts) != size:
                raise UserError(
                    f"{file} holds {len(texts)} texts, not {size}: go on with the --own and "
                    "--renew of before"
                )
        else:
            texts = self.write(n, prompts, cut, params)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(str(file), texts)
        length, allowed = self.cfg.data.seq_len, self.flags.allowed
        pairs = list(zip(prompts, texts, strict=True))
        stock = stock_phrases(texts[:cut], self.flags.common)
        plain = [marked_row(*pair, allowed, length, stock) for pair in pairs[:cut]]
        learnt = [learnt_row(*pair, length) for pair in pairs[cut:]]
        # Every step gets its part of either.
        self.written = [
            row
            for i in range(self.flags.renew)
            for row in plain[i :: self.flags.renew] + learnt[i :: self.flags.renew]
        ]

    def write(
        self, n: int, prompts: list[list[int]], cut: int, params: Any
    ) -> list[list[int]]:
        """Continue prompts up to `cut` plainly, the others varied; says how it went."""
        self.model.variables["base"] = self.fuse(params["backbone"])
        write = partial(write_varied, self.model, n_new=self.flags.max_new_tokens)
        written = write(prompts[:cut], allowed=1.0)
        written += write(prompts[cut:], allowed=self.flags.allowed)
        texts = [w["token_ids"] for w in written]
        for name, part in (("plain", written[:cut]), ("varied", written[cut:])):
            if part:
                new = [w["token_ids"] for w in part]
                repeated = np.mean([repeated_ngram_share(t, NGRAM) for t in new])
                say(
                    f"before step {n}: {repeated:.3f} of the 4-grams of {name} text repeat, "
                    f"{shared_ngram_share(new, NGRAM):.3f} stand in other texts, "
                    f"{changed(part):.1%} of its tokens were not the likeliest"
                )
        return texts

    def batch(self, first: int, n: int) -> dict[str, np.ndarray]:
        """The rows of step first / n: its part of the writing, and excerpts of the corpus."""
        step = first // n
        at = step % self.flags.renew * self.flags.own
        rows = self.written[at : at + self.flags.own]
        rng = np.random.default_rng((self.cfg.train.seed, step))
        length = self.cfg.data.seq_len
        starts = rng.integers(0, max(len(self.corpus) - length, 1), n - len(rows))
        for begin in starts:
            text = np.asarray(self.corpus[begin : begin + length], np.int32)
            rows = [*rows, row(text, np.ones(len(text), np.int8), length)]
        return {name: np.stack([r[name] for r in rows]) for name in rows[0]}


def run(flags: argparse.Namespace, fields: Sequence[str]) -> int:
    """The training run; the refined model lies in `out`/export."""
    for name in fields:
        if not name.startswith("--config."):
            raise UserError(f"unknown flag {name}; see --help")
    cfg = parse(
        [
            f"--config={CONFIG}", f"--workdir={flags.out}",
            f"--config.model.path={flags.model}", f"--config.data.source={flags.work}/train",
            f"--config.data.eval_source={flags.work}/heldout", *fields,
        ]
    )  # fmt: skip
    if not 1 <= flags.own < cfg.train.batch_size:
        raise UserError(
            f"--own must leave rows for the corpus: 1 to {cfg.train.batch_size - 1} of the "
            f"{cfg.train.batch_size} of a batch, not {flags.own}"
        )
    if not 0 <= flags.varied <= flags.own:
        raise UserError(f"--varied is 0 to --own {flags.own}, not {flags.varied}")
    if flags.renew < 1:
        raise UserError(f"--renew is 1 or more, not {flags.renew}")
    for file in ("answer_seeds.jsonl", "train/tokens.npy"):
        if not (Path(flags.work) / file).exists():
            raise UserError(
                f"there is no {flags.work}/{file}: python -m medusa_jax.demo.build makes it"
            )
    use_compilation_cache()
    own = OwnText(flags, cfg)
    longest = max(map(len, own.prompts)) + flags.max_new_tokens
    if longest > cfg.data.seq_len:
        raise UserError(
            f"prompts and --max_new_tokens take up to {longest} tokens, data.seq_len is "
            f"{cfg.data.seq_len}"
        )
    train(cfg, own)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    flags, fields = parser().parse_known_args(argv)
    return run_main(lambda: run(flags, fields))


if __name__ == "__main__":
    sys.exit(main())
