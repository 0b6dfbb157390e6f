"""`python -m medusa_jax.demo.refine`: teach the demo's backbone not to run in circles.

Small language models fall into loops when they are decoded greedily. Here the model continues
training prompts greedily, and wherever a text repeats itself too much, each token that completes
a 4-gram which that text has held before is marked. A step then lowers

    sum of -log p over text of the corpus  +  sum of -log(1 - p) over marked tokens

divided by the number of both: likelihood and unlikelihood (Welleck et al. 2020, section 5.2).
What else the model wrote is only context: likelihood of its own greedy choices would make it
surer of its loops. New text is written every few steps, so that the loops are always its own.
Once it writes well, `--learn_own --config.train.stage=native` makes it surer of the rest, and
trains heads along with it, which are its guide to looking ahead (Medusa 2.2.2).

It is a training run like others (checkpoints, resuming, log); only the rows are made on the way:

    python -m medusa_jax.demo.refine --model work/demo/native/export --work work/demo \\
        --out work/demo/refined --config.train.steps=1000
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from medusa_jax.api import Options, load
from medusa_jax.cli.train import parse
from medusa_jax.config import Config
from medusa_jax.console import run_main, say, use_compilation_cache
from medusa_jax.errors import UserError
from medusa_jax.model.llama import prepare
from medusa_jax.text_stats import repeated_ngram_share
from medusa_jax.training.trainer import train
from medusa_jax.tree import Tree

NGRAM = 4
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
    p.add_argument("--renew", type=int, default=8, help="steps between writings")
    p.add_argument("--max_new_tokens", type=int, default=200)
    p.add_argument("--allowed", type=float, default=0.12,
                   help="share of repeated 4-grams that a text may hold unmarked (that of code)")  # fmt: skip
    p.add_argument("--learn_own", action="store_true",
                   help="likelihood also of its own text, where it is not marked")  # fmt: skip
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


def marked_row(
    prompt: Sequence[int],
    text: Sequence[int],
    allowed: float,
    seq_len: int,
    learn_own: bool = False,
) -> dict[str, np.ndarray]:
    """A row of a batch: the prompt 0 (context), repeats in what the model wrote -1, the rest of
    it 0, or 1 with `learn_own`.

    A text with a share of repeats up to `allowed` has no marks.
    """
    counted = np.zeros(len(prompt) + len(text), np.int8)
    counted[len(prompt) :] = learn_own
    if repeated_ngram_share(text, NGRAM) > allowed:
        counted[len(prompt) :][completes_repeat(np.asarray(text))] = -1
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


class OwnText:
    """The batches of the run: `own` rows of what the model writes, the others from the corpus.

    Attributes:
      rows: number of prompts.
      shares: of each writing, the mean share of repeated 4-grams.
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
        self.shares: list[float] = []
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
        size = self.flags.renew * self.flags.own
        prompts = [
            self.prompts[self.order[(number * size + i) % self.rows]] for i in range(size)
        ]
        file = Path(self.flags.out) / "texts" / f"{number:05d}.json"
        if late and file.exists():
            texts = json.loads(file.read_text())
        else:
            texts = self.write(prompts, params)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(texts))
        self.written = [
            marked_row(
                prompt,
                text,
                self.flags.allowed,
                self.cfg.data.seq_len,
                self.flags.learn_own,
            )
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        self.shares.append(float(np.mean([repeated_ngram_share(t, NGRAM) for t in texts])))
        say(f"before step {n}: {self.shares[-1]:.3f} of the 4-grams of new text repeat")

    def write(self, prompts: list[list[int]], params: Any) -> list[list[int]]:
        """Greedy continuations."""
        self.model.variables["base"] = self.fuse(params["backbone"])
        options = Options(max_new_tokens=self.flags.max_new_tokens)
        return [
            list(result.token_ids)
            for at in range(0, len(prompts), 64)
            for result in self.model.generate(
                prompts[at : at + 64], options, tree=Tree.none()
            )
        ]

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
    if flags.renew < 1:
        raise UserError(f"--renew is 1 or more, not {flags.renew}")
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
