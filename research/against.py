"""`python -m research against`: other engines on the same weights and prompts, interleaved with this one."""

import importlib
import os
from dataclasses import dataclass

from medusa_jax.commands.bench_race import TreeFlags, load_entrants, names_of, out_directory
from medusa_jax.commands.flags import Program, at_least, flag
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.evaluate.tables import Cell, device_facts, write_report
from medusa_jax.tree.tree import Tree
from research.asking import PromptFlags, first_prompts, questions_of

# Name of a peer and its file in `research/peers/`.
PEERS = {"transformers": "huggingface", "llama.cpp": "llamacpp"}
EXAMPLES = """examples:
  python -m research against --model smollm2 --peers transformers,llama.cpp --limit 16 \\
      --max_new_tokens 64
"""
COLUMNS: dict[str, Cell] = {
    "engine": "{label}",
    "weights": "{weights}",
    "decode tokens/s": "{tokens_per_second:.1f}",
    "prompt tokens/s": "{prompt_tokens_per_second:.0f}",
    "against plain decoding": "{speedup:.2f}x",
    "tokens before the first difference": "{agreement:.1%}",
}


@dataclass(frozen=True, kw_only=True)
class Flags(PromptFlags, TreeFlags):
    """Compare engines."""

    peers: str = flag(
        "transformers (needs torch), llama.cpp (needs llama-cpp-python and a GGUF file)",
        "transformers",
    )
    threads: int = flag(
        "threads of the peers (default: as many as there are processors for this process; this "
        "engine always takes them all)",
        0,
        type=at_least(0),
    )


def run(flags: Flags) -> int:
    """Decode the prompts with all engines, print the table, write the files."""
    import jax

    from medusa_jax.api import Options
    from medusa_jax.evaluate.race import Contender, ourselves, race
    from research.peers import Setting

    peers = flags.peers.split(",")
    if unknown := sorted(set(peers) - set(PEERS)):
        near = did_you_mean(unknown[0], PEERS)
        raise UserError(f"--peers takes {' and '.join(PEERS)}, not {unknown[0]!r}{near}")
    if flags.temperature or flags.max_new_tokens < 2:
        raise UserError(
            "engines are compared greedily (--temperature 0), at least 2 tokens"
        )
    if jax.default_backend() != "cpu":
        raise UserError("engines are compared on the CPU: set JAX_PLATFORMS=cpu")
    questions, out = questions_of(flags, flags.model), out_directory(flags.out)
    entrants = list(load_entrants(flags, names_of(flags), flags.trees))
    model, threads = entrants[0].model, flags.threads or processors()
    prompts = first_prompts(flags, model, questions, flags.max_new_tokens)
    context = max(map(len, prompts)) + flags.max_new_tokens
    if context > model.config.max_position:
        raise UserError(
            f"the longest prompt and --max_new_tokens are {context} tokens, the model's context "
            f"is {model.config.max_position}"
        )
    options = Options(max_new_tokens=flags.max_new_tokens, eos_ids=())
    trees = [
        (e.model, tree) for e in entrants if e.model.drafts for tree in e.trees.values()
    ]
    contenders: list[Contender] = []
    for own, tree in [(model, Tree.none()), *trees]:
        drafts = f"{own.drafts_by(tree)}, {tree.n_nodes} nodes" if tree.depth else "plain"
        contenders.append(ourselves(own, tree, options, label=f"medusa_jax, {drafts}"))
    setting = Setting(
        flags.model, flags.max_new_tokens, context, threads, model.no_repeat_ngram_size
    )
    for name in sorted(peers):
        peer = importlib.import_module(f"research.peers.{PEERS[name]}")
        contenders += peer.contenders(setting)
    rows = race(contenders, prompts, flags.repeats)
    facts = device_facts() | {
        "products": model.products,
        "threads_of_peers": threads,
        "processors": processors(),
        "prompts": len(prompts),
        "new_tokens": flags.max_new_tokens,
        "engines": rows,
    }
    notes = (
        f"{len(prompts)} prompts, {flags.max_new_tokens} tokens each, batch 1, greedy; interleaved; "
        f"peers with {threads} threads, this engine on {processors()} processors "
        f"({facts['device']}, {model.products} products, {facts['date']})"
    )
    write_report(out, "against", facts, rows, COLUMNS, notes)
    return 0


def processors() -> int:
    """Number of processors that this process may use."""
    own = hasattr(os, "sched_getaffinity")  # not on every platform
    return len(os.sched_getaffinity(0)) if own else os.cpu_count() or 1


main = Program("python -m research against", Flags, run, EXAMPLES)
