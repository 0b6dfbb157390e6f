"""decode.py after its flags are parsed: load, decode, report."""

import dataclasses
import importlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from medusa_jax.api import Model, Options, Result, find_model
from medusa_jax.api.asking import Prompt, ending_turns
from medusa_jax.commands.decode_flags import Flags
from medusa_jax.commands.decode_report import LEGEND, coloured, describe, summary
from medusa_jax.commands.following import following
from medusa_jax.commands.model_flags import load_model
from medusa_jax.commands.requests import own_sampling, read_requests, shared_options
from medusa_jax.console import (
    announced,
    give_memory_back,
    inform,
    print_json,
    use_compilation_cache,
    warn_if_accelerator_unused,
)
from medusa_jax.errors import UserError
from medusa_jax.heads.names import BASELINES
from medusa_jax.text.chat import encode_prompt, is_chat_model, speaks
from medusa_jax.text.tokenizer import Tokenizer
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.evaluate.compare import Comparison


@dataclasses.dataclass(frozen=True)
class Job:
    """Requests that are ready to be decoded.

    Attributes:
      acceptance: name of the rule.
      repeats: timed runs of a comparison with plain decoding; 0: no comparison.
      form: how the prompts were read, "chat" or "raw text".
    """

    model: Model
    prompts: list[Prompt]
    options: list[Options]
    acceptance: str
    repeats: int
    form: str

    def batch(self, rows: list[int]) -> tuple[list[Prompt], list[Options], list[int]]:
        """The prompts, options and ids of these rows, as `Model.generate` takes them."""
        return [self.prompts[i] for i in rows], [self.options[i] for i in rows], rows

    def compile(self, rows: list[int]) -> float:
        """Compile the programs for these rows; returns the seconds."""
        with announced("compiling"):
            return self.model.compile(*self.batch(rows), acceptance=self.acceptance)

    def generate(self, rows: list[int]) -> list[Result]:
        """Decode these rows."""
        return self.model.generate(*self.batch(rows), acceptance=self.acceptance)

    def facts(
        self, rows: list[int], results: list[Result], as_json: bool = True
    ) -> list[Json]:
        """The reports of these rows, compared with plain decoding if requested."""
        compared: Sequence[Comparison | None] = [None] * len(rows)
        prompts, options, ids = self.batch(rows)
        if self.repeats:
            evaluation = importlib.import_module("medusa_jax.evaluate.compare")
            with announced("timing the autoregressive loop"):
                compared = evaluation.compare(
                    self.model,
                    prompts,
                    options,
                    ids=ids,
                    repeats=self.repeats,
                    acceptance=self.acceptance,
                )
        found = [
            describe(self.model, result, self.acceptance, own, one, self.form)
            for result, own, one in zip(results, options, compared)
        ]
        if as_json:
            read = importlib.import_module("medusa_jax.evaluate.weight_bytes")
            for facts in found:
                n = facts["prompt_tokens"]
                facts["weights_stored_as"] = read.stored_as(self.model)
                facts["bytes_per_step"] = read.bytes_per_token(self.model, n)
        return found


