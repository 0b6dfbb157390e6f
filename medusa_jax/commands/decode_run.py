"""decode.py after its flags are parsed: load, decode, report."""

import dataclasses
import importlib
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from medusa_jax import hosts
from medusa_jax.api import Model, Options, Result
from medusa_jax.api.asking import Prompt, ending_turns
from medusa_jax.api.batching import equal_batches
from medusa_jax.commands.decode_flags import Flags
from medusa_jax.commands.decode_report import (
    LEGEND,
    coloured,
    describe,
    stored_bytes,
    summary,
)
from medusa_jax.commands.flags import file_to_write, load_model
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
from medusa_jax.interop.chat import encode_prompt
from medusa_jax.interop.names import file_of, is_chat_model, named

if TYPE_CHECKING:
    from medusa_jax.evaluate.compare import Comparison


def run(flags: Flags) -> int:
    """Decode the requested prompts; returns the exit status."""
    flags = give_way_to_demo(flags)
    template = chosen_template(flags)
    talking = template is not None and flags.prompt is None and flags.prompts_file is None
    prompts, options = ([], []) if talking else read_requests(flags)
    check_flags(flags, talking)
    give_memory_back()
    use_compilation_cache()
    warn_if_accelerator_unused()
    model = load_model(
        flags,
        tree=flags.tree,
        tokenizer=flags.tokenizer,
        batch=min(flags.batch_size, max(1, len(prompts))),
        all_heads=False,
    )
    if flags.tree == "auto" and model.drafts and not model.tree.depth:
        inform("plain decoding: no tree is faster on this device")
    if template is not None and talking:
        shared = Options(**shared_options(flags))
        own = ending_turns(model.tokenizer, model.eos_ids, shared, template)
        chat = importlib.import_module("medusa_jax.commands.chat")  # --chat
        talk = chat.Chat(model, own, template, flags.acceptance, flags.show_drafts)
        status: int = talk.run()
        return status
    if flags.chat is None and not model.tokenizer.chat_template:
        template = None
    if template is not None:
        ends = model.tokenizer, model.eos_ids
        options = [ending_turns(*ends, own, template) for own in options]
    prompts = [chat_prompt(model, p, template) for p in prompts]
    # Named, so that greedy batches of a file that also samples run the same program.
    sampled = any(o.temperature > 0 for o in options)
    acceptance = model.engine(sampled=sampled, acceptance=flags.acceptance).acceptance
    model.request(prompts, options)  # refuse before anything is decoded
    run_all = run_file if flags.prompts_file else run_one
    return run_all(model, prompts, options, acceptance, flags)


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
    if flags.batch_size < 1:
        raise UserError(f"--batch_size must be at least 1, not {flags.batch_size}")
    if flags.logprobs is not None and not (flags.json or flags.prompts_file):
        raise UserError("--logprobs is shown in JSON only: give --json or --prompts_file")
    if flags.save_drafts and (flags.json or flags.prompts_file or talking):
        raise UserError("--save_drafts draws one text as it is shown: give --prompt alone")
    if flags.save_drafts:
        file_to_write(flags.save_drafts, "--save_drafts")


