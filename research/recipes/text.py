"""The study's texts: one unlike the backbone's training text, and the backbone's continuations of it."""

from importlib import metadata
from pathlib import Path

import numpy as np

from medusa_jax.api import Model, Options
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.training.data.rows import Rows, write_tokens
from research.recipes.variants import Study


def new_text() -> list[str]:
    """READMEs of the installed packages, sorted by package name."""
    texts = {}
    for package in metadata.distributions():
        body = (package.read_text("METADATA") or "").partition("\n\n")[2]
        if len(body) > 500:
            texts[package.metadata["Name"].lower()] = body
    return [texts[name] for name in sorted(texts)]


def prepare_text(study: Study, model: Model, out: Path) -> list[list[int]]:
    """Write `new/` and `self/` (token directories); returns held-out prompts of the new text.

    The text is cut into pieces of `--length` tokens; every tenth is held out. `self/` holds the first
    quarters of the same pieces, continued by the backbone at temperature 0.3.
    """
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
        texts = []
        for first in range(0, min(study.distill, len(train)), 32):
            prompts = [p[:prompt].tolist() for p in train[first : first + 32]]
            options = Options(max_new_tokens=T - prompt, temperature=0.3, seed=first)
            answers = model.generate(prompts, options, tree="none")
            texts += [np.array(p + a.token_ids, np.int32) for p, a in zip(prompts, answers)]
        write_tokens(out / "self", texts, [np.arange(len(p)) >= prompt for p in texts])
    return [p[:prompt].tolist() for p in apart[: study.prompts]]


def old_prompts(rows: Rows, n: int) -> list[list[int]]:
    """Openings of rows of the original's held-out text."""
    tokens = rows.batch(range(min(n, rows.rows)))["tokens"]
    return [row[: row.size // 4].tolist() for row in tokens]
