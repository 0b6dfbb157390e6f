"""`decode.py --chat` without a prompt: a conversation at the terminal."""

import dataclasses
import re
import sys
from concurrent.futures import ThreadPoolExecutor

from medusa_jax.api import Model, Options
from medusa_jax.api.dialogue import Dialogue
from medusa_jax.commands.decode_report import LEGEND, coloured
from medusa_jax.commands.turn_input import TurnInput
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.interop.chat import encode_prompt, template_source

HELP = "/help lists the commands; Ctrl-C stops a reply, /exit or Ctrl-D ends the chat"
COMMANDS = {
    "/help": "list the commands",
    "/reset": "forget the conversation (also /new)",
    "/retry": "answer the last turn again, with other draws",
    "/exit": "end the chat (also /quit)",
}
ALIASES = {"/new": "/reset", "/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}


class Chat:
    """Turns of user and assistant, rendered by a chat template before every reply.

    Args:
      show_drafts: colour accepted drafts by their tree depth.

    Attributes:
      messages: the conversation so far; a stopped reply ends where the user stopped it.
    """

    def __init__(
        self,
        model: Model,
        options: Options,
        template: str,
        acceptance: str,
        show_drafts: bool = False,
    ) -> None:
        template_source(model.tokenizer, template)  # refuse at once if there is none
        self.model = model
        self.dialogue = Dialogue(model)
        self.options = options
        self.template = template
        self.acceptance = acceptance
        self.show_drafts = show_drafts
        self.messages: list[dict[str, str]] = []
        self._retries = 0

    def run(self) -> int:
        """Read, reply, repeat; returns the exit status."""
        turns = TurnInput()
        inform(HELP)
        if self.show_drafts:
            inform(LEGEND)
        with ThreadPoolExecutor(1) as pool:
            self._compiled = pool.submit(self.compile)  # while the user types
            return self._converse(turns)

    def _converse(self, turns: TurnInput) -> int:
        while True:
            try:
                text = turns.read()
            except EOFError:
                inform("")
                return 0
            except KeyboardInterrupt:
                inform(f"\n({HELP})")
                continue
            text = ALIASES.get(text, text)
            if text == "/exit":
                return 0
            try:
                self.take(text)
            except UserError as error:  # the conversation goes on without this turn
                inform(f"error: {error}")

    def compile(self) -> None:
        """Answer a short turn without showing it, for a few steps."""
        prompt = encode_prompt(self.model.tokenizer, "Hi", self.template)
        if len(prompt) < self.model.config.max_position:
            next(self.dialogue.stream(prompt, self.options, acceptance=self.acceptance))

    def take(self, text: str) -> None:
        """Obey a command or answer a turn.

        Raises:
          UserError: an unknown command, or as `reply`.
        """
        if text == "/help":
            inform("\n".join(f"  {name:8}{what}" for name, what in COMMANDS.items()))
        elif text == "/reset":
            self.messages = []
        elif text == "/retry":
            self.retry()
        elif re.fullmatch(r"/[a-z]+", text):
            near = did_you_mean(text, COMMANDS) or " (/help lists them)"
            raise UserError(f"there is no command {text}{near}")
        elif text:
            self._retries = 0
            self.reply(text)

    def retry(self) -> None:
        """Answer the last turn again.

        Raises:
          UserError: nothing has been asked, or nothing is drawn, so that the answer would be the same.
        """
        if not self.messages:
            raise UserError("nothing has been asked yet")
        if self.options.temperature == 0:
            raise UserError(
                "at temperature 0 the reply would be the same: give --temperature"
            )
        *self.messages, asked, _ = self.messages
        self._retries += 1
        self.reply(asked["content"])

    def reply(self, text: str) -> None:
        """Answer one user turn; Ctrl-C ends the answer, not the chat.

        Raises:
          UserError: the turn alone is too long for the context, or cannot be answered; it is taken back.
        """
        self.messages.append({"role": "user", "content": text})
        options = dataclasses.replace(self.options, seed=self.options.seed + self._retries)
        shown = ended = ""
        try:
            prompt = self.fitting_prompt()
            with announced("compiling"):
                self._compiled.result()
            for pieces, done in self.dialogue.stream(
                prompt, options, acceptance=self.acceptance
            ):
                for part, depth in (pair for piece in pieces for pair in piece.parts):
                    shown += part
                    sys.stdout.write(coloured(part, depth) if self.show_drafts else part)
                sys.stdout.flush()
                ended = done[0].finish_reason if done else ""
        except UserError:
            self.messages.pop()
            raise
        except KeyboardInterrupt:
            inform("\n(stopped)")
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()
            if ended == "context":
                inform("(the context is full)")
            elif ended == "length":
                limit = self.options.max_new_tokens
                inform(f"(cut at {limit} tokens: ask to go on, or raise --max_new_tokens)")
        self.messages.append({"role": "assistant", "content": shown})

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
