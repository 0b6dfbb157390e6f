"""Batches of conversations that a chat model writes from seeds."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from medusa_jax.distill.seeds import Seed
from medusa_jax.interop import answers, chat, rendering
from medusa_jax.interop.tokenizer import Tokenizer
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.api.results import Result

# (row, its result), called once for each row, soon after its end.
Take = Callable[[int, "Result"], None]
# (prompts [token ids], row seeds, stop strings; None for assistant turns, Take).
Decode = Callable[[list[list[int]], list[int], Sequence[str] | None, Take], None]


@dataclasses.dataclass
class Conversation:
    """A conversation in progress.

    Attributes:
      answers: number of tokens, steps and finish reason of each answer.
      problem: why the conversation ended early, else "".
    """

    seed: Seed
    messages: list[chat.Message]
    answers: list[Json] = dataclasses.field(default_factory=list)
    problem: str = ""
    open: bool = True
    reported: bool = False

    def end(self, problem: str = "") -> None:
        """End the conversation; remove a last user turn without an answer, unless it is the first."""
        self.open, self.problem = False, problem
        if self.answers and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def record(self) -> Json:
        """A line of messages.jsonl. `cut`: the last answer is incomplete."""
        line: Json = {"seed": self.seed.number, "messages": self.messages}
        line["answers"] = self.answers
        if self.answers and self.answers[-1]["finish"] != "stop":
            line["cut"] = True
        return line | ({"problem": self.problem} if self.problem else {})


class Converse:
    """Writes conversations in batches.

    Args:
      tokenizer, context: of the model.
      decode: continues prompts.
      template: name of a shipped chat template, "" for the tokenizer's.
      self_talk: whether the model writes user turns after the seed's.
      max_turns: most answers in a conversation.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: int, decode: Decode, template: str, self_talk: bool,
        max_turns: int,
    ):  # fmt: skip
        self.tokenizer, self.context, self.decode = tokenizer, context, decode
        self.template, self.self_talk, self.max_turns = template, self_talk, max_turns

    def __call__(self, seeds: Sequence[Seed], ended: Callable[[Seed, Json], None]) -> None:
        """Call `ended` with the record of each seed, soon after the end of its conversation."""
        talks = [self.begin(seed) for seed in seeds]

        def report(talk: Conversation) -> None:
            if not talk.open and not talk.reported:
                talk.reported = True
                ended(talk.seed, talk.record())

        def still_open() -> list[Conversation]:
            for talk in talks:
                report(talk)
            return [talk for talk in talks if talk.open]

        if silent := [talk for talk in talks if talk.seed.silent]:
            self.ask(silent)
        while unfinished := still_open():
            self.answer(unfinished, report)
            unfinished = still_open()
            if self.self_talk and unfinished:
                self.ask(unfinished)
            for talk in unfinished:
                if not self.self_talk:
                    talk.messages.append(user(talk.seed.turns[len(talk.answers)]))

    def begin(self, seed: Seed) -> Conversation:
        """Start a conversation with the system text, if any, and the first user turn."""
        talk = Conversation(seed, [])
        if seed.system:
            talk.messages.append({"role": "system", "content": seed.system})
        if seed.turns:
            talk.messages.append(user(seed.turns[0]))
        elif not seed.silent:
            talk.end("the seed has no user turn")
        return talk

    def turns_of(self, talk: Conversation) -> int:
        """Most answers in this conversation."""
        if self.self_talk:
            return self.max_turns
        return min(self.max_turns, len(talk.seed.turns))

    def answer(
        self, talks: list[Conversation], report: Callable[[Conversation], None]
    ) -> None:
        """Add the assistant's next turn to each conversation; `report` it soon after its end."""
        fitting, prompts = [], []
        for talk in talks:
            try:
                ids = chat.encode_prompt(self.tokenizer, talk.messages, self.template)
            except rendering.SampleError as error:
                talk.end(str(error))
                continue
            if self.fits(talk, ids):
                fitting.append(talk)
                prompts.append(ids)

        def take(row: int, result: "Result") -> None:
            talk, finish = fitting[row], result.finish_reason
            if text := self.text(result.token_ids):
                talk.messages.append({"role": "assistant", "content": text})
                n = len(result.token_ids)
                talk.answers.append({"tokens": n, "steps": result.steps, "finish": finish})
                if finish != "stop":
                    talk.end(f"the answer was cut off ({finish})")
                elif len(talk.answers) >= self.turns_of(talk):
                    talk.end()
            else:
                talk.end("an empty answer")
            report(talk)

        self.run(fitting, prompts, None, take)

    def ask(self, talks: list[Conversation]) -> None:
        """Add a user turn written by the model to each conversation (the first as in Magpie)."""
        fitting, prompts, stops = [], [], []
        for talk in talks:
            ids, stop = answers.encode_user_opening(
                self.tokenizer, talk.messages, self.template
            )
            if self.fits(talk, ids):
                fitting.append(talk)
                prompts.append(ids)
                stops.append(stop)

        def take(row: int, result: "Result") -> None:
            text = result.text.strip()
            if text and result.finish_reason == "stop":
                fitting[row].messages.append(user(text))
            else:
                fitting[row].end("the model wrote no further user turn")

        self.run(fitting, prompts, stops, take)

    def fits(self, talk: Conversation, ids: list[int]) -> bool:
        """Whether a prompt fits the context; if not, end its conversation."""
        if len(ids) < self.context:
            return True
        talk.end("the context is full")
        return False

    def run(
        self,
        talks: list[Conversation],
        prompts: list[list[int]],
        stops: Sequence[str] | None,
        take: Take,
    ) -> None:
        if talks:
            self.decode(prompts, [talk.seed.number for talk in talks], stops, take)

    def text(self, ids: list[int]) -> str:
        """Decode an answer without its end token and surrounding whitespace."""
        if ids and ids[-1] in chat.stop_ids(self.tokenizer, self.template):
            ids = ids[:-1]
        return self.tokenizer.decode(ids).strip()


def user(text: str) -> chat.Message:
    """A user turn."""
    return {"role": "user", "content": text}
