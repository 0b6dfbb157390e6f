"""`python -m medusa_jax COMMAND`: every command of the project, by name. Installed: `medusa`."""

import importlib
import sys
from collections.abc import Sequence

from medusa_jax.console import inform, run_main
from medusa_jax.errors import did_you_mean

# Command -> (module with `main(argv)`, what it does).
COMMANDS: dict[str, tuple[str, str]] = {
    "decode": ("commands.decode", "generate, stream, chat, compare with plain decoding"),
    "serve": ("commands.serve", "an OpenAI-compatible port for many requests, and a page"),
    "train": ("commands.train", "train backbones and heads"),
    "calibrate": ("commands.calibrate", "fit the tree to heads and device"),
    "convert": ("commands.convert", "heads from and to the layouts of other engines"),
    "distill": ("commands.distill", "let a model write the text that its heads learn from"),
    "bench": ("commands.bench", "drafters and trees side by side, against plain decoding"),
    "replay": ("commands.replay", "accepted lengths on a question file, without timings"),
    "sweep": ("commands.sweep", "acceptance rules over threshold and temperature"),
    "ties": ("commands.ties", "where low precision leaves plain decoding, and why"),
    "train_cost": ("commands.train_cost", "seconds and memory of a training step"),
    "draft_cost": ("research.draft_cost", "bytes that drafting reads, on published shapes"),
    "prefill_cost": (
        "research.prefill_cost",
        "memory of reading a prompt, on published shapes",
    ),
    "scaling": ("research.scaling", "what recipes and decoding take on many devices"),
    "roofline": (
        "research.roofline.command",
        "speed-up that a chip allows: predicted from shapes, or from timings",
    ),
    "family": ("research.family.command", "train and measure all drafters like for like"),
    "recipes": ("research.recipes.command", "training recipes: what each costs and brings"),
    "walk": ("research.walk", "one decode step with its real numbers"),
    "demo_build": ("demo.build", "rebuild the bundled demo from nothing"),
    "demo_corpus": ("demo.corpus", "the demo's text and tokenizer"),
    "ngrams": ("demo.ngrams", "the n-gram model that the demo's backbone must beat"),
}
USAGE = "usage: python -m medusa_jax COMMAND [flags]   (COMMAND --help says more)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; returns its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    return run_main(lambda: run(args))


def run(args: list[str]) -> int:
    """As `main`, without its care for standard streams and missing packages."""
    if not args or args[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(
            USAGE,
            "",
            *(f"  {n:{width}}  {what}" for n, (_, what) in COMMANDS.items()),
            sep="\n",
        )
        return 0 if args else 2
    name = args[0]
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS) or " (--help lists all)"
        inform(f"error: unknown command {name!r}{near}")
        return 2
    status: int = importlib.import_module(f"medusa_jax.{COMMANDS[name][0]}").main(args[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
