"""Prompts, conversations and options as the decode loop takes them."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from medusa_jax.api.results import Options
from medusa_jax.config import LlamaConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.errors import UserError
from medusa_jax.interop.chat import Message, encode_prompt, stop_ids
from medusa_jax.interop.tokenizer import Tokenizer

if TYPE_CHECKING:
    from medusa_jax.constraints import Grammars
    from medusa_jax.decoding.guides import Guide

# A prompt: text or token ids.
Prompt = str | Sequence[int]


def is_message(value: object) -> bool:
    """Whether this is one turn of a conversation, such as {"role": "user", "content": "Hi"}."""
    return isinstance(value, Mapping)


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt, vocab_size: int) -> list[int]:
    """Token ids of a prompt, BOS first where the tokenizer puts one.

    Raises:
      UserError: neither text nor token ids, nothing to start from (an empty prompt and no BOS), or
        ids out of range.
    """
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_bos=True)
    else:
        ids = _token_ids(prompt)
        if any(not 0 <= i < vocab_size for i in ids):
            raise UserError(f"a prompt id is outside the vocabulary 0..{vocab_size - 1}")
    if not ids:
        if tokenizer.bos_id is None:
            raise UserError(
                "the prompt is empty and the tokenizer has no BOS to start from"
            )
        ids = [tokenizer.bos_id]
    return ids


def _token_ids(prompt: Any) -> list[int]:
    """A prompt that is no text.

    Raises:
      UserError: it is a conversation, or no list of whole numbers.
    """
    try:
        parts = [prompt] if is_message(prompt) else list(prompt)
        if any(map(is_message, parts)):
            raise UserError(
                "a prompt is text or token ids, these are messages: call model.chat(messages)"
            )
        return [operator.index(part) for part in parts]
    except TypeError:
        shown = repr(prompt)[:80]
        raise UserError(f"a prompt is text or a list of token ids, not {shown}") from None


def conversation(
    tokenizer: Tokenizer,
    eos_ids: Sequence[int],
    messages: str | Sequence[Message],
    options: Options,
    template: str = "",
) -> tuple[list[int], Options]:
    """Token ids of a conversation up to where the model is to answer, and options for the answer.

    Args:
      messages: turns with "role" and "content", the last one the user's; or that turn's text.
      template: a shipped chat template, "" for the tokenizer's own.

    Raises:
      UserError: malformed messages, or no such template.
    """
    turns = messages if isinstance(messages, str) else list(messages)
    ids = encode_prompt(tokenizer, turns, template)
    return ids, ending_turns(tokenizer, eos_ids, options, template)


def ending_turns(
    tokenizer: Tokenizer, eos_ids: Sequence[int], options: Options, template: str
) -> Options:
    """Options whose text ends where the chat template ends a turn, unless they name EOS ids."""
    if options.eos_ids is not None:
        return options
    ends = {*eos_ids, *stop_ids(tokenizer, template)}
    return dataclasses.replace(options, eos_ids=tuple(sorted(ends)))


def request_of(
    prompts: Sequence[list[int]],
    options: Sequence[Options],
    config: LlamaConfig,
    eos_ids: Sequence[int],
    ids: Sequence[int] | None = None,
    grammars: "Callable[[], Grammars] | None" = None,
) -> loop.Request:
    """Token ids of prompts with the options of each row, bounded by the model's context.

    Args:
      eos_ids: what ends a text whose options name nothing else.
      ids: request ids, which decide the noise together with the seed; by default 0, 1, ...
      grammars: returns those of the tokenizer, for constraints.

    Raises:
      UserError: a prompt that leaves no room in the context, a constraint that cannot be met.
    """
    context = config.max_position
    for prompt in prompts:
        if len(prompt) >= context:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, the model's context is {context}: "
                "shorten it"
            )
    for one in options:
        beyond = [i for i, _ in one.penalties.bias if i >= config.vocab_size]
        if beyond:
            raise UserError(
                f"logit_bias: token {beyond[0]} is outside the vocabulary "
                f"0..{config.vocab_size - 1}"
            )
    return loop.Request(
        prompts=list(prompts),
        limits=[min(o.max_new_tokens, context - len(p)) for o, p in zip(options, prompts)],
        stops=[_stops(o, eos_ids, config.vocab_size) for o in options],
        temperature=[o.temperature for o in options],
        top_k=[o.top_k for o in options],
        top_p=[o.top_p for o in options],
        min_p=[o.min_p for o in options],
        seed=[o.seed % 2**32 for o in options],
        ids=ids,
        epsilon=[o.epsilon for o in options],
        delta=[o.delta for o in options],
        max_steps=[min(o.max_steps or loop.FOREVER, loop.FOREVER) for o in options],
        penalties=[o.penalties for o in options],
        guides=_guides(options, eos_ids, grammars),
    )


def _guides(
    options: Sequence[Options],
    eos_ids: Sequence[int],
    grammars: "Callable[[], Grammars] | None",
) -> "list[Guide | None] | None":
    """The guide of each row with a constraint; None if no row has one."""
    asked = [o.constraint for o in options]
    if grammars is None or not any(asked):
        return None
    ends = [eos_ids if o.eos_ids is None else o.eos_ids for o in options]
    guide = grammars().guide
    return [guide(one, end) if one else None for one, end in zip(asked, ends)]  # type: ignore[arg-type]


def _stops(
    options: Options, eos_ids: Sequence[int], vocab_size: int
) -> list[tuple[int, ...]]:
    """The token sequences that end a request: EOS ids and its own stop sequences.

    Those with ids outside the vocabulary never come.
    """
    ending = eos_ids if options.eos_ids is None else options.eos_ids
    ends = [*((i,) for i in ending), *options.stop_sequences]
    return [ids for ids in ends if min(ids) >= 0 and max(ids) < vocab_size]