def run(flags: Flags, began: float) -> int:
    """Decode the requested prompts; returns the exit status.

    Args:
      began: when the command began, by `time.perf_counter`.
    """
    talking = talks(flags)
    if talking and jax.process_count() > 1:
        raise UserError("a chat runs on one host: give --prompt or --prompts_file")
    defaults = own_sampling(flags.model) if talking else {}
    prompts, options = (
        ([], [shared_options(flags, defaults)]) if talking else read_requests(flags)
    )
    if flags.no_repeat_ngram_size and any(own.constraint for own in options):
        raise UserError(
            "a constraint and --no_repeat_ngram_size may leave no token: give one of them"
        )
    give_memory_back()
    use_compilation_cache()
    warn_if_accelerator_unused()
    model = load_model(
        flags,
        tree=flags.tree,
        tokenizer=flags.tokenizer,
        batch=min(flags.batch_size, len(options)),
        all_heads=False,
    )
    template = chosen_template(flags, model.tokenizer)
    if template is not None:
        ends = model.tokenizer, model.eos_ids
        options = [ending_turns(*ends, own, template) for own in options]
    if talking:
        if defaults:
            own = ", ".join(f"{name} {getattr(options[0], name):g}" for name in defaults)
            inform(f"sampled as the publisher advises, unless a flag differs: {own}")
        chat = importlib.import_module("medusa_jax.commands.chat")
        about = options[0], template, flags.acceptance, flags.show_drafts
        return chat.Chat(model, *about).run()
    if model.tokenizer.chat_template and flags.chat is None and not flags.raw:
        raw = "raw text (--chat makes the prompt a user's turn)"
        inform(raw if template is None else "chat (--raw continues the prompt instead)")
    prompts = [
        encode_prompt(model.tokenizer, prompt, template or "")
        if isinstance(prompt, list) or (isinstance(prompt, str) and template is not None)
        else prompt
        for prompt in prompts
    ]
    # One rule for the file, so that its greedy batches run the same program as sampled ones.
    sampled = any(o.temperature > 0 for o in options)
    acceptance = model.engine(sampled=sampled, acceptance=flags.acceptance).acceptance
    model.request(prompts, options)  # refuse before anything is decoded
    repeats = flags.repeats if flags.compare else 0
    form = "raw text" if template is None else "chat"
    job = Job(model, prompts, options, acceptance, repeats, form)
    if flags.prompts_file:
        file = importlib.import_module("medusa_jax.commands.request_file")
        return file.answer(job, flags.batch_size, flags.show_drafts)
    if flags.json:
        seconds, [result] = job.compile([0]), job.generate([0])
        result.compile_seconds = seconds
        print_json(job.facts([0], [result])[0])
        return 0
    status = answer_one(job, flags.show_drafts, flags.save_drafts, began)
    if flags.compare and flags.drafter and flags.drafter not in BASELINES:
        following("serve", model=flags.model, drafter=flags.drafter, chat=flags.chat)
    return status


def talks(flags: Flags) -> bool:
    """Whether the flags ask for a conversation: no prompt, and a chat model or --chat."""
    if flags.prompt is not None or flags.prompts_file is not None or flags.raw:
        return False
    if flags.chat is not None or flags.model is None:
        return flags.chat is not None
    return speaks(flags.tokenizer or find_model(flags.model), flags.model)


def chosen_template(flags: Flags, tokenizer: Tokenizer) -> str | None:
    """The chat template for prompts: "" is the tokenizer's own, None is none."""
    if flags.raw or flags.chat is not None:
        return None if flags.raw else flags.chat
    return "" if is_chat_model(tokenizer, flags.model) else None


def answer_one(job: Job, show_drafts: bool, save_drafts: str | None, began: float) -> int:
    """Print one text as it is decoded, then a line of measurements.

    Args:
      show_drafts: colour accepted drafts by their tree depth.
      save_drafts: an SVG file for the coloured text.
      began: when the command began.
    """
    seconds = job.compile([0])
    segments: list[tuple[str, int]] = [(p, 0) for p in job.prompts if isinstance(p, str)]
    sys.stdout.write("".join(text for text, _ in segments))
    results: list[Result] = []
    first_seconds = 0.0
    for pieces, final in job.model.stream(
        job.prompts, job.options, acceptance=job.acceptance
    ):
        first_seconds = first_seconds or time.perf_counter() - began
        for text, depth in (part for piece in pieces for part in piece.parts):
            segments.append((text, depth))
            sys.stdout.write(coloured(text, depth) if show_drafts else text)
        sys.stdout.flush()
        results = final or results
    sys.stdout.write("\n")
    sys.stdout.flush()
    if save_drafts:
        plots = importlib.import_module("medusa_jax.plots")
        plots.draw_accepted_text(segments, save_drafts)
        inform(f"wrote {save_drafts}")
    if show_drafts:
        inform(LEGEND)
    [result] = results
    result.compile_seconds = seconds
    inform(summary(job.facts([0], results, as_json=False)[0], first_seconds))
    if result.tree_nodes == 1 and result.steps:
        inform(
            f"mostly plain steps: {job.model.drafter.name}'s drafts were slower here; heads that guess "
            "more often help (python train.py), or a fitted tree (python -m medusa_jax calibrate)"
        )
    if result.finish_reason == "context":
        context = job.model.config.max_position
        inform(f"note: stopped at the model's context of {context} tokens")
    return 0
