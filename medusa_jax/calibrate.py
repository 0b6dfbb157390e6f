"""`python -m medusa_jax.calibrate`: fit the draft tree to the heads and to this device.

Three measurements, then a choice: the ranks of the true tokens under the heads on the model's
own output, the step latency over tree sizes on this device, and the tokens per step that the
best tree of each size gives on texts that it was not grown from. Written as a tree file with its evidence; decode.py uses the one
that lies beside the heads.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.cli.flags import (
    add_generation,
    add_model,
    add_prompts,
    command,
    load_model,
    numbers,
    parse_mesh,
    run_command,
)
from medusa_jax.console import announced, say
from medusa_jax.errors import UserError

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
GROWTH = 127
EXAMPLES = """examples:
  python -m medusa_jax.calibrate --prompts prompts.jsonl --out tree.json
  python -m medusa_jax.calibrate --model path/to/model --drafter path/to/heads \\
      --prompts prompts.jsonl --out path/to/heads/tree.json --plots work/plots
"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax.calibrate",
        "Fit the draft tree to the heads and to this device.",
        EXAMPLES,
    )
    add_prompts(p, limit=64)
    p.add_argument("--out", required=True, help="tree file to write (JSON)")
    add_model(p)
    p.add_argument("--mesh", default="1,1,1", help="devices along data,fsdp,tensor")
    add_generation(p)
    p.add_argument("--batch", type=int, default=1, help="batch size to time steps at")
    p.add_argument("--sizes", default=",".join(map(str, SIZES)), help="tree sizes to time")
    p.add_argument("--rounds", type=int, default=7, help="timed rounds over all sizes")
    p.add_argument("--values", choices=["joint", "product"], default="joint",
                   help="worth of a node: measured frequency of its path, or the paper's "
                   "product of head accuracies")  # fmt: skip
    p.add_argument("--plots", help="directory for PNG plots (needs matplotlib)")
    return p


