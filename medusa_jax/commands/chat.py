"""`decode.py --chat` without a prompt: a conversation at the terminal."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from medusa_jax.api import Model, Options, Result
from medusa_jax.api.dialogue import Dialogue
from medusa_jax.api.text_stream import Chunk
from medusa_jax.commands.decode_report import LEGEND, coloured
from medusa_jax.commands.flags import file_to_write
from medusa_jax.commands.turn_input import TurnInput
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.text.chat import encode_prompt, template_source

if TYPE_CHECKING:
    from medusa_jax.learning.learner import Learner

HELP = "/help lists the commands; Ctrl-C stops a reply, /exit or Ctrl-D ends the chat"
COMMANDS = {
    "/help": "list the commands",
    "/reset": "forget the conversation (also /new)",
    "/retry": "answer the last turn again, with other draws",
    "/temperature T": "draw further replies at this temperature; 0 is greedy",
    "/tree TREE": "draft with another tree, as for --tree; none is plain decoding",
    "/stats": "speed and length of the conversation so far",
    "/save FILE": "append the conversation to a JSONL file, as training reads it",
    "/exit": "end the chat (also /quit)",
}
ALIASES = {"/new": "/reset", "/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}


@dataclasses.dataclass
class Chat:
    """Turns of user and assistant, rendered by a chat template before every reply.

    Attributes:
      show_drafts: colour accepted drafts by their tree depth.
      spec: the draft tree, as for --tree; None is the model's default.
      learner: learns from the replies while the user types.
      messages: the conversation so far; a stopped reply ends where the user stopped it.
      results: the complete replies.
    """

    model: Model
    options: Options
    template: str
    acceptance: str
    show_drafts: bool
    spec: str | None = None
    learner: "Learner | None" = None
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    results: list[Result] = dataclasses.field(default_factory=list)
    _question: str = ""
    _answered: bool = False
    _stopped: bool = False
    _retries: int = 0
    _typing: bool = False

    def __post_init__(self) -> None:
        template_source(self.model.tokenizer, self.template)  # refuse at once without one
        self.dialogue = Dialogue(self.model)
        self._pool = ThreadPoolExecutor(1)
        self._compiled: Future[None] = Future()

    def run(self) -> int:
        """Read, reply, repeat; returns the exit status."""
        turns = TurnInput()
        inform(HELP)
        if self.show_drafts:
            inform(LEGEND)
        self._compile()  # while the user types
        if self.learner:
            self.learner.start(lambda: self._typing)
        self._converse(turns)
        ended = self.learner is None or self.learner.close()
        # A compilation cannot be stopped.
        if wait([self._compiled], timeout=0.5).not_done or not ended:
            sys.stdout.flush()
            os._exit(0)
        return 0

    def _converse(self, turns: TurnInput) -> None:
        while True:
            try:
                self._typing = True
                text = turns.read()
            except EOFError:
                return inform("")
            except KeyboardInterrupt:
                inform(f"\n({HELP})")
                continue
            finally:
                self._typing = False
            if ALIASES.get(text, text) == "/exit":
                return None
            try:
                self.take(text)
            except UserError as error:  # the conversation goes on without this turn
                inform(f"error: {error}")

    def _compile(self) -> None:
        """Begin to compile the programs of a reply, on another thread."""
        self._compiled = self._pool.submit(self.compile)

    def compile(self) -> None:
        """Answer a short turn without showing it, for a few steps."""
        prompt = encode_prompt(self.model.tokenizer, "Hi", self.template)
        if len(prompt) < self.model.config.max_position:
            next(self._stream(prompt, self.options))

    def _stream(self, prompt: list[int], options: Options) -> Iterator[Chunk]:
        return self.dialogue.stream(
            prompt, options, acceptance=self.acceptance, tree=self.spec
        )

    def take(self, text: str) -> None:
        """Obey a command (a line that begins with a slash and a letter) or answer a turn.

        Raises:
          UserError: an unknown command or a bad value, or as `reply`.
        """
        if not text:
            return
        if not re.match("/[A-Za-z]", text):
            self._question, self._answered, self._retries = text, False, 0
            return self.reply()
        name, *value = text.split(maxsplit=1)
        name = ALIASES.get(name, name)
        usages = {usage.split()[0]: usage for usage in COMMANDS}
        if name not in usages:
            hint = did_you_mean(name, usages)
            raise UserError(
                f"there is no command {name}{hint} (there are {', '.join(usages)})"
            )
        if len(usages[name].split()) != 1 + len(value):
            raise UserError(f"write {usages[name]}")
        getattr(self, name[1:])(*value)

    # The commands, by name.

    def help(self) -> None:
        inform("\n".join(f"  {usage:16}{what}" for usage, what in COMMANDS.items()))

    def reset(self) -> None:
        self.messages, self.results, self._question = [], [], ""

    def retry(self) -> None:
        if not self._question:
            raise UserError("nothing has been asked yet")
        if self.options.temperature == 0 and self._answered and not self._stopped:
            raise UserError(
                "at temperature 0 the reply would be the same: write /temperature 0.7"
            )
        self._retries += 1
        self.reply()

    def temperature(self, value: str) -> None:
        try:
            options = dataclasses.replace(self.options, temperature=float(value))
        except ValueError:
            raise UserError("write /temperature and a number, such as 0.7") from None
        self._change(options, self.spec)

    def tree(self, value: str) -> None:
        self._change(self.options, value)

    def _change(self, options: Options, spec: str | None) -> None:
        sampled = options.temperature > 0
        same_program = (sampled, spec) == (self.options.temperature > 0, self.spec)
        self.model.engine(spec, self.acceptance, sampled)  # may refuse
        with announced("compiling"):
            self._compiled.result()
        self.options, self.spec = options, spec
        if not same_program:
            self._compile()

    def stats(self) -> None:
        """Print the speed of all replies, the tree, and how full the context is."""
        tree = self.model.parse_tree(self.spec)
        turns = encode_prompt(self.model.tokenizer, self.messages[:-1] or "", self.template)
        if self.messages:
            turns = turns + self.model.tokenizer.encode(self.messages[-1]["content"])
        inform(
            f"{speed(self.results)}; {self.model.drafts_by(tree)}, {tree.n_nodes} nodes, "
            f"temperature {self.options.temperature:g}; {len(self.messages) // 2} turns, "
            f"{len(turns)} of {self.model.config.max_position} tokens of the context"
        )

    def save(self, path: str) -> None:
        """Append the conversation to a file, as one line `{"messages": [...]}`."""
        if not self.messages:
            raise UserError("nothing has been said yet")
        line = json.dumps({"messages": self.messages}, ensure_ascii=False)
        try:
            with open(file_to_write(path, "/save"), "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error
        inform(f"saved {len(self.messages)} messages to {path}")

    def reply(self) -> None:
        """Answer the last user turn; Ctrl-C ends the answer, not the chat.

        It replaces an earlier answer to the turn. A reply that ends before its first word changes nothing: models
        that read an empty reply tend to give further ones.

        Raises:
          UserError: the turn alone is too long for the context, or cannot be answered; nothing changes.
        """
        history = self.messages
        turn = {"role": "user", "content": self._question}
        self.messages = [*(history[:-2] if self._answered else history), turn]
        options = dataclasses.replace(self.options, seed=self.options.seed + self._retries)
        shown, note = "", "(stopped)"
        try:
            prompt = self.fitting_prompt()
            with announced("compiling"):
                self._compiled.result()
            for pieces, results in self._stream(prompt, options):
                for part, depth in (pair for piece in pieces for pair in piece.parts):
                    shown += part
                    sys.stdout.write(coloured(part, depth) if self.show_drafts else part)
                sys.stdout.flush()
                if results:
                    note = self._note(results[0], shown)
                    if self.learner and results[0].finish_reason != "error":
                        self.learner.add(prompt, results[0].token_ids)
        except UserError:
            self.messages = history
            raise
        except KeyboardInterrupt:
            pass
        sys.stdout.write("\n")
        sys.stdout.flush()
        inform(note)
        if shown.strip():
            self.messages.append({"role": "assistant", "content": shown})
            self._answered, self._stopped = True, note == "(stopped)"
        else:
            self.messages = history

    def _note(self, result: Result, shown: str) -> str:
        """The line below a complete reply."""
        if not shown.strip():
            return "(the model ended at once)"
        self.results.append(result)
        ends = {
            "context": "; the context is full",
            "length": "; cut there: ask to go on, or raise --max_new_tokens",
        }
        return f"({speed([result])}{ends.get(result.finish_reason, '')})"

    def fitting_prompt(self) -> list[int]:
        """Ids of the conversation without its oldest turns where it fills the context.

        A quarter of the context, or `max_new_tokens` if fewer, is reserved for the reply.
        """
        context = self.model.config.max_position
        room = context - min(self.options.max_new_tokens, context // 4)
        forgotten = 0
        while True:
            ids = encode_prompt(self.model.tokenizer, self.messages, self.template)
            if len(ids) <= room or len(self.messages) == 1:
                break
            forgotten += 2
            self.messages = self.messages[2:]
        if len(ids) >= context:
            raise UserError(
                f"this turn has {len(ids)} tokens with its template, the model's context is "
                f"{context}: shorten it"
            )
        if forgotten:
            inform(f"(the context is full: the {forgotten} oldest turns are forgotten)")
        return ids


def speed(results: list[Result]) -> str:
    """Tokens, tokens per second and tokens per step of some replies."""
    tokens = sum(result.new_tokens for result in results)
    step_tokens, steps = tokens - len(results), sum(result.steps for result in results)
    seconds = sum(result.decode_seconds for result in results)
    return (
        f"{tokens} tokens, {step_tokens / max(seconds, 1e-9):.0f} tokens/s, "
        f"{step_tokens / max(steps, 1):.2f} tokens a step"
    )
