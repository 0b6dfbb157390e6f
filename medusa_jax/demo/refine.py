"""`python -m medusa_jax.demo.refine`: teach the demo's backbone not to run in circles.

Small language models fall into loops when they are decoded greedily. Each round here writes
continuations of training prompts with the model as it is now, of two kinds,

    plain      greedy: what its text is. Every token that completes a 4-gram which the sample has
               held before is marked
    varied     greedy, but what would repeat too much gives way to the likeliest token that does
               not (`varied.py`): what its text should be

and trains backbone and heads together (configs/demo_refine.py) on both, mixed with the corpus:
unlikelihood -log(1 - p) on the marked tokens (Welleck et al. 2020, section 5.2), likelihood
elsewhere. The next round starts from the model that the last one made, so that the loops are
always its own.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.api import load
from medusa_jax.console import run_main, say
from medusa_jax.demo.varied import NGRAM, write_varied
from medusa_jax.errors import UserError
from medusa_jax.text_stats import mean_repeated_ngram_share


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = argparse.ArgumentParser(
        prog="python -m medusa_jax.demo.refine",
        description="Rounds of writing, marking repeats, and training against them.",
    )
    p.add_argument("--model", required=True, help="directory of the backbone")
    p.add_argument("--work", default="work/demo", help="folder of the corpus")
    p.add_argument("--out", default="work/demo/refined", help="folder of the rounds")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--plain", type=int, default=512, help="plain continuations a round")
    p.add_argument("--varied", type=int, default=0, help="varied continuations a round")
    p.add_argument("--allowed", type=float, default=0.12,
                   help="share of repeated 4-grams in varied text")  # fmt: skip
    p.add_argument("--max_new_tokens", type=int, default=200)
    p.add_argument("--corpus_share", type=float, default=0.5,
                   help="share of the training tokens that comes from the corpus")  # fmt: skip
    p.add_argument("--train", action="append", default=[],
                   help="further flags for train.py, such as --config.train.steps=50")  # fmt: skip
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


def marked_samples(
    samples: Sequence[dict[str, Any]],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, counted) of each sample: prompt 0, its own new text 1, repeats in it -1."""
    out = []
    for sample in samples:
        prompt, new = sample["prompt_ids"], sample["token_ids"]
        tokens = np.array(prompt + new, np.int32)
        counted = np.where(completes_repeat(tokens), -1, 1).astype(np.int8)
        counted[: len(prompt)] = 0
        out.append((tokens, counted))
    return out


def write_mixture(
    samples: list[tuple[np.ndarray, np.ndarray]],
    corpus: Path,
    share: float,
    seq_len: int,
    seed: int,
    out: Path,
) -> None:
    """A token directory of the samples and as many corpus excerpts as make up `share`."""
    tokens = np.load(corpus / "tokens.npy", mmap_mode="r")
    own = sum(len(t) for t, _ in samples)
    n = round(own * share / (1 - share) / seq_len)
    rng = np.random.default_rng(seed)
    pieces = list(samples)
    for begin in rng.integers(0, max(len(tokens) - seq_len, 1), n):
        text = np.asarray(tokens[begin : begin + seq_len], np.int32)
        pieces.append((text, np.ones(len(text), np.int8)))
    lengths = [len(t) for t, _ in pieces]
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "tokens.npy", np.concatenate([t for t, _ in pieces]))
    np.save(out / "counted.npy", np.concatenate([c for _, c in pieces]))
    np.save(out / "doc_starts.npy", np.cumsum([0, *lengths[:-1]]).astype(np.int64))


def call(command: Sequence[str]) -> None:
    """Run a command of this project; its failure is ours."""
    say(" ".join(command))
    if code := subprocess.run([sys.executable, *command]).returncode:
        raise UserError(f"that failed (exit status {code})")


def run(flags: argparse.Namespace) -> int:
    """All rounds; finished ones are skipped."""
    if not 0 <= flags.corpus_share < 1:
        raise UserError(f"--corpus_share is from 0 to below 1, not {flags.corpus_share}")
    work, model = Path(flags.work), Path(flags.model)
    seeds = (work / "answer_seeds.jsonl").read_text().splitlines()
    for number in range(1, flags.rounds + 1):
        folder = Path(flags.out) / f"round_{number}"
        export = folder / "train" / "export"
        if not (export / "model.safetensors").exists():
            one_round(flags, number, folder, seeds, model)
        model = export
    shutil.copytree(model, flags.out, dirs_exist_ok=True)
    say(f"the refined model is in {flags.out}")
    return 0


def one_round(
    flags: argparse.Namespace, number: int, folder: Path, seeds: list[str], model: Path
) -> None:
    """Write, mark, train."""
    folder.mkdir(parents=True, exist_ok=True)
    # No prompt serves twice before all have.
    order = np.random.default_rng(0).permutation(len(seeds))
    n = flags.varied + flags.plain
    chosen = [order[i % len(order)] for i in range((number - 1) * n, number * n)]
    prompts = [json.loads(seeds[i])["prompt_ids"] for i in chosen]
    loaded = load(str(model), "none")
    write = partial(write_varied, loaded, n_new=flags.max_new_tokens)
    plain = write(prompts[: flags.plain], allowed=1.0)
    varied = write(prompts[flags.plain :], allowed=flags.allowed)
    new = sum(len(v["token_ids"]) for v in varied)
    share = mean_repeated_ngram_share([p["token_ids"] for p in plain], NGRAM)
    say(
        f"round {number}: {share:.3f} of the 4-grams of plain text repeat; varied text takes "
        f"another token in {sum(v['swapped'] for v in varied) / max(new, 1):.1%} of its places"
    )
    samples = marked_samples(plain) + [
        (tokens, np.abs(counted)) for tokens, counted in marked_samples(varied)
    ]
    data = folder / "data"
    write_mixture(
        samples, Path(flags.work) / "train", flags.corpus_share, 512, number, data
    )
    heads = model / "heads"  # of a native run; without them fresh ones start in round 1
    call([
        "train.py", "--config=configs/demo_refine.py", f"--workdir={folder}/train",
        f"--config.model.path={model}",
        *([f"--config.train.heads_path={heads}"] if heads.exists() else []),
        f"--config.data.source={data}", f"--config.data.eval_source={flags.work}/heldout",
        *flags.train,
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    flags = parser().parse_args(argv)
    return run_main(lambda: run(flags))


if __name__ == "__main__":
    sys.exit(main())
