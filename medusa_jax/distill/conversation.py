"""Conversations that a chat model makes of seeds, several at a time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from medusa_jax.distill.seeds import Seed
from medusa_jax.interop import chat

# Continues prompts [token ids] under row seeds: what `Model.generate` gives back.
Decode = Callable[..., list[Any]]


@dataclasses.dataclass
class Talk:
    """A conversation under way.

    Attributes:
      messages: what has been said; ends with an answer whenever no one is asked.
      answers: for each answer its number of tokens, steps, and why it ended.
      problem: why the conversation went no further; "" where it came to its end.
    """

    seed: Seed
    messages: list[chat.Message]
    answers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    problem: str = ""
    open: bool = True

    def end(self, problem: str = "") -> None:
        """No further turn; a question without an answer is taken back, unless it is the first."""
        self.open, self.problem = False, problem
        if self.answers and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def record(self) -> dict[str, Any]:
        """A line of messages.jsonl. `cut`: the last answer did not come to its own end."""
        line: dict[str, Any] = {"seed": self.seed.number, "messages": self.messages}
        line["answers"] = self.answers
        if self.answers and self.answers[-1]["finish"] != "stop":
            line["cut"] = True
        return line | ({"problem": self.problem} if self.problem else {})


class Converse:
    """Conversations in batches of one size.

    Args:
      tokenizer, context: of the model.
      decode: (prompts of token ids, row seeds, stop strings; None where the assistant speaks) ->
        results.
      template: a shipped chat template, "" for the tokenizer's own.
      self_talk: whether the model speaks for the user after the seed's own turns.
      max_turns: most answers in a conversation.
    """

    def __init__(
        self, tokenizer: Any, context: int, decode: Decode, template: str, self_talk: bool,
        max_turns: int,
    ):  # fmt: skip
        self.tokenizer, self.context, self.decode = tokenizer, context, decode
        self.template, self.self_talk, self.max_turns = template, self_talk, max_turns

    def __call__(self, seeds: Sequence[Seed]) -> list[dict[str, Any]]:
        """One record per seed, in order."""
        talks = [self.begin(seed) for seed in seeds]
        if silent := [talk for talk in talks if talk.seed.silent]:
            self.ask(silent)
        turn = 1
        while any(talk.open for talk in talks):
            self.answer([talk for talk in talks if talk.open])
            for talk in talks:
                if talk.open and turn >= self.turns_of(talk):
                    talk.end()
            going = [talk for talk in talks if talk.open]
            if self.self_talk and going:
                self.ask(going)
            for talk in talks:
                if talk.open and not self.self_talk:
                    talk.messages.append(user(talk.seed.turns[turn]))
            turn += 1
        return [talk.record() for talk in talks]

    def begin(self, seed: Seed) -> Talk:
        """System text, if any, and the first user turn."""
        talk = Talk(seed, [])
        if seed.system:
            talk.messages.append({"role": "system", "content": seed.system})
        if seed.turns:
            talk.messages.append(user(seed.turns[0]))
        elif not seed.silent:
            talk.end("the seed has no user turn")
        return talk

    def turns_of(self, talk: Talk) -> int:
        """How many answers the conversation may have."""
        return self.max_turns if self.self_talk else min(
            self.max_turns, len(talk.seed.turns)
        )  # fmt: skip

    def answer(self, talks: list[Talk]) -> None:
        """The assistant's next turn of each."""
        asked, prompts = [], []
        for talk in talks:
            try:
                ids = chat.encode_prompt(self.tokenizer, talk.messages, self.template)
            except chat.SampleError as error:
                talk.end(str(error))
                continue
            if self.fits(talk, ids):
                asked.append(talk)
                prompts.append(ids)
        for talk, result in zip(asked, self.run(asked, prompts, None)):
            text = self.text(result.token_ids)
            if not text:
                talk.end("an empty answer")
                continue
            talk.messages.append({"role": "assistant", "content": text})
            talk.answers.append(
                {
                    "tokens": len(result.token_ids),
                    "steps": result.steps,
                    "finish": result.finish_reason,
                }
            )
            if result.finish_reason != "stop":
                talk.end(f"the answer was cut off ({result.finish_reason})")

    def ask(self, talks: list[Talk]) -> None:
        """The next user turn of each, written by the model; the first one too (Magpie)."""
        asked, prompts, stops = [], [], []
        for talk in talks:
            ids, stop = chat.encode_user_opening(
                self.tokenizer, talk.messages, self.template
            )
            if self.fits(talk, ids):
                asked.append(talk)
                prompts.append(ids)
                stops.append(stop)
        for talk, result in zip(asked, self.run(asked, prompts, stops)):
            text = result.text.strip()
            if text and result.finish_reason == "stop":
                talk.messages.append(user(text))
            else:
                talk.end("the model wrote no further user turn")

    def fits(self, talk: Talk, ids: list[int]) -> bool:
        """Ends a conversation that has filled the context."""
        if len(ids) < self.context:
            return True
        talk.end("the context is full")
        return False

    def run(
        self, talks: list[Talk], prompts: list[list[int]], stops: Sequence[str] | None
    ) -> Any:
        if not talks:
            return []
        return self.decode(prompts, [talk.seed.number for talk in talks], stops)

    def text(self, ids: list[int]) -> str:
        """What was said, without the token that ended it and blanks at either end."""
        ends = chat.stop_ids(self.tokenizer, self.template)
        said = ids[:-1] if ids and ids[-1] in ends else ids
        return self.tokenizer.decode(said).strip()


def user(text: str) -> chat.Message:
    """One user turn."""
    return {"role": "user", "content": text}
