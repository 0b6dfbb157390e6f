"""What decode.py does once its flags are parsed."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax

from medusa_jax.api import Model, Options, Result, load
from medusa_jax.cli.flags import parse_mesh
from medusa_jax.console import (
    announced,
    say,
    use_compilation_cache,
    warn_if_accelerator_unused,
)
from medusa_jax.decoding.accept import GUARANTEE, LOSSLESS
from medusa_jax.decoding.compare import Comparison, compare
from medusa_jax.errors import UserError
from medusa_jax.interop.chat import encode_prompt, stop_ids

# Accepted drafts by depth: green, cyan, blue, magenta, yellow; the verifier's own tokens plain.
COLOURS = (32, 36, 34, 35, 33)


def run(flags: argparse.Namespace) -> int:
    """Decode what the flags ask for; returns the exit status."""
    prompts, options = read_requests(flags)
    use_compilation_cache()
    warn_if_accelerator_unused()
    model = load(
        flags.model,
        flags.drafter,
        tree="none" if flags.drafter == "none" else flags.tree,
        dtype=flags.dtype,
        mesh=parse_mesh(flags.mesh),
        tokenizer=flags.tokenizer,
        all_heads=False,
    )
    prompts = [chat_prompt(model, p, flags.chat) for p in prompts]
    if flags.chat is not None:
        model.eos_ids = tuple(
            sorted({*model.eos_ids, *stop_ids(model.tokenizer, flags.chat)})
        )
    engine_options = {
        "acceptance": flags.acceptance,
        "epsilon": flags.epsilon,
        "delta": flags.delta,
    }
    sampled = any(o.temperature > 0 for o in options)
    acceptance = model.engine(sampled=sampled, **engine_options).acceptance
    with announced("compiling"):
        compile_seconds = model.compile(prompts, options, **engine_options)
    quiet = flags.json or flags.prompts_file
    if quiet:
        results = model.generate(prompts, options, **engine_options)
    else:
        results = stream_to_terminal(model, prompts, options, engine_options, flags)
    compared = None
    if flags.compare:
        with announced("timing the autoregressive loop"):
            compared = compare(
                model, prompts, options, repeats=flags.repeats, **engine_options
            )
    for i, result in enumerate(results):
        one = compared[i] if compared else None
        facts = describe(model, result, acceptance, options[i].seed, one)
        facts["compile_seconds"] = compile_seconds
        if flags.json or flags.prompts_file:
            print(json.dumps(facts, ensure_ascii=False), flush=True)
        else:
            say(summary(facts))
            if result.finish_reason == "context":
                say(
                    f"note: stopped at the model's context of {model.config.max_position} tokens"
                )
    return 0


def read_requests(flags: argparse.Namespace) -> tuple[list[Any], list[Options]]:
    """Prompts (texts or message lists) and their options, from the flags or a JSONL file."""
    if (flags.prompt is None) == (flags.prompts_file is None):
        raise UserError("give either --prompt TEXT or --prompts_file FILE")
    shared = {
        "max_new_tokens": flags.max_new_tokens,
        "temperature": flags.temperature,
        "top_k": flags.top_k,
        "top_p": flags.top_p,
        "min_p": flags.min_p,
        "seed": flags.seed,
        "stop": tuple(flags.stop),
    }
    if flags.prompt is not None:
        text = sys.stdin.read() if flags.prompt == "-" else flags.prompt
        return [text], [Options(**shared)]
    try:
        # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
        lines = Path(flags.prompts_file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {flags.prompts_file}: {error}") from error
    prompts, options = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{flags.prompts_file} line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON: {error.msg}") from error
        if not isinstance(record, dict) or not ("prompt" in record or "messages" in record):
            raise UserError(f"{where} needs a 'prompt' or 'messages'")
        if "prompt" in record and not isinstance(record["prompt"], str):
            raise UserError(f"{where}: 'prompt' must be text, not {record['prompt']!r}")
        if "prompt" not in record and not isinstance(record["messages"], list):
            raise UserError(f"{where}: 'messages' must be a list of turns")
        prompts.append(record.get("prompt", record.get("messages")))
        try:
            options.append(Options(**(shared | own_options(record, shared))))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    if not prompts:
        raise UserError(f"{flags.prompts_file} holds no requests")
    return prompts, options


def own_options(record: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The options that one request sets itself, each of the type of the flag it replaces."""
    own = {name: record[name] for name in shared if name in record}
    if "stop" in own:
        stop = own["stop"]
        own["stop"] = (stop,) if isinstance(stop, str) else stop
        if not isinstance(own["stop"], list | tuple) or any(
            not isinstance(s, str) for s in own["stop"]
        ):
            raise UserError(f"'stop' must be a string or a list of strings, not {stop!r}")
        own["stop"] = tuple(own["stop"])
    for name, value in own.items():
        kinds = (int, float) if isinstance(shared[name], float) else (type(shared[name]),)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise UserError(f"'{name}' must be {kinds[-1].__name__}, not {value!r}")
    return own


