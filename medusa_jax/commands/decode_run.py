"""decode.py after its flags are parsed: load, decode, report."""

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from medusa_jax.api import Model, Options, Result
from medusa_jax.api.asking import Prompt, ending_turns
from medusa_jax.commands.decode_flags import Flags
from medusa_jax.commands.decode_report import LEGEND, coloured, describe, summary
from medusa_jax.commands.flags import file_to_write, load_model
from medusa_jax.commands.following import following
from medusa_jax.commands.requests import read_requests, shared_options
from medusa_jax.console import (
    announced,
    give_memory_back,
    inform,
    print_json,
    use_compilation_cache,
    warn_if_accelerator_unused,
)
from medusa_jax.decoding.acceptance import RULES
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.heads.registry import BASELINES
from medusa_jax.interop.chat import encode_prompt
from medusa_jax.interop.names import file_of, is_chat_model, named
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.evaluate.compare import Comparison


@dataclasses.dataclass(frozen=True)
class Job:
    """Requests that are ready to be decoded.

    Attributes:
      acceptance: name of the rule.
      repeats: timed runs of a comparison with plain decoding; 0: no comparison.
    """

    model: Model
    prompts: list[Prompt]
    options: list[Options]
    acceptance: str
    repeats: int

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
            describe(self.model, result, self.acceptance, own, one)
            for result, own, one in zip(results, options, compared)
        ]
        if as_json:
            read = importlib.import_module("medusa_jax.evaluate.weight_bytes")
            for facts in found:
                n = facts["prompt_tokens"]
                facts["weights_stored_as"] = read.stored_as(self.model)
                facts["bytes_per_step"] = read.bytes_per_token(self.model, n)
        return found


def run(flags: Flags) -> int:
    """Decode the requested prompts; returns the exit status."""
    flags = give_way_to_demo(flags)
    template = chosen_template(flags)
    talking = template is not None and flags.prompt is None and flags.prompts_file is None
    prompts, options = ([], [shared_options(flags)]) if talking else read_requests(flags)
    check_flags(flags, talking)
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
    if flags.tree == "auto" and model.drafts and not model.tree.depth:
        inform("plain decoding: no tree is faster on this device")
    if flags.chat is None and not talking and not model.tokenizer.chat_template:
        template = None
    if template is not None:
        ends = model.tokenizer, model.eos_ids
        options = [ending_turns(*ends, own, template) for own in options]
    if talking:
        chat = importlib.import_module("medusa_jax.commands.chat")
        about = options[0], template, flags.acceptance, flags.show_drafts
        status: int = chat.Chat(model, *about).run()
        return status
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
    job = Job(model, prompts, options, acceptance, repeats)
    if flags.prompts_file:
        file = importlib.import_module("medusa_jax.commands.request_file")
        status = file.answer(job, flags.batch_size)
        return status
    if flags.json:
        seconds, [result] = job.compile([0]), job.generate([0])
        result.compile_seconds = seconds
        print_json(job.facts([0], [result])[0])
        return 0
    status = answer_one(job, flags.show_drafts, flags.save_drafts)
    if flags.compare and flags.drafter and flags.drafter not in BASELINES:
        following("serve", model=flags.model, drafter=flags.drafter)
    return status


def chosen_template(flags: Flags) -> str | None:
    """The chat template for prompts: "" is the tokenizer's own, None is none."""
    if flags.chat is None and is_chat_model(flags.model):
        return ""
    return None if flags.chat == "none" else flags.chat


def check_flags(flags: Flags, talking: bool) -> None:
    """Refuse impossible combinations before a model is loaded."""
    if flags.acceptance not in ("auto", *RULES):
        known = ["auto", *RULES]
        near = did_you_mean(flags.acceptance, known)
        raise UserError(
            f"--acceptance is one of {', '.join(known)}, not {flags.acceptance!r}{near}"
        )
    if talking and jax.process_count() > 1:
        raise UserError("a chat runs on one host: give --prompt or --prompts_file")
    if flags.logprobs is not None and not (flags.json or flags.prompts_file):
        raise UserError("--logprobs is shown in JSON only: give --json or --prompts_file")
    if flags.save_drafts and (flags.json or flags.prompts_file or talking):
        raise UserError("--save_drafts draws one text as it is shown: give --prompt alone")
    if flags.save_drafts:
        file_to_write(flags.save_drafts, "--save_drafts")


def give_way_to_demo(flags: Flags) -> Flags:
    """The flags, with the demo instead of a model by name that is not installed.

    Prints one line. With --json, --prompts_file, a chat or named heads, raises the error instead.
    """
    asked = flags.prompt is not None and not (flags.json or flags.drafter or flags.chat)
    if not asked or flags.model is None or named(flags.model) is None:
        return flags
    try:
        file_of(flags.model)
    except UserError as error:
        inform(f"{error}; the bundled demo goes on with the prompt instead")
        return dataclasses.replace(flags, model=None)
    return flags


def answer_one(job: Job, show_drafts: bool, save_drafts: str | None) -> int:
    """Print one text as it is decoded, then a line of measurements.

    Args:
      show_drafts: colour accepted drafts by their tree depth.
      save_drafts: an SVG file for the coloured text.
    """
    seconds = job.compile([0])
    segments: list[tuple[str, int]] = [(p, 0) for p in job.prompts if isinstance(p, str)]
    sys.stdout.write("".join(text for text, _ in segments))
    results: list[Result] = []
    for pieces, final in job.model.stream(
        job.prompts, job.options, acceptance=job.acceptance
    ):
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
    inform(summary(job.facts([0], results, as_json=False)[0]))
    if result.finish_reason == "context":
        context = job.model.config.max_position
        inform(f"note: stopped at the model's context of {context} tokens")
    return 0
