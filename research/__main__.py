"""`python -m research COMMAND`: reproduce the papers and build the demo, from a clone."""

import sys

from medusa_jax.commands.by_name import Command, run_named

COMMANDS = {
    "family": Command(
        "papers",
        "research.family.command",
        "train and measure all drafters under identical conditions",
    ),
    "recipes": Command("papers", "research.recipes.command", "compare training recipes"),
    "tree_shapes": Command(
        "papers",
        "research.tree_shapes",
        "fitted, dense and shallow trees (figure 4, table 7)",
    ),
    "sweep": Command(
        "papers", "research.sweep", "acceptance rules over threshold and temperature"
    ),
    "replay": Command(
        "papers", "research.replay", "accepted lengths on a question file, without timings"
    ),
    "questions": Command(
        "papers", "research.questions", "a published question file, all turns, by category"
    ),
    "ties": Command(
        "papers", "research.ties", "where low precision leaves plain decoding, and why"
    ),
    "rounding": Command(
        "papers", "research.rounding", "integer activations against float32"
    ),
    "batches": Command("costs", "research.batches", "batch sizes, the tree fitted to each"),
    "roofline": Command(
        "costs", "research.roofline", "the roofline fitted to products timed on this device"
    ),
    "compile": Command(
        "costs",
        "research.compiled.command",
        "cycles and defects of a step, by its compiler",
    ),
    "against": Command("costs", "research.against", "other engines on the same weights"),
    "walk": Command("papers", "research.walk", "one decode step with its real numbers"),
    "train_cost": Command(
        "costs", "research.train_cost", "seconds and memory of a training step"
    ),
    "hardware": Command(
        "costs", "research.hardware.command", "what this accelerator shows in nine minutes"
    ),
    "step_cost": Command(
        "costs", "research.step_cost", "steps of a published shape, with random weights"
    ),
    "draft_cost": Command(
        "costs", "research.draft_cost", "bytes that drafting reads, on published shapes"
    ),
    "prefill_cost": Command(
        "costs", "research.prefill_cost", "memory of reading a prompt, on published shapes"
    ),
    "confidence": Command(
        "papers", "research.confidence", "whether DSpark's confidences should choose trees"
    ),
    "constrained": Command(
        "costs", "research.constrained", "speed and waiting time of constrained decoding"
    ),
    "scaling": Command(
        "costs", "research.scaling", "memory, traffic and time on many devices"
    ),
    "demo_build": Command(
        "demo", "research.demo.build", "rebuild the bundled demo from nothing"
    ),
    "demo_corpus": Command("demo", "research.demo.corpus", "the demo's text and tokenizer"),
    "compose": Command(
        "smollm2", "research.smollm2.compose", "questions to distil SmolLM2's answers from"
    ),
    "coder_sources": Command(
        "coder", "research.coder.sources", "fetch the packages that prompts are cut from"
    ),
    "coder_compose": Command(
        "coder", "research.coder.compose", "prompts of a coder: middles, functions, edits"
    ),
    "coder_answer": Command("coder", "research.coder.answer", "the coder's own text for them"),
}

if __name__ == "__main__":
    sys.exit(run_named("python -m research", COMMANDS))