def chat_prompt(model: Model, prompt: Any, template: str | None) -> str | list[int]:
    """A prompt as text: messages (or, with --chat, a user's text) through the chat template."""
    if isinstance(prompt, str) and template is None:
        return prompt
    return encode_prompt(model.tokenizer, prompt, template or "")


def stream_to_terminal(
    model: Model,
    prompts: list[Any],
    options: list[Options],
    engine_options: dict[str, Any],
    flags: argparse.Namespace,
) -> list[Result]:
    """Print text as it comes; with --show_drafts accepted drafts are coloured by depth."""
    if isinstance(prompts[0], str):
        sys.stdout.write(prompts[0])
    results: list[Result] = []
    segments: list[tuple[str, int]] = [(p, 0) for p in prompts[:1] if isinstance(p, str)]
    for pieces, final in model.stream(prompts, options, **engine_options):
        for piece in pieces:
            segments += piece.parts
            for text, depth in piece.parts:
                if flags.show_drafts and depth:
                    colour = COLOURS[(depth - 1) % len(COLOURS)]
                    text = f"\x1b[{colour}m{text}\x1b[0m"
                sys.stdout.write(text)
            sys.stdout.flush()
        results = final or results
    sys.stdout.write("\n")
    sys.stdout.flush()
    if flags.save_drafts:
        from medusa_jax.plots import draw_accepted_text

        draw_accepted_text(segments, flags.save_drafts)
        say(f"wrote {flags.save_drafts}")
    if flags.show_drafts:
        legend = " ".join(f"\x1b[{c}m{d}\x1b[0m" for d, c in enumerate(COLOURS, 1))
        say(
            f"accepted drafts by tree depth: {legend}; plain = chosen by the backbone itself"
        )
    return results


def describe(
    model: Model, result: Result, acceptance: str, seed: int, compared: Comparison | None
) -> dict[str, Any]:
    """The object that --json prints."""
    device = jax.devices()[0]
    facts: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": result.new_tokens,
        "finish_reason": result.finish_reason,
        "steps": result.steps,
        "mean_accepted_length": round(result.mean_accepted_length, 4),
        "acceptance_histogram": result.acceptance_histogram,
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "compile_seconds": result.compile_seconds,
        "tokens_per_second": result.tokens_per_second,
        "drafter": model.drafter.heads.drafter if model.tree.depth else "none",
        "tree_nodes": model.tree.n_nodes,
        "acceptance": acceptance,
        "lossless": LOSSLESS[acceptance],
        "guarantee": GUARANTEE[acceptance],
        "seed": seed,
        "dtype": str(model.dtype),
        "device": f"{device.platform}: {device.device_kind}",
    }
    if compared is not None:
        facts |= compared.facts()
    return facts


def summary(facts: dict[str, Any]) -> str:
    """One line of measurements."""
    line = (
        f"{facts['new_tokens']} tokens in {facts['steps']} steps, mean accepted length "
        f"{facts['mean_accepted_length']:.2f}, {facts['tokens_per_second']:.0f} tokens/s "
        f"({facts['drafter']}, {facts['tree_nodes']} nodes, {facts['acceptance']}, "
        f"{facts['guarantee'].partition(':')[0]}, {facts['dtype']}, "
        f"{facts['device'].split(':')[0]}"
    )
    if facts["compile_seconds"] >= 0.1:
        line += f"; compiled in {facts['compile_seconds']:.1f} s"
    line += ")"
    if "speedup" in facts:
        same = "identical text" if facts["identical"] else _difference(facts)
        line += (
            f"\nautoregressive {facts['autoregressive']['tokens_per_second']:.0f} tokens/s: "
            f"speed-up {facts['speedup']:.2f}x at {facts['step_latency_ratio']:.2f}x the step "
            f"latency, {same}"
        )
    return line


def _difference(facts: dict[str, Any]) -> str:
    first = facts["first_divergence"]
    if not facts["lossless"]:
        return f"other text from token {first['position']} on (lossy acceptance)"
    if facts["acceptance"] == "rejection":
        return f"other draws of the same law from token {first['position']} on"
    return f"first difference at token {first['position']} (score gap {first['gap']:.2g})"