def give_way_to_demo(flags: Flags) -> Flags:
    """The flags, with the demo instead of a model by name that is not installed.

    Prints one line. Output for programs (--json, --prompts_file), a chat and named heads get the error
    instead.
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


def run_one(
    model: Model,
    prompts: list[Prompt],
    options: list[Options],
    acceptance: str,
    flags: Flags,
) -> int:
    """One request: its text as it comes and a line of measurements, or one JSON object."""
    with announced("compiling"):
        compile_seconds = model.compile(prompts, options, acceptance=acceptance)
    if flags.json:
        [result] = model.generate(prompts, options, acceptance=acceptance)
    else:
        [result] = stream_to_terminal(model, prompts, options, acceptance, flags)
    result.compile_seconds = compile_seconds
    compared: Comparison | None = None
    if flags.compare:
        with announced("timing the autoregressive loop"):
            [compared] = compare(model, prompts, options, None, acceptance, flags)
    facts = describe(model, result, acceptance, options[0], compared)
    if flags.json:
        facts |= stored_bytes(model, result)
        print_json(facts)
        return 0
    inform(summary(facts))
    if result.finish_reason == "context":
        inform(
            f"note: stopped at the model's context of {model.config.max_position} tokens"
        )
    return 0


def run_file(
    model: Model,
    prompts: list[Prompt],
    options: list[Options],
    acceptance: str,
    flags: Flags,
) -> int:
    """All requests of a file in batches; one JSON object a line, in the order of the file."""
    from tqdm import tqdm

    write = partial(tqdm.write, file=sys.stdout)  # above the progress bar
    with tqdm(total=len(prompts), unit="request", disable=None) as bar:
        for n, (ids, rows) in enumerate(equal_batches(len(prompts), flags.batch_size)):
            batch = [prompts[i] for i in rows], [options[i] for i in rows], rows
            with announced("compiling"):
                compile_seconds = model.compile(*batch, acceptance=acceptance)
            results = model.generate(*batch, acceptance=acceptance)
            compared: Sequence[Comparison | None] = [None] * len(rows)
            if flags.compare:
                compared = compare(model, *batch, acceptance, flags)
            for i, result, one in zip(ids, results, compared):
                result.compile_seconds = compile_seconds
                facts = describe(model, result, acceptance, options[i], one)
                facts |= stored_bytes(model, result)
                print_json(facts, write)
            sys.stdout.flush()
            bar.update(len(ids))
            if hosts.asked_to_stop(n):
                done = min((n + 1) * flags.batch_size, len(prompts))
                inform(f"stopped by SIGTERM after {done} of {len(prompts)} requests")
                return 128 + signal.SIGTERM
    return 0


def compare(
    model: Model,
    prompts: Sequence[Prompt],
    options: Sequence[Options],
    ids: Sequence[int] | None,
    acceptance: str,
    flags: Flags,
) -> "list[Comparison]":
    """Decode with the tree and without, for --compare."""
    behind = importlib.import_module("medusa_jax.evaluate.compare")
    found: list[Comparison] = behind.compare(
        model, prompts, options, ids=ids, repeats=flags.repeats, acceptance=acceptance
    )
    return found


def chosen_template(flags: Flags) -> str | None:
    """The chat template that prompts go through: "" is the tokenizer's own, None is none."""
    if flags.chat is None and is_chat_model(flags.model):
        return ""
    return None if flags.chat == "none" else flags.chat


def chat_prompt(model: Model, prompt: Any, template: str | None) -> str | Sequence[int]:
    """Messages (or, with --chat, a user's text) through the chat template; ids as they are."""
    if isinstance(prompt, tuple) or (isinstance(prompt, str) and template is None):
        return prompt
    return encode_prompt(model.tokenizer, prompt, template or "")


def stream_to_terminal(
    model: Model,
    prompts: list[Prompt],
    options: list[Options],
    acceptance: str,
    flags: Flags,
) -> list[Result]:
    """Print text as it comes; with --show_drafts accepted drafts are coloured by depth."""
    if isinstance(prompts[0], str):
        sys.stdout.write(prompts[0])
    results: list[Result] = []
    segments: list[tuple[str, int]] = [(p, 0) for p in prompts[:1] if isinstance(p, str)]
    for pieces, final in model.stream(prompts, options, acceptance=acceptance):
        for piece in pieces:
            segments += piece.parts
            for text, depth in piece.parts:
                sys.stdout.write(coloured(text, depth) if flags.show_drafts else text)
            sys.stdout.flush()
        results = final or results
    sys.stdout.write("\n")
    sys.stdout.flush()
    if flags.save_drafts:
        plots = importlib.import_module("medusa_jax.plots")  # --save_drafts
        plots.draw_accepted_text(segments, flags.save_drafts)
        inform(f"wrote {flags.save_drafts}")
    if flags.show_drafts:
        inform(LEGEND)
    return results