def collect_tuples(
    model: Any,
    prompts: Sequence[Any],
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
) -> list[np.ndarray]:
    """Rank tuples [positions, K] on the model's continuation of each prompt.

    Only positions whose guesses all fall on generated text count: from the last prompt token
    on, as far as the deepest head still has its token.
    """
    import jax
    import jax.numpy as jnp
    from tqdm import tqdm

    from medusa_jax.api import Options
    from medusa_jax.decoding.calibrate import rank_tuples
    from medusa_jax.decoding.generate import power_of_two
    from medusa_jax.decoding.sampling import row_keys

    ranks = jax.jit(rank_tuples, static_argnames=("drafter", "no_repeat_ngram_size"))
    K = model.drafter.n_heads
    texts = []
    for prompt in tqdm(prompts, unit="prompt", desc="rank statistics", disable=None):
        options = Options(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        result = model.generate([prompt], options, tree="none")[0]
        ids = model.encode(prompt) + result.token_ids
        padded = np.zeros((1, power_of_two(len(ids), 64)), np.int32)
        padded[0, : len(ids)] = ids
        noise = None
        if temperature > 0:
            keys = row_keys(jnp.full((1,), seed, jnp.uint32), jnp.zeros((1,), jnp.int32))
            noise = (keys, jnp.full((1,), temperature))
        out = ranks(
            model.drafter,
            model.variables["heads"],
            model.base,
            jnp.asarray(padded),
            jnp.array([len(ids)], jnp.int32),
            noise,
            model.no_repeat_ngram_size,
        )
        # The step after prefill starts at the last prompt position.
        first, last = result.prompt_tokens - 1, len(ids) - K - 1
        if last > first:
            texts.append(np.asarray(out)[0, first:last])
    if len(texts) < 2:
        raise UserError(
            f"{len(texts)} of {len(prompts)} continuations are long enough to calibrate on, two "
            "are needed: trees are counted on texts that they were not grown from"
        )
    return texts


def calibrate(flags: argparse.Namespace) -> dict[str, Any]:
    """Measure and choose; returns the content of the tree file."""
    import jax

    from medusa_jax.decoding import calibrate as fit
    from medusa_jax.decoding.latency import step_seconds
    from medusa_jax.distill import read_prompts
    from medusa_jax.tree import Choice, Tree

    sizes = sorted({1, *numbers(flags.sizes, "--sizes")})
    records = read_prompts(flags.prompts, flags.limit)
    prompts: list[Any] = [r.get("prompt_ids", r.get("prompt")) for r in records]
    model = load_model(flags, needs_heads=True, mesh=parse_mesh(flags.mesh))
    texts = collect_tuples(
        model, prompts, flags.max_new_tokens, flags.temperature, flags.seed
    )
    tuples_NK = np.concatenate(texts)
    accuracy_KR = fit.head_accuracies(tuples_NK)

    def grow(tuples_NK: np.ndarray) -> list[Choice]:
        if flags.values == "joint":
            return fit.joint_growth(tuples_NK, GROWTH)
        return fit.product_growth(fit.head_accuracies(tuples_NK), GROWTH)

    growth = grow(tuples_NK)
    sizes = [s for s in sizes if s <= len(growth) + 1]
    trees = [Tree.from_choices(growth[: s - 1]) for s in sizes]
    acceptance = "sampled" if flags.temperature > 0 else "greedy"
    with announced(f"timing {len(trees)} tree sizes"):
        seconds = step_seconds(
            model, trees, model.encode(prompts[0]), batch=flags.batch, acceptance=acceptance,
            temperature=flags.temperature, rounds=flags.rounds,
        )  # fmt: skip
    tokens = fit.held_out_tokens(texts, grow, sizes)
    best = fit.best_size(sizes, tokens, seconds)
    ladder = [
        {
            "nodes": size,
            "tokens_per_step": round(n, 4),
            "fitted_tokens_per_step": round(fit.replayed_tokens(texts, tree), 4),
            "step_seconds": s,
            "step_latency_ratio": round(s / seconds[0], 4),
            "predicted_speedup": round(n * seconds[0] / s, 4),
        }
        for size, tree, n, s in zip(sizes, trees, tokens, seconds)
    ]
    device = jax.devices()[0]
    return {
        "choices": [list(c) for c in growth[: best - 1]],
        "growth": [list(c) for c in growth],
        "nodes": best,
        "platform": device.platform,
        "device": f"{device.device_kind}, {jax.local_device_count()} device(s)",
        "dtype": str(model.dtype),
        "temperature": flags.temperature,
        "acceptance": acceptance,
        "batch": flags.batch,
        "values": flags.values,
        "date": date.today().isoformat(),
        "evidence": {
            "prompts": len(prompts),
            "positions": len(tuples_NK),
            "head_accuracies": np.round(accuracy_KR, 4).tolist(),
            "ladder": ladder,
        },
    }


def run(flags: argparse.Namespace) -> int:
    """Calibrate, write the tree file, print the ladder."""
    from medusa_jax.console import use_compilation_cache

    use_compilation_cache()
    found = calibrate(flags)
    out = Path(flags.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print("nodes  tokens/step  step latency  speed-up (predicted)")
    for row in found["evidence"]["ladder"]:
        mark = " <- best" if row["nodes"] == found["nodes"] else ""
        print(
            f"{row['nodes']:5d}  {row['tokens_per_step']:11.3f}  "
            f"{row['step_latency_ratio']:11.2f}x  {row['predicted_speedup']:8.2f}{mark}"
        )
    if flags.plots:
        draw(found, Path(flags.plots))
    say(f"wrote {out}: {found['nodes']} nodes for {found['device']}")
    return 0


def draw(found: dict[str, Any], directory: Path) -> None:
    """The tree, and tokens per step and latency over its size, as PNG."""
    from medusa_jax import plots

    directory.mkdir(parents=True, exist_ok=True)
    ladder = found["evidence"]["ladder"]
    plots.draw_tree(found["choices"], path=str(directory / "tree.png"))
    plots.draw_curves(
        [row["nodes"] for row in ladder],
        [row["tokens_per_step"] for row in ladder],
        [row["step_latency_ratio"] for row in ladder],
        path=str(directory / "curves.png"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
