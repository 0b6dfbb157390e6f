"""The study's texts: one unlike the backbone's training text, and the backbone's continuations of it."""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from research.recipes.variants import Study


def new_text() -> list[str]:
    """READMEs of the installed packages, sorted by package name."""
    texts = {}
    for package in metadata.distributions():
        body = (package.read_text("METADATA") or "").partition("\n\n")[2]
        if len(body) > 500:
            texts[package.metadata["Name"].lower()] = body
    return [texts[name] for name in sorted(texts)]


def write_tokens(directory: Path, pieces: Sequence[np.ndarray], prompt: int = 0) -> None:
    """Write a token directory of pieces; the first `prompt` tokens of each are not targets."""
    directory.mkdir(parents=True, exist_ok=True)
    lengths = [len(p) for p in pieces]
    counted = [np.arange(n) >= prompt for n in lengths]
    np.save(directory / "doc_starts.npy", np.cumsum([0, *lengths[:-1]], dtype=np.int64))
    np.save(directory / "counted.npy", np.concatenate(counted))
    np.save(directory / "tokens.npy", np.concatenate(pieces).astype(np.int32))


def prepare_text(study: Study, model: Any, out: Path) -> list[list[int]]:
    """Write `new/` and `self/` (token directories); returns held-out prompts of the new text.

    The text is cut into pieces of `--length` tokens; every tenth is held out. `self/` holds the first
    quarters of the same pieces, continued by the backbone at temperature 0.3.
    """
    from medusa_jax.api.results import Options

    T, prompt = study.length, study.length // 4
    pieces: list[np.ndarray] = []
    for text in new_text():
        ids = np.array(model.tokenizer.encode(text), np.int32)
        pieces += [ids[i : i + T] for i in range(0, len(ids) - T + 1, T)]
    if len(pieces) < 40:
        raise UserError(
            "too few installed packages have a README to build the new text from"
        )
    apart = pieces[::10]
    train = [p for i, p in enumerate(pieces) if i % 10]
    train = [train[i] for i in np.random.default_rng(0).permutation(len(train))]
    if not (out / "new" / "tokens.npy").exists():
        write_tokens(out / "new", train)
    if not (out / "self" / "tokens.npy").exists():
        inform(f"the backbone continues {min(study.distill, len(train))} prompts")
        own = []
        for first in range(0, min(study.distill, len(train)), 32):
            prompts = [p[:prompt].tolist() for p in train[first : first + 32]]
            options = Options(max_new_tokens=T - prompt, temperature=0.3, seed=first)
            answers = model.generate(prompts, options, tree="none")
            own += [np.array(p + a.token_ids) for p, a in zip(prompts, answers)]
        write_tokens(out / "self", own, prompt)
    return [p[:prompt].tolist() for p in apart[: study.prompts]]


def old_prompts(rows: Any, n: int) -> list[list[int]]:
    """Openings of rows of the original's held-out text."""
    return [
        row[: row.size // 4].tolist() for row in rows.batch(0, min(n, rows.rows))["tokens"]
    ]
