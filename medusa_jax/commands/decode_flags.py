"""Flags of decode.py."""

import dataclasses

from medusa_jax.arch import DELTA, EPSILON
from medusa_jax.commands.flags import HostFlags, at_least, flag, numbers
from medusa_jax.commands.model_flags import GenerationFlags, LearnFlags, ModelFlags
from medusa_jax.notation import entries

EXAMPLES = """examples:
  medusa decode --prompt "import os" --show_drafts --compare                one text of the demo
  medusa decode --model smollm2 --prompt "What is the capital of France?"   ask a chat model
  medusa decode --model smollm2 --chat                                      a conversation
  medusa decode --model path/to/model.gguf --raw --prompt "Once upon"       continue raw text
  medusa decode --model coder.gguf --prefix_file before.py --suffix_file after.py      fill in the middle
  medusa decode --model path/to/model --drafter path/to/heads --prompt "Hello" --compare --json
  medusa decode --prompt "class Stack:" --temperature 0.8 --seed 3 --tree chain:3
  medusa decode --prompts_file requests.jsonl --batch_size 16 > answers.jsonl
"""
ACCEPTANCE = ("auto", "greedy", "sampled", "rejection", "typical")
NOTHING_ASKED = "give one of --prompt TEXT, --prompts_file FILE and --prefix_file FILE (or --chat alone, to talk)"


def biases(text: str) -> dict[int, float]:
    """ "15=-100,7=2.5" -> {15: -100.0, 7: 2.5}."""
    pairs = (part.split("=") for part in entries(text))
    return {int(token): float(bias) for token, bias in pairs}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShownFlags:
    """What is shown."""

    show_drafts: bool = flag(
        "colour accepted drafts by tree depth and underline copied tokens; with --prompts_file: add "
        "accepted_lengths and draft_depths",
        False,
    )
    save_drafts: str | None = flag(
        "draw the text with its drafts in colour", None, metavar="FILE.svg"
    )
    compare: bool = flag("also run the autoregressive loop: speed-up and identity", False)
    repeats: int = flag("timed runs of --compare (medians are shown)", 3, type=at_least(1))
    json: bool = flag("print one JSON object instead of text", False)
    logprobs: int | None = flag(
        "with --json or --prompts_file: log-probabilities of the tokens and of the N likeliest in each "
        "place, the model's own at temperature 1",
        None,
        metavar="N",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftFlags(ModelFlags):
    """The model, and how tokens are drafted and accepted."""

    tree: str = flag(
        "auto (each step takes a size of the tree, down to plain decoding, by the drafts that were right so far), "
        "bundled (the tree file's choice in all steps), none, a number of nodes, cartesian:2,3, chain:4, copy:4 (tokens copied from the text), 8+copy:4, or a "
        "JSON file of choices (default: auto)",
        "auto",
    )
    acceptance: str = flag(
        "auto (the default) is greedy at temperature 0 and sampled above: both give plain decoding's "
        "text, token for token; rejection keeps its distribution; typical is lossy",
        "auto",
        choices=ACCEPTANCE,
    )
    epsilon: float = flag("typical acceptance: hard threshold", EPSILON)
    delta: float = flag("typical acceptance: entropy threshold", DELTA)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFlags(GenerationFlags):
    """The length of a text, and how it is drawn (in a conversation by default as the model's publisher says)."""

    temperature: float | None = flag(  # type: ignore[assignment]
        "0 is greedy (default: 0)", None
    )
    top_k: int | None = flag("keep the k likeliest tokens; 0 keeps all (default: 0)", None)
    top_p: float | None = flag(
        "keep the likeliest tokens up to this mass (default: 1)", None
    )
    min_p: float | None = flag(
        "drop tokens below this share of the likeliest (default: 0)", None
    )
    presence_penalty: float = flag(
        "subtracted from the logits of tokens in the new text", 0.0
    )
    frequency_penalty: float = flag(
        "subtracted from the logits of tokens in the new text, once per occurrence", 0.0
    )
    logit_bias: dict[int, float] = flag(  # noqa: RUF009
        "numbers to add to the logits of tokens, such as 15=-100,7=2.5",
        {},
        type=biases,
        metavar="ID=BIAS,...",
    )
    constraint: str = flag(
        "json_schema:FILE, json_object, regex:TEXT, choice:A|B or grammar:FILE (Lark or GBNF) that the text must "
        "match (needs llguidance)",
        "",
        metavar="KIND:VALUE",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndFlags:
    """Where a text ends."""

    stop: list[str] = flag("string that ends the text (repeatable)", [])  # noqa: RUF009
    eos_ids: tuple[int, ...] | None = flag(
        "token ids that end a text, such as 2,7; none: only its limit does (default: from the "
        "model's files)",
        None,
        type=numbers(),
        metavar="IDS",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ShownFlags, DraftFlags, SamplingFlags, EndFlags, LearnFlags, HostFlags):
    """Generate text with draft heads (speculative decoding)."""

    prompt: str | None = flag("text to continue ('-' reads standard input)", None)
    prompts_file: str | None = flag(
        "JSONL with prompt, prompt_ids or messages, and optional per-request temperature, top_k, top_p, "
        "min_p, seed, max_new_tokens, stop, eos_ids, logprobs, penalties, "
        "logit_bias, constraint; answers are JSON lines in the same order",
        None,
    )
    prefix_file: str | None = flag(
        "fill in the middle after this file's text, for models of code", None
    )
    suffix_file: str | None = flag("the text after that middle, if any", None)
    batch_size: int = flag("requests decoded at a time", 8, type=at_least(1))
    chat: str | None = flag(
        "the prompt is a user's turn in the tokenizer's chat template (or a shipped one by name); "
        "without a prompt: a conversation. The default for models whose files call them chat models",
        None,
        nargs="?",
        const="",
        metavar="TEMPLATE",
    )
    raw: bool = flag("continue the prompt as it is, for chat models as well", False)
    tokenizer: str | None = flag("directory or hub id, if not next to the model", None)
