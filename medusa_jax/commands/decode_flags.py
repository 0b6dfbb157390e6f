"""The flags of decode.py."""

import argparse
import dataclasses

from medusa_jax.commands.flags import (
    GenerationFlags,
    HostFlags,
    ModelFlags,
    add_generation,
    add_hosts,
    add_model,
    at_least,
    command,
)

EXAMPLES = """examples:
  python decode.py --prompt "def parse("
  python decode.py --prompt "import os" --show_drafts --compare
  python decode.py --prompt "class Stack:" --temperature 0.8 --seed 3 --tree chain:3
  python decode.py --model lmsys/vicuna-7b-v1.5 --drafter path/to/heads --prompt "Hello"
  python decode.py --model smollm2 --prompt "What is the capital of France?"
  python decode.py --model path/to/model.Q4_K_M.gguf --chat none --prompt "Once upon"
  python decode.py --prompt "def add(a, b):" --compare --json
  python decode.py --prompts_file requests.jsonl --batch_size 16 > answers.jsonl
  python decode.py --model lmsys/vicuna-7b-v1.5 --drafter path/to/heads --chat vicuna
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(HostFlags, GenerationFlags, ModelFlags):
    """All flags; a temperature of None is left to the model's name."""

    temperature: float | None  # type: ignore[assignment]

    prompt: str | None
    prompts_file: str | None
    batch_size: int
    tokenizer: str | None
    tree: str
    acceptance: str
    top_k: int
    top_p: float | None
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: str
    constraint: str
    epsilon: float
    delta: float
    stop: list[str]
    max_steps: int | None
    logprobs: int | None
    eos_ids: str | None
    stop_sequence: list[str]
    mesh: str
    chat: str | None
    show_drafts: bool
    save_drafts: str | None
    compare: bool
    repeats: int
    json: bool


def parser() -> argparse.ArgumentParser:
    """All flags of decode.py."""
    p = command(
        "decode.py", "Generate text with draft heads (speculative decoding).", EXAMPLES
    )
    add_model(p)
    add_generation(p, temperature=None)
    add = p.add_argument
    add("--prompt", help="text to continue ('-' reads standard input)")
    add(
        "--prompts_file",
        help="JSONL with prompt, prompt_ids or messages, and optional per-request temperature, top_k, top_p, "
        "min_p, seed, max_new_tokens, max_steps, stop, eos_ids, stop_sequences, logprobs, penalties, logit_bias, constraint; answers are JSON lines in the same order",
    )
    add("--batch_size", type=int, default=8, help="requests decoded at a time (default: 8)")
    add("--tokenizer", help="directory or hub id, if not next to the model")
    add(
        "--tree",
        default="auto",
        help="auto (measured on this device at first use), bundled (the tree file's own choice), "
        "none, a number of nodes, cartesian:2,3, chain:4, copy:4 (tokens copied from the text), 8+copy:4, or "
        "a JSON file of choices (default: auto)",
    )
    add(
        "--acceptance",
        default="auto",
        metavar="RULE",
        help="auto (the default) is greedy at temperature 0 and sampled above: both give plain "
        "decoding's text, token for token; rejection keeps its distribution; typical is lossy",
    )
    add("--top_k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all")
    add(
        "--top_p",
        type=float,
        help="keep the likeliest tokens up to this mass (default: what a model's name brings, "
        "else 1)",
    )
    add(
        "--min_p",
        type=float,
        default=0.0,
        help="drop tokens below this share of the likeliest",
    )
    add(
        "--presence_penalty",
        type=float,
        default=0.0,
        help="subtracted from the logits of tokens in the new text",
    )
    add(
        "--frequency_penalty",
        type=float,
        default=0.0,
        help="subtracted from the logits of tokens in the new text, once per occurrence",
    )
    add(
        "--repetition_penalty",
        type=float,
        default=1.0,
        help="divides positive logits of tokens of prompt and text, multiplies negative ones",
    )
    add(
        "--logit_bias",
        metavar="ID=BIAS,...",
        default="",
        help="numbers to add to the logits of tokens, such as 15=-100,7=2.5",
    )
    add(
        "--constraint",
        metavar="KIND:VALUE",
        default="",
        help="json_schema:FILE, json_object, regex:TEXT, choice:A|B or grammar:FILE (Lark) that the "
        "text must match (needs llguidance)",
    )
    add("--epsilon", type=float, default=0.09, help="typical acceptance: hard threshold")
    add("--delta", type=float, default=0.3, help="typical acceptance: entropy threshold")
    add(
        "--stop", action="append", default=[], help="string that ends the text (repeatable)"
    )
    add(
        "--max_steps",
        type=int,
        metavar="N",
        help="most decode steps, of one token or more each (default: no limit)",
    )
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json or --prompts_file: log-probabilities of the tokens and of the N likeliest in each "
        "place, the model's own at temperature 1",
    )
    add(
        "--eos_ids",
        metavar="IDS",
        help="token ids that end a text, such as 2,7; none: only its limit does (default: what "
        "the model's files say)",
    )
    add(
        "--stop_sequence",
        action="append",
        default=[],
        metavar="IDS",
        help="token ids that end the text where they stand in a row, such as 13,13; they are "
        "kept (repeatable)",
    )
    add("--mesh", default="1,1,1", help="devices along data,fsdp,tensor")
    add(
        "--chat",
        default=None,
        nargs="?",
        const="",
        metavar="TEMPLATE",
        help="wrap the prompt in the tokenizer's chat template (or a shipped one by name); "
        "without a prompt: talk, Ctrl-C stops a reply, Ctrl-D ends; the default for a model whose "
        "name says instruct, which 'none' turns off",
    )
    add(
        "--show_drafts",
        action="store_true",
        help="colour tokens by the tree depth they were accepted at",
    )
    add("--save_drafts", metavar="FILE.svg", help="draw the text with its drafts in colour")
    add(
        "--compare",
        action="store_true",
        help="also run the autoregressive loop: speed-up and identity",
    )
    add(
        "--repeats",
        type=at_least(1),
        default=3,
        help="timed runs of --compare (medians are shown)",
    )
    add("--json", action="store_true", help="print one JSON object instead of text")
    add_hosts(p)
    return p
