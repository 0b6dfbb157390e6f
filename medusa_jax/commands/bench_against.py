"""`bench --against`: other engines on the same weights and prompts, in turn with this one."""

import argparse
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from medusa_jax.commands.bench_questions import first_prompts
from medusa_jax.commands.flags import at_least, load_model
from medusa_jax.console import inform
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.whole_files import write_json, write_text

PEERS = ("transformers", "llama.cpp")


def add_against(p: argparse.ArgumentParser) -> None:
    """--against and what belongs to it."""
    p.add_argument("--against", metavar="PEERS",
                   help="instead: other engines on the same weights, each in turn: transformers "
                   "(needs torch), llama.cpp (needs llama-cpp-python and a GGUF file)")  # fmt: skip
    p.add_argument("--threads", type=at_least(0), default=0,
                   help="for --against: threads of the peers (default: as many as there are "
                   "processors for this process; this engine always takes them all)")  # fmt: skip


def run_against(
    flags: argparse.Namespace,
    names: Sequence[str],
    questions: Sequence[dict[str, Any]],
    out: Path,
) -> int:
    """Decode the prompts with all engines, print the table, write the files."""
    import jax

    from medusa_jax.evaluate.peers.contender import ourselves, side_by_side
    from medusa_jax.tree import Tree

    wanted = flags.against.split(",")
    if unknown := sorted(set(wanted) - set(PEERS)):
        near = did_you_mean(unknown[0], PEERS)
        raise UserError(f"--against takes {' and '.join(PEERS)}, not {unknown[0]!r}{near}")
    if flags.temperature or flags.max_new_tokens < 2:
        raise UserError("--against decodes greedily (--temperature 0), at least 2 tokens")
    if jax.default_backend() != "cpu":
        raise UserError("--against compares on the CPU: set JAX_PLATFORMS=cpu")
    threads = flags.threads or processors()
    models = [load_model(flags, name) for name in names]
    model = models[0]
    ours = [ourselves(model, Tree.none())]
    for drafting in models:
        if drafting.drafts:
            trees = [
                spec.replace("x", ",") if ":" in spec else spec
                for spec in flags.trees.split(",")
            ]
            ours += [ourselves(drafting, drafting.parse_tree(spec)) for spec in trees]
    prompts = first_prompts(flags, model, questions)
    context = max(map(len, prompts)) + flags.max_new_tokens
    if context > model.config.max_position:
        raise UserError(
            f"the longest prompt and --max_new_tokens are {context} tokens, the model's context "
            f"is {model.config.max_position}"
        )
    peers = peer_contenders(flags, wanted, context, threads, model.no_repeat_ngram_size)
    rows = side_by_side([*ours, *peers], prompts, flags.max_new_tokens, flags.repeats)
    device = jax.devices()[0]
    facts = {
        "date": date.today().isoformat(),
        "device": f"{device.platform}: {device.device_kind}",
        "products": model.products,
        "threads_of_peers": threads,
        "processors": processors(),
        "prompts": len(prompts),
        "new_tokens": flags.max_new_tokens,
        "engines": rows,
    }
    write_json(out / "bench.json", facts)
    text = engine_table(rows)
    write_text(out / "bench.md", text + "\n")
    print(text)
    print(
        f"\n{len(prompts)} prompts, {flags.max_new_tokens} tokens each, batch 1, greedy; medians "
        f"of prompts, engines in turn; peers with {threads} threads, this engine on "
        f"{processors()} processors ({facts['device']}, {model.products} products, {facts['date']})"
    )
    inform(f"wrote {out}/bench.json and bench.md")
    return 0


def peer_contenders(
    flags: argparse.Namespace,
    wanted: Sequence[str],
    context: int,
    threads: int,
    no_repeat_ngram_size: int,
) -> list[Any]:
    """The peers that --against names, their models loaded."""
    from medusa_jax.api import DEMO
    from medusa_jax.evaluate.peers.huggingface import transformers_contenders
    from medusa_jax.evaluate.peers.llamacpp import llamacpp_contenders
    from medusa_jax.interop.hub import resolve

    found: list[Any] = []
    if "llama.cpp" in wanted:
        if no_repeat_ngram_size:
            raise UserError("llama.cpp bars no n-grams: give --no_repeat_ngram_size 0")
        found += llamacpp_contenders(flags.model, context, threads)
    if "transformers" in wanted:
        directory = resolve(flags.model or str(DEMO / "backbone"), dtype="float32")
        found += transformers_contenders(directory, threads, no_repeat_ngram_size)
    return found


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def engine_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `evaluate.peers.contender.side_by_side` as Markdown."""
    header = (
        "engine", "weights", "decode tokens/s", "prompt tokens/s", "against plain decoding",
        "tokens before the first difference",
    )  # fmt: skip
    cells = [
        (
            r["engine"],
            r["weights"],
            f"{r['decode_tokens_per_second']:.1f}",
            f"{r['prompt_tokens_per_second']:.0f}",
            f"{r['against_plain']:.2f}x",
            f"{100 * r['agreement']:.1f}%",
        )
        for r in rows
    ]
    return markdown_table(header, cells)
