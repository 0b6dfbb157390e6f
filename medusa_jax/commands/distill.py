"""`medusa distill`: the model answers seed prompts, heads learn from the answers.

Heads are trained on the model's own output, which they will have to guess (Medusa 2.3.2). Seeds
are prompts to go on with, or conversations whose user turns are asked again (see
`conversation.py` for the three modes). The output directory holds

    messages.jsonl    chat modes, one conversation a line, at the end in the order of the seeds:
                      {"seed": 7, "messages": [...], "answers": [{"tokens", "steps", "finish"}],
                      "cut": true (the last answer was broken off), "problem": why it ended early}
    samples.jsonl     mode continue: {"seed": 7, "prompt_ids": [...], "token_ids": [...]}
    tokens.npy, doc_starts.npy, counted.npy
                      mode continue: the same as a token directory; prompts are not counted
    vocab_counts.npy  counts of each token [V] that the model wrote, to choose a draft vocabulary by
    settings.json     everything that decides the text
    provenance.json   settings, sizes and speed, written when all is done

A run that was stopped, even killed, resumes after its last finished answer and ends with the same
files, on a CPU byte for byte. Over several hosts rows are on the devices of all, process 0 writes, and SIGTERM to any
ends all after the same batch.
"""

import dataclasses
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.commands.flags import CommandLine, HostFlags, at_least, flag, on_hosts
from medusa_jax.commands.model_flags import (
    GenerationFlags,
    MeshFlags,
    ModelFlags,
    generation_options,
    load_model,
)
from medusa_jax.commands.next_command import print_next
from medusa_jax.console import inform
from medusa_jax.distill.seeds import Seed
from medusa_jax.errors import UserError
from medusa_jax.whole_files import Json, write_array, write_json, write_text

