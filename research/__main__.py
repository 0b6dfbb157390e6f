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
    "replay": Command(
        "papers", "research.replay", "accepted lengths on a question file, without timings"
    ),
    "walk": Command("papers", "research.walk", "one decode step with its real numbers"),
    "roofline": Command(
        "costs",
        "research.roofline.command",
        "the speed-up that a chip allows, by tree size",
    ),
    "compile": Command(
        "costs",
        "research.compiled.command",
        "a compiler's estimates and defects of a step on TPUs and GPUs",
    ),
    "load": Command(
        "costs", "research.load", "drafts under load, simulated: what sizes of trees give"
    ),
    "clients": Command(
        "costs",
        "research.clients",
        "tokens per second of the server by number of clients, and llama.cpp's",
    ),
    "gaps": Command(
        "costs", "research.gaps", "how long a stream waits while the heads learn"
    ),
    "keystrokes": Command(
        "costs",
        "research.keystrokes",
        "completion times while somebody types, and llama.cpp's",
    ),
    "chart": Command(
        "costs", "research.chart", "the bars beside llama.cpp in README and site"
    ),
    "against": Command("costs", "research.against", "other engines on the same weights"),
    "hardware": Command(
        "costs", "research.hardware.command", "what this accelerator shows in nine minutes"
    ),
    "demo_build": Command(
        "demo", "research.demo.build", "rebuild the bundled demo from nothing"
    ),
    "demo_corpus": Command("demo", "research.demo.corpus", "the demo's text and tokenizer"),
    "compose": Command(
        "smollm2", "research.smollm2.compose", "questions to distil SmolLM2's answers from"
    ),
    "rehearsal": Command(
        "smollm2",
        "research.smollm2.rehearsal",
        "a sample of the text that SmolLM2's heads were trained on",
    ),
    "learn": Command(
        "papers", "research.learn", "what heads gain from a user's own answers"
    ),
    "coder_sources": Command(
        "coder", "research.coder.sources", "fetch the packages that prompts are cut from"
    ),
    "coder_compose": Command(
        "coder", "research.coder.compose", "prompts of a coder: middles, functions, edits"
    ),
    "coder_answer": Command(
        "coder", "research.coder.answer", "the coder's own text for them"
    ),
}

if __name__ == "__main__":
    sys.exit(run_named("python -m research", COMMANDS))
