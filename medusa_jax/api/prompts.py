"""Convert prompts, conversations and options to the decode loop's form."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from medusa_jax.api.results import Options
from medusa_jax.arch import LlamaConfig
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.errors import UserError
from medusa_jax.text.tokenizer import Tokenizer, TurnPrompt
from medusa_jax.typed import WRONG, as_type

if TYPE_CHECKING:
    from medusa_jax.constraints.guide import Guide

# A prompt: text or token ids.
Prompt = str | Sequence[int]


def is_message(value: object) -> bool:
    """Whether this is one turn of a conversation, such as {"role": "user", "content": "Hi"}."""
    return isinstance(value, Mapping)


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt, vocab_size: int) -> list[int]:
    """Token ids of a prompt, the tokenizer's prefix first.

    Raises:
      UserError: not text or token ids, nothing to start from (an empty prompt and no BOS), or ids out
        of range, of text too: a tokenizer may have tokens without a row in the embedding.
    """
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_bos=True)
    else:
        try:
            parts = () if is_message(prompt) else as_type(prompt, tuple[Any, ...])
            if is_message(prompt) or any(map(is_message, parts)):
                raise UserError(
                    "a prompt is text or token ids, these are messages: call model.chat(messages)"
                )
            ids = [*as_type(parts, tuple[int, ...])]
        except WRONG:
            shown = f"a prompt is text or a list of token ids, not {prompt!r:.80}"
            raise UserError(shown) from None
    if not ids:
        if tokenizer.bos_id is None:
            raise UserError(
                "the prompt is empty and the tokenizer has no BOS to start from"
            )
        ids = [tokenizer.bos_id]
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise UserError(
            f"prompt id {outside[0]} is outside the vocabulary 0..{vocab_size - 1}: the model has no embedding for it"
        )
    return TurnPrompt(ids) if isinstance(prompt, TurnPrompt) else ids


def request_of(
    prompts: Sequence[list[int]],
    options: Sequence[Options],
    config: LlamaConfig,
    eos_ids: Sequence[int],
    ids: Sequence[int] | None,
    guides: "list[Guide | None] | None",
) -> DecodeRequest:
    """Token ids of prompts with the options of each row, bounded by the model's context.

    Args:
      eos_ids: tokens that end a text whose options name none.
      ids: request ids, which determine the noise together with the seed; by default 0, 1, ...
      guides: by row, the guide of its constraint or None.

    Raises:
      UserError: a prompt that leaves no room in the context; a bias or alternatives of tokens that do not exist.
    """
    context = config.max_position
    for prompt in prompts:
        if len(prompt) >= context:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, the model's context is {context}: "
                "shorten it"
            )
    for one in options:
        check_tokens("logit_bias", [i for i, _ in one.penalties.bias], config.vocab_size)
        if (one.logprobs or 0) > config.vocab_size:
            raise UserError(
                f"logprobs {one.logprobs} exceeds the vocabulary of {config.vocab_size}"
            )
    return DecodeRequest(
        prompts=list(prompts),
        limits=[min(o.max_new_tokens, context - len(p)) for o, p in zip(options, prompts)],
        # Ids that only the tokenizer has never occur.
        ends=[[i for i in ends_of(o, eos_ids) if i < config.vocab_size] for o in options],
        temperature=[o.temperature for o in options],
        top_k=[o.top_k for o in options],
        top_p=[o.top_p for o in options],
        min_p=[o.min_p for o in options],
        seed=[o.seed % 2**32 for o in options],
        ids=None if ids is None else [i % 2**32 for i in ids],
        epsilon=[o.epsilon for o in options],
        delta=[o.delta for o in options],
        penalties=[o.penalties for o in options],
        guides=guides,
    )


def check_tokens(name: str, ids: Iterable[int], size: int) -> None:
    """Raise a `UserError` for a token id outside a vocabulary."""
    if unknown := [i for i in ids if not 0 <= i < size]:
        raise UserError(
            f"{name}: token {unknown[0]} is outside the vocabulary 0..{size - 1}"
        )


def ends_of(options: Options, eos_ids: Sequence[int]) -> Sequence[int]:
    """The tokens that end a text: the request's EOS ids, else these."""
    return eos_ids if options.eos_ids is None else options.eos_ids


def equal_batches(n: int, size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Numbers 0, ..., n - 1 in batches, and each batch padded to `size` with its last number.

    If n < `size`, there is one batch of size n.

    Example: 5 in batches of 2: ([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4], [4, 4]).
    """
    size = min(size, n)
    for start in range(0, n, size):
        ids = list(range(start, min(start + size, n)))
        yield ids, ids + [ids[-1]] * (size - len(ids))
