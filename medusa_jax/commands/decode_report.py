"""Reports of decode.py: the object of --json, and the line below the text."""

import dataclasses
from typing import TYPE_CHECKING

import jax

from medusa_jax.api import Model, Options, Result
from medusa_jax.decoding.acceptance import RULES
from medusa_jax.model.stored import Stored
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.evaluate.compare import Comparison

# Fields of a result that --json prints first, in this order.
RESULT = (
    "text", "token_ids", "prompt_tokens", "new_tokens", "finish_reason", "steps",
    "mean_accepted_length", "acceptance_histogram", "accepted_lengths", "prefill_seconds",
    "decode_seconds", "compile_seconds", "tokens_per_second",
)  # fmt: skip
# Accepted drafts by depth: green, cyan, blue, magenta, yellow. Copied tokens are underlined.
COLOURS, UNDERLINED = (32, 36, 34, 35, 33), 4


def coloured(text: str, depth: int) -> str:
    """Colour a draft by its tree depth; underline it if it was copied (depth below 0)."""
    if not depth:
        return text
    style = UNDERLINED if depth < 0 else COLOURS[(depth - 1) % len(COLOURS)]
    return f"\x1b[{style}m{text}\x1b[0m"


LEGEND = (
    f"accepted drafts by tree depth: {' '.join(coloured(str(d), d) for d in range(1, 6))}; "
    f"{coloured('copied from the text', -1)}; plain: the model's own"
)


def describe(
    model: Model,
    result: Result,
    acceptance: str,
    options: Options,
    comparison: "Comparison | None",
    form: str = "",
) -> Json:
    """The object that --json prints.

    Args:
      comparison: its drafted run, with the median times of its runs, is then reported instead of `result`,
        whose steps may have taken other trees: so lengths, rates and speed-up agree.
      form: how the prompt was read, "chat", "raw text" or "a middle".
    """
    if comparison is not None:
        seconds = result.compile_seconds
        result = dataclasses.replace(comparison.drafted, compile_seconds=seconds)
    device = jax.devices()[0]
    facts: Json = {name: getattr(result, name) for name in RESULT}
    facts["mean_accepted_length"] = round(result.mean_accepted_length, 4)
    facts |= {
        "form": form,
        "drafter": result.drafter,
        "tree_nodes": result.tree_nodes,
        "acceptance": acceptance,
        "lossless": model.lossless(acceptance),
        "guarantee": RULES[acceptance].guarantee,
        "seed": options.seed,
        "dtype": str(model.dtype),
        "weights": model.storage.weights or str(model.dtype),
        "draft_weights": draft_weights(model, acceptance),
        "activations": model.storage.multiplied_by,
        "products": products(model),
        "device": f"{device.platform}: {device.device_kind}",
    }
    if result.logprobs is not None:
        facts |= {"logprobs": result.logprobs, "top_logprobs": result.top_logprobs}
    if comparison is not None:
        facts |= comparison.facts()
    return facts


def products(model: Model) -> str:
    """The implementation of products of few rows: "native" (our kernels) or "plain" (XLA's)."""
    return "native" if model.storage.panel else "plain"


def draft_weights(model: Model, acceptance: str) -> str | None:
    """The stored type of the drafter's kernels under this rule; None without kernels."""
    if not (heads := model.variables["heads"]):
        return None
    form = model.storage
    if model.drafter.trained:
        by_drafts = acceptance != "auto" and RULES[acceptance].by_drafts
        form = form.of_deciding_drafts if by_drafts else form.of_drafts
    else:  # a draft model may have no blocks although the backbone has them
        leaves = jax.tree.leaves(heads, is_leaf=lambda x: isinstance(x, Stored))
        if {k for x in leaves if isinstance(x, Stored) for k in x.types} == {"float32"}:
            return "float32"
    return form.weights or str(model.dtype)


def summary(facts: Json, loaded: float, first: float, read: float) -> str:
    """One line of measurements.

    Args:
      loaded: seconds from the start of the command until the model was loaded.
      first: seconds from then on to the first token.
      read: seconds that reading the prompt took of these.
    """
    weights = facts["weights"]
    storage = "" if weights == facts["dtype"] else f", {weights} weights"
    line = (
        f"{facts['new_tokens']} tokens in {facts['steps']} steps, mean accepted length "
        f"{facts['mean_accepted_length']:.2f}, {facts['tokens_per_second']:.0f} tokens/s "
        f"({facts['form']}, {facts['drafter']}, {facts['tree_nodes']} nodes, {facts['acceptance']}, "
        f"{facts['guarantee'].partition(':')[0]}, {facts['dtype']}{storage}, "
        f"{facts['device'].split(':')[0]}"
    )
    compiling = first - read
    line += (
        f"), first token after {loaded + first:.1f} s: loaded in {loaded:.1f} s, "
        f"compiled in {compiling:.1f} s, prompt read in {read:.2f} s"
    )
    if (later := facts["compile_seconds"] - compiling) >= 0.1:
        line += f"; steps compiled in {later:.1f} s"
    if "speedup" not in facts:
        return line
    rate = facts["autoregressive"]["tokens_per_second"]
    line += f"\nautoregressive {rate:.0f} tokens/s: "
    if facts["speedup"] is None:
        line += "no step to compare, the text ended with its first token, "
    else:
        line += (
            f"speed-up {facts['speedup']:.2f}x: mean accepted length "
            f"{facts['mean_accepted_length']:.2f} at {facts['step_latency_ratio']:.2f}x the step latency, "
        )
    return line + ("identical text" if facts["identical"] else _difference(facts))


def _difference(facts: Json) -> str:
    position, gap = facts["first_divergence"]["position"], facts["first_divergence"]["gap"]
    if not facts["lossless"]:
        return f"other text from token {position} on (lossy acceptance)"
    if RULES[facts["acceptance"]].by_drafts:
        return f"other draws from the same distribution from token {position} on"
    reason = "one text ends" if gap is None else f"score gap {gap:.2g}"
    return f"first difference at token {position} ({reason})"