EXAMPLES = """examples:
  medusa distill --prompts seeds.jsonl --out work/answers
  medusa distill --model lmsys/vicuna-33b-v1.3 --chat_template vicuna \\
      --prompts Aeala/ShareGPT_Vicuna_unfiltered --out work/vicuna33b --temperature 0.3 \\
      --max_new_tokens 1024 --batch_size 16 --drafter path/to/first/heads
  medusa distill --model HuggingFaceH4/zephyr-7b-beta --mode self_talk \\
      --prompts HuggingFaceH4/ultrachat_200k --split train_sft --out work/zephyr7b
  medusa distill --model my_model.gguf --server http://127.0.0.1:8080/v1 --prompts seeds.jsonl --out work/answers
  medusa distill --model smollm2 --ask 4096 --max_turns 1 --out work/smollm2/talk
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(GenerationFlags, MeshFlags, HostFlags, ModelFlags):
    """Let a model answer seed prompts and write a training set of its own text."""

    drafter: str | None = "none"
    prompts: str | None = flag(
        "seeds: .jsonl, .json or a hub dataset, with prompt, prompt_ids, turns, messages or conversations",
        None,
    )
    limit: int = flag("most seeds to use; 0 is all", 0, type=at_least(0))
    ask: int = flag(
        "instead of --prompts: number of conversations whose user the model plays from the start",
        0,
        type=at_least(0),
    )
    out: str = flag("directory to write")
    mode: str = flag(
        "continue, multi_turn or self_talk; auto: multi_turn for a chat model, else by the seeds",
        "auto",
    )
    tree: str = flag("as for decode.py", "auto")
    chat_template: str = flag("a shipped one; default: the tokenizer's own", "")
    temperature: float | None = flag(  # type: ignore[assignment]
        "default: 0.3 in the chat modes (the paper's), 0 in mode continue", None
    )
    user_temperature: float = flag("of user turns that the model writes", 0.8)
    user_tokens: int = flag(
        "most tokens of such a turn; one that is longer ends the conversation",
        80,
        type=at_least(1),
    )
    top_p: float = flag("keep the likeliest tokens up to this mass", 1.0)
    max_turns: int = flag("most answers in a conversation", 4, type=at_least(1))
    batch_size: int = flag("conversations answered at a time", 32, type=at_least(1))
    server: str | None = flag(
        "take the answers from an OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1 (key: "
        "OPENAI_API_KEY); --model is the model that the heads are for",
        None,
        metavar="URL",
    )
    split: str = flag("of a hub dataset", "train")


@on_hosts
def run(flags: Flags) -> int:
    """Answer the seeds."""
    from medusa_jax import hosts
    from medusa_jax.api import find_model
    from medusa_jax.distill.seeds import mode_for, read_seeds, silent_seeds
    from medusa_jax.files.hf_config import read_config
    from medusa_jax.files.not_replaced import refuse_model
    from medusa_jax.kept_programs import use_compilation_cache
    from medusa_jax.text.chat import is_chat_directory

    if bool(flags.prompts) == (flags.ask > 0):
        raise UserError("give either --prompts FILE or --ask N, a number of conversations")
    if flags.ask:
        if flags.mode not in ("auto", "self_talk"):
            raise UserError(f"--ask is for --mode self_talk, not {flags.mode}")
        seeds, mode = silent_seeds(flags.ask), "self_talk"
    else:
        assert flags.prompts is not None
        directory = find_model(flags.model)
        vocab_size = read_config(directory).vocab_size
        seeds = read_seeds(flags.prompts, flags.split, flags.limit, vocab_size)
        chat = flags.mode == "auto" and is_chat_directory(directory, flags.model)
        mode = mode_for(seeds, flags.mode, chat)
    if mode == "continue":
        seeds = [s for s in seeds if s.prompt]
    use_compilation_cache()
    refuse_model(flags.out, "--out")
    with hosts.locked(flags.out):
        return answer(flags, mode, seeds)


def answer(flags: Flags, mode: str, seeds: Sequence[Seed]) -> int:
    """Continue after the answered seeds; returns the exit status."""
    from medusa_jax import hosts
    from medusa_jax.api import find_model
    from medusa_jax.distill import files
    from medusa_jax.distill.server import ServedModel, ServerWriter
    from medusa_jax.distill.writer import Writer, prompt_of, write_all
    from medusa_jax.files.hf import BaseFiles
    from medusa_jax.heads.vocabulary import COUNTS
    from medusa_jax.progress import ProgressBar
    from medusa_jax.text.chat import template_source

    if flags.temperature is None:
        flags = dataclasses.replace(flags, temperature=0.0 if mode == "continue" else 0.3)
    options = generation_options(flags, top_p=flags.top_p)
    out = Path(flags.out)
    values, served = dataclasses.asdict(flags), None
    if flags.server:
        if mode != "multi_turn":
            raise UserError(f"--server answers questions: not for --mode {mode}")
        if flags.repetition_penalty is not None:
            raise UserError("--repetition_penalty is set where the server is started")
        served = ServedModel.open(flags.server, find_model(flags.model))
        author = f"{served.name} at {served.url}"
    else:
        author = BaseFiles.open(find_model(flags.model)).fingerprint()
    settings = files.settings_of(values, mode, seeds, author)
    if hosts.first():
        files.check_settings(out, settings)  # before the model is read
    model: Any = served or load_model(flags, tree=flags.tree, batch=flags.batch_size)
    if mode != "continue":
        template_source(model.tokenizer, flags.chat_template)
    if served:
        inform(
            f"the answers are the text of {author}: heads learn to guess it, and draft best for that "
            "very model"
        )
    else:
        options = options.with_penalty(model.repetition_penalty)
        settings |= model.text_settings(options.repetition_penalty)
        if mode != "continue":
            options = model.ending_turns(options, flags.chat_template)
    path = out / ("samples.jsonl" if mode == "continue" else "messages.jsonl")

    def answers(line: Json, seed: Seed) -> bool:
        files.sizes(mode, [line])  # raises if a field is missing
        return mode != "continue" or bool(line.get("prompt_ids") == prompt_of(model, seed))

    old_lines: dict[int, Json] = {}
    if hosts.first():
        files.check_settings(out, settings)
        write_json(out / files.SETTINGS, settings)
        old_lines = files.finished_lines(path, seeds, answers)
    is_open = np.array([seed.number not in old_lines for seed in seeds])
    is_open = hosts.broadcast_from_first(is_open)
    open_seeds = [seed for seed, unanswered in zip(seeds, is_open) if unanswered]
    # Batches of one length need the least padding; the longest first, so that memory suffices to the end.
    open_seeds.sort(key=lambda seed: -sum(map(len, (seed.prompt, *seed.turns[:1]))))
    n_before = len(seeds) - len(open_seeds)
    progress = ProgressBar("answers", len(seeds), "seed", n_before, hosts.first())
    user_options = dataclasses.replace(
        options, temperature=flags.user_temperature, max_new_tokens=flags.user_tokens
    )
    writer = (ServerWriter if served else Writer)(
        model, mode, options, user_options, batch_size=flags.batch_size,
        chat_template=flags.chat_template, max_turns=flags.max_turns, progress=progress,
    )  # fmt: skip
    new_lines = write_all(writer, path, open_seeds)
    if not hosts.first():
        return 0
    lines = sorted([*old_lines.values(), *new_lines], key=lambda line: line["seed"])
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    sizes = files.sizes(mode, lines)
    if mode == "continue":
        files.write_token_directory(out, lines)
    counts_V = files.vocab_counts(mode, lines, model, flags.chat_template)
    write_array(out / COUNTS, counts_V)
    speed = f", {writer.tokens / writer.seconds:.0f} tokens/s" if writer.seconds else ""
    engine = {"drafter": flags.drafter, "tree_nodes": model.tree.n_nodes}
    noted = {name: values[name] for name in files.NOTED} | {"model": flags.model or "demo"}
    provenance = noted | settings | engine | sizes | {"date": date.today().isoformat()}
    write_json(out / "provenance.json", provenance)
    whose = "the server's" if served else "the model's own"
    tokens = f"{sizes['answer_tokens']} tokens of {whose} text"
    inform(f"{sizes['samples']} samples, {tokens}{speed}; in {path}")
    inform(f"{files.coverage(counts_V)}; counts in {out / COUNTS}")
    for problem, n in sizes.get("unusable_seeds", {}).items():
        inform(f"{n} seeds gave no sample: {problem}")
    print_next(
        "train",
        **{"config.model.path": flags.model or find_model(None)},
        **{"config.data.source": str(out if mode == "continue" else path)},
        **{"config.data.chat_template": flags.chat_template or None},
        workdir=str(out / "run"),
    )  # fmt: skip
    return 0


main = CommandLine("medusa distill", Flags, run, EXAMPLES, resumes=True)
