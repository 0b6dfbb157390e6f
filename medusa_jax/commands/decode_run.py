"""decode.py after its flags are parsed: a conversation, the answers of a file, or one answer."""

import sys
import time
from collections.abc import Sequence
from itertools import chain

import jax

from medusa_jax.api import Model, Options, find_model
from medusa_jax.commands.decode_flags import Flags
from medusa_jax.commands.decode_job import DecodeJob
from medusa_jax.commands.decode_report import LEGEND, coloured, summary
from medusa_jax.commands.model_flags import load_model, make_learner, to_repeat
from medusa_jax.commands.requests import read_requests, sampling_defaults, shared_options
from medusa_jax.console import announced, inform, messages_after, print_json
from medusa_jax.devices.machine import give_memory_back, warn_if_accelerator_unused
from medusa_jax.errors import UserError
from medusa_jax.heads.names import BASELINES
from medusa_jax.kept_programs import use_compilation_cache
from medusa_jax.text.chat import encode_prompt, is_chat_directory, is_chat_model
from medusa_jax.text.tokenizer import Tokenizer

# A smaller mean accepted length means that drafts have hardly helped a text.
HELPED = 1.1
# Flags without effect on a conversation.
OF_ONE_TEXT = "json", "compare"


def run(flags: Flags, began: float) -> int:
    """Decode the requested prompts; returns the exit status.

    Args:
      began: when the command began, by `time.perf_counter`.
    """
    if is_conversation(flags):
        for name in OF_ONE_TEXT:
            if getattr(flags, name):
                raise UserError(f"--{name} is not for conversations: give a prompt")
        return talk(flags)
    if flags.learn is not None:
        raise UserError("--learn is for conversations: give --chat and no prompt")
    job = read_job(flags)
    load_seconds = time.perf_counter() - began
    if flags.prompts_file:
        from medusa_jax.commands.answer_file import answer_file

        return answer_file(job, batch_size=flags.batch_size, show_drafts=flags.show_drafts)
    if flags.json:
        return answer_as_json(job)
    status = answer_one(
        job,
        show_drafts=flags.show_drafts,
        save_drafts=flags.save_drafts,
        load_seconds=load_seconds,
    )
    if flags.compare and flags.drafter and flags.drafter not in BASELINES:
        from medusa_jax.commands import serve_flags
        from medusa_jax.commands.next_command import print_next

        print_next("serve", **to_repeat(flags, serve_flags.Flags))
    return status


def talk(flags: Flags) -> int:
    """A conversation at the terminal; returns the exit status."""
    from medusa_jax.commands.chat import Chat

    if jax.process_count() > 1:
        raise UserError("a chat runs on one host: give --prompt or --prompts_file")
    defaults = sampling_defaults(flags.model)
    options = shared_options(flags, defaults)
    model = load(flags, [options])
    template = chosen_template(flags, model.tokenizer) or ""
    options = model.ending_turns(options, template)
    advised = {**defaults, "repetition_penalty": model.repetition_penalty}
    if defaults or model.repetition_penalty != 1:
        shown = options.with_penalty(model.repetition_penalty)
        sampling = ", ".join(f"{name} {getattr(shown, name):g}" for name in advised)
        inform(f"sampled as the publisher advises, unless a flag differs: {sampling}")
    learner = make_learner(flags, model)
    way = flags.acceptance, flags.show_drafts
    return Chat(model, options, template, *way, learner=learner).run()


def read_job(flags: Flags) -> DecodeJob:
    """Read the prompts, load the model and encode chats.

    Raises:
      UserError: a prompt or an option that cannot be decoded, and which request of a file; before anything is.
    """
    prompts, options = read_requests(flags)
    model = load(flags, options)
    is_gap = flags.prefix_file is not None
    template = None if is_gap else chosen_template(flags, model.tokenizer)
    if is_gap:
        ids, option = model.middle(prompts[0], options[0])
        prompts, options = [tuple(ids)], [option]
    has_texts = any(isinstance(prompt, str) for prompt in prompts)
    chosen = flags.raw or flags.chat is not None
    if model.tokenizer.chat_template and has_texts and not chosen:
        note = "raw text (--chat makes the prompt a user's turn)"
        inform(note if template is None else "chat (--raw continues the prompt instead)")
    forms = ["a middle" if is_gap else "raw text"] * len(prompts)
    for i, prompt in enumerate(prompts):
        try:
            # Messages are turns whatever the flags say.
            if template is not None or isinstance(prompt, list):
                forms[i], name = "chat", template or ""
                options[i] = model.ending_turns(options[i], name)
                if not isinstance(prompt, tuple):
                    prompts[i] = encode_prompt(model.tokenizer, prompt, name)
            model.request([prompts[i]], [options[i]])  # refuse before anything is decoded
        except UserError as error:
            where = f"{flags.prompts_file} request {i + 1}: " if flags.prompts_file else ""
            raise UserError(f"{where}{error}") from error
    # One rule for the file, so that its greedy batches run the same program as sampled ones.
    sampled = any(option.temperature > 0 for option in options)
    acceptance = model.engine(sampled=sampled, acceptance=flags.acceptance).acceptance
    return DecodeJob(
        model,
        prompts,
        options,
        acceptance=acceptance,
        repeats=flags.repeats if flags.compare else 0,
        forms=forms,
    )


