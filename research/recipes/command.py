"""`python -m research recipes`: compare quality and accepted length of training recipes.

Reproduces the paper's table 2 on a small backbone. All variants train for the same number of steps on
text unlike the backbone's training text (the READMEs of the installed packages), so quality can be
lost. Each variant is measured by

    perplexity   on held-out text of the original's kind
    agreement    share of positions there at which the most likely next token of the trained backbone
                 is still the original's (teacher-forced)
    accepted     mean accepted length of greedy decoding, with one tree for all variants, on prompts
                 from the new text and from the original's

Finished runs leave a result.json and are skipped, so the command can be stopped at any time.
"""

import json
import os
from pathlib import Path

import numpy as np

from medusa_jax.api import load
from medusa_jax.commands.flags import CommandLine
from medusa_jax.config import DataConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files import hf
from medusa_jax.kept_programs import use_compilation_cache
from medusa_jax.sharding import make_mesh
from medusa_jax.training.data.rows import TokenRows
from medusa_jax.whole_files import write_json, write_text
from research.recipes.figures import accepted, draw, make_judge, recipe_table
from research.recipes.text import old_prompts, prepare_text
from research.recipes.variants import Study, train_variant, variants

EXAMPLES = """examples:
  python -m research recipes --original work/demo/heldout --out work/study
  python -m research recipes --original work/demo/heldout --out work/study \\
      --steps 40 --seeds 1 --variants baseline,medusa1,medusa2   (a quick look)
"""


def run_study(flags: Study) -> dict[str, list[dict[str, float]]]:
    """Run all variants and seeds; returns their figures, which are also in the result files."""
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    names = flags.variants or list(variants())
    if wrong_names := [n for n in names if n not in variants()]:
        raise UserError(
            f"unknown variant {wrong_names[0]!r}: there are {', '.join(variants())}"
        )
    original = load(flags.model, "none", dtype=flags.dtype, tree="none")
    layout = DataConfig(seq_len=flags.length, packing="concat")
    rows = TokenRows(flags.original, layout, original.config.vocab_size, shuffle=False)
    new = prepare_text(flags, original, out)
    old = old_prompts(rows, flags.prompts)
    judge = make_judge(rows, flags.rows)

    def quality(path: str) -> tuple[float, np.ndarray]:
        return judge(*hf.load_backbone(path, make_mesh()))

    perplexity, reference = quality(flags.model)
    figures: dict[str, list[dict[str, float]]] = {}
    for name in names:
        runs = variants()[name][1]
        for seed in range(flags.seeds if runs else 1):
            folder = out / f"{name}-{seed}"
            file = folder / "result.json"
            if file.exists():
                figures.setdefault(name, []).append(json.loads(file.read_text()))
                continue
            row = {"perplexity": perplexity, "agreement": 1.0}
            row |= {"accepted_new": 1.0, "accepted_old": 1.0}
            if runs:
                inform(f"--- {name}, seed {seed}")
                path, heads, loss = train_variant(flags, seed, runs, folder, out)
                ppl, best = quality(path)
                row = {"perplexity": ppl, "agreement": float(np.mean(best == reference))}
                model = load(
                    path, heads, dtype=flags.dtype, tree=flags.tree, tokenizer=flags.model
                )
                row["accepted_new"] = accepted(model, new, flags.tree, flags.new_tokens)
                row["accepted_old"] = accepted(model, old, flags.tree, flags.new_tokens)
                row["heads_loss"] = loss
            folder.mkdir(parents=True, exist_ok=True)
            write_json(file, row, indent=None)
            figures.setdefault(name, []).append(row)
        write_text(out / "table.md", recipe_table(flags, figures))
    return figures


def run(flags: Study) -> int:
    """Everything, then the table on standard output."""
    if not os.path.isfile(os.path.join(flags.original, "tokens.npy")):
        raise UserError(
            f"{flags.original} has no tokens.npy; for the demo: python -m "
            "research demo_corpus --out work/demo makes work/demo/heldout"
        )
    use_compilation_cache()  # variants and seeds share most compiled programs
    figures = run_study(flags)
    draw(Path(flags.out), list(figures), flags.seeds)
    print(recipe_table(flags, figures), end="")
    return 0


main = CommandLine("python -m research recipes", Study, run, EXAMPLES, resumes=True)
