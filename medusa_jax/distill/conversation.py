"""Texts that a model writes from seeds, in batches: continued prompts, and conversations turn by turn."""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from medusa_jax.arch import LlamaConfig
from medusa_jax.distill.seeds import Seed
from medusa_jax.text import answers, chat
from medusa_jax.text.jinja import SampleError
from medusa_jax.text.tokenizer import BROKEN, Tokenizer
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.api.results import Result

# (row, its result), called once for each row, soon after its end.
Take = Callable[[int, "Result"], None]


class Turn(NamedTuple):
    """A turn to write.

    Attributes:
      prompt: token ids.
      stop: the string that ends a user's turn, "" for none; None: an answer.
      messages: the conversation before it; () for a text to continue.
    """

    prompt: list[int]
    stop: str | None
    messages: Sequence[chat.Message] = ()


# Writes turns, all of them users' or none: (turns, numbers of their seeds, take).
Decode = Callable[[list[Turn], list[int], Take], None]


class TalkEnd(Exception):
    """A conversation ends early; the message says why."""


Talk = Generator[Turn, "Result", Json]


def continuation(seed: Seed, prompt: list[int]) -> Talk:
    """Continue the prompt of a seed; returns a line of samples.jsonl."""
    result = yield Turn(prompt, None)
    return {"seed": seed.number, "prompt_ids": prompt, "token_ids": result.token_ids}


def talk(
    seed: Seed, tokenizer: Tokenizer, model: LlamaConfig, template: str, self_talk: bool, max_turns: int
) -> Talk:  # fmt: skip
    """Hold one conversation: yields the turns that the model has to write and receives their results.

    Args:
      tokenizer, model: the model's tokenizer and shape.
      template: name of a shipped chat template, "" for the tokenizer's.
      self_talk: whether the model writes user turns after the seed's.
      max_turns: most answers.

    Returns: a line of messages.jsonl; "cut": the last answer is incomplete, "problem": why it ended early.
    """
    messages: list[chat.Message] = []
    records: list[Json] = []
    problem = ""

    def check_room(ids: list[int]) -> list[int]:
        if len(ids) >= model.max_position:
            raise TalkEnd("the context is full")
        if max(ids) >= model.vocab_size:
            raise TalkEnd("its text has a token without an embedding")
        return ids

    if seed.system:
        messages.append({"role": "system", "content": seed.system})
    try:
        while len(records) < (
            max_turns if self_talk else min(max_turns, len(seed.turns) or 1)
        ):
            if seed.silent or (self_talk and records):  # the first turn as in Magpie
                ids, stop = answers.encode_user_opening(tokenizer, messages, template)
                result = yield Turn(check_room(ids), stop)
                text = result.text.strip()
                if not text or result.finish_reason != "stop":
                    raise TalkEnd("the model wrote no further user turn")
            elif seed.turns:
                text = seed.turns[len(records)]
            else:
                raise TalkEnd("the seed has no user turn")
            messages.append({"role": "user", "content": text})
            ids = chat.encode_prompt(tokenizer, messages, template)
            result = yield Turn(check_room(ids), None, messages)
            ids, finish = result.token_ids, result.finish_reason
            ends = chat.stop_ids(tokenizer, template)
            answer = tokenizer.decode(ids[:-1] if ids and ids[-1] in ends else ids)
            if finish != "stop":
                answer = answer.rstrip(BROKEN)  # a character that was cut in two
            answer = answer.strip()
            if not answer:
                raise TalkEnd("an empty answer")
            thoughts = getattr(result, "thoughts", "")  # of a server's model
            fields = {"reasoning_content": thoughts} if thoughts else {}
            messages.append({"role": "assistant", "content": answer} | fields)
            count = len(ids) + len(tokenizer.encode(thoughts))
            records.append({"tokens": count, "steps": result.steps, "finish": finish})
            if finish != "stop":
                raise TalkEnd(f"the answer was cut off ({finish})")
    except (TalkEnd, SampleError) as end:
        problem = str(end)
    if records and messages[-1]["role"] == "user":
        messages.pop()  # it has no answer
    line: Json = {"seed": seed.number, "messages": messages, "answers": records}
    if records and records[-1]["finish"] != "stop":
        line["cut"] = True
    return line | ({"problem": problem} if problem else {})


def converse(
    talks: Sequence[tuple[int, Talk]], decode: Decode, on_end: Callable[[Json], None]
) -> None:
    """Write texts, one turn of each at a time: users' turns first, then answers.

    Args:
      talks: each with the number of its seed.
      decode: writes turns.
      on_end: called with the line of each seed, soon after the end of its text.
    """
    turns: dict[int, Turn] = {}

    def advance(i: int, result: "Result | None" = None) -> None:
        try:
            turns[i] = talks[i][1].send(result)  # type: ignore[arg-type]
        except StopIteration as end:
            turns.pop(i, None)
            on_end(end.value)

    def take(batch: list[int], row: int, result: "Result") -> None:
        advance(batch[row], result)

    for i in range(len(talks)):
        advance(i)
    while turns:
        users = any(turn.stop is not None for turn in turns.values())
        batch = [i for i, turn in turns.items() if (turn.stop is not None) == users]
        numbers = [talks[i][0] for i in batch]
        decode([turns[i] for i in batch], numbers, partial(take, batch))