def load(flags: Flags, options: Sequence[Options]) -> Model:
    """Load the model for requests with these options, and set the process up for it.

    Raises:
      UserError: the options do not go together, or as `api.load`.
    """
    if flags.no_repeat_ngram_size and any(option.constraint for option in options):
        raise UserError(
            "a constraint and --no_repeat_ngram_size may leave no token: give one of them"
        )
    give_memory_back()
    use_compilation_cache()
    warn_if_accelerator_unused()
    return load_model(
        flags,
        tree=flags.tree,
        tokenizer=flags.tokenizer,
        batch=min(flags.batch_size, len(options)),
        all_heads=is_conversation(flags),  # /tree may need any of them
    )


def is_conversation(flags: Flags) -> bool:
    """Whether the flags ask for a conversation: no prompt, and a chat model or --chat."""
    if flags.prompt is not None or flags.prompts_file is not None or flags.raw:
        return False
    if flags.prefix_file is not None:
        return False
    if flags.chat is not None or flags.model is None:
        return flags.chat is not None
    return is_chat_directory(flags.tokenizer or find_model(flags.model), flags.model)


def chosen_template(flags: Flags, tokenizer: Tokenizer) -> str | None:
    """The chat template for prompts: "" is the tokenizer's own, None is none."""
    if flags.raw or flags.chat is not None:
        return None if flags.raw else flags.chat
    return "" if is_chat_model(tokenizer, flags.model) else None


def answer_as_json(job: DecodeJob) -> int:
    """Print the report of the only request as a JSON object; returns the exit status."""
    with announced("compiling and decoding"):
        [result] = job.generate([0])
    print_json(job.facts([0], [result])[0])
    return int(result.finish_reason == "error")


def answer_one(
    job: DecodeJob, *, show_drafts: bool, save_drafts: str | None, load_seconds: float
) -> int:
    """Print one text as it is decoded, then a line of measurements.

    Args:
      show_drafts: colour accepted drafts by their tree depth.
      save_drafts: an SVG file for the coloured text.
      load_seconds: from the start of the command until the model was loaded.
    """
    began = time.perf_counter()
    segments: list[tuple[str, int]] = [(p, 0) for p in job.prompts if isinstance(p, str)]
    chunks = job.model.stream(job.prompts, job.options, acceptance=job.acceptance)
    with announced("compiling"):
        first = next(chunks)
    first_seconds = time.perf_counter() - began
    with messages_after():
        sys.stdout.write("".join(text for text, _ in segments))
        for pieces, final in chain([first], chunks):
            results = final or []
            for text, depth in (part for piece in pieces for part in piece.parts):
                segments.append((text, depth))
                sys.stdout.write(coloured(text, depth) if show_drafts else text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
    if save_drafts:
        from medusa_jax.plots.text import draw_accepted_text

        draw_accepted_text(segments, save_drafts)
        inform(f"wrote {save_drafts}")
    if show_drafts:
        inform(LEGEND)
    [result] = results
    facts = job.facts([0], [result], as_json=False)[0]
    inform(summary(facts, load_seconds, first_seconds, result.prefill_seconds))
    may_draft = job.model.tree.n_nodes > 1
    few = 0 < facts["mean_accepted_length"] < HELPED
    if may_draft and facts["tree_nodes"] == 1 and few:
        drafter = job.model.drafter
        fitted = ", or a fitted tree (medusa calibrate)" if drafter.trained else ""
        inform(
            f"mostly plain steps: {drafter.name}'s drafts were slower here; heads that guess "
            f"more often help (medusa train){fitted}"
        )
    if result.finish_reason == "context":
        context = job.model.config.max_position
        inform(f"note: stopped at the model's context of {context} tokens")
    return int(result.finish_reason == "error")
