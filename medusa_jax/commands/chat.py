"""`decode.py --chat` without a prompt: a conversation at the terminal."""

import dataclasses
import itertools
import re
import sys

from medusa_jax.api import Options
from medusa_jax.commands.decode_report import LEGEND, coloured
from medusa_jax.commands.turn_input import TurnInput
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.interop.chat import encode_prompt, template_source
from medusa_jax.serving import Request, Server

HELP = "/help lists the commands; Ctrl-C stops a reply, /exit or Ctrl-D ends the chat"
COMMANDS = {
    "/help": "list the commands",
    "/reset": "forget the conversation (also /new)",
    "/retry": "answer the last turn again, with other draws",
    "/exit": "end the chat (also /quit)",
}
ALIASES = {"/new": "/reset", "/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}
# Tokens of a user turn for which programs are compiled ahead.
TURN_TOKENS = 64


class Chat:
    """Turns of user and assistant, rendered by a chat template before every reply.

    A server of one slot keeps the cache of earlier turns, so only new tokens are read. Programs for longer
    conversations are compiled while the user reads and types.

    Args:
      show_drafts: colour accepted drafts by their tree depth.

    Attributes:
      messages: the conversation so far, a stopped reply as far as it was shown.
    """

    def __init__(
        self,
        server: Server,
        options: Options,
        template: str,
        acceptance: str,
        show_drafts: bool = False,
    ) -> None:
        self.server, self.model = server, server.model
        template_source(self.model.tokenizer, template)  # refuse at once if there is none
        self.options = options
        self.template = template
        self.acceptance = acceptance
        self.show_drafts = show_drafts
        self.messages: list[dict[str, str]] = []
        self._compiled = self._retries = 0

    def run(self) -> int:
        """Read, reply, repeat; returns the exit status."""
        turns = TurnInput()
        inform(HELP)
        if self.show_drafts:
            inform(LEGEND)
        self.compile_ahead(0)
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
          UserError: there is none, or nothing is drawn, so that the answer would be the same.
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

    def reply(self, text: str) -> str:
        """Answer one user turn; Ctrl-C ends the answer, not the chat.

        Raises:
          UserError: the turn alone is too long for the context; it is taken back.
        """
        self.messages.append({"role": "user", "content": text})
        seed = self.options.seed + self._retries
        try:
            prompt = self.fitting_prompt()
            options = dataclasses.replace(self.options, seed=seed)
            request = Request(prompt, options, acceptance=self.acceptance)
            handle = self.server.submit(request)
        except UserError:
            self.messages.pop()
            raise
        shown = ""
        ended = ""
        tokens = len(prompt)
        try:
            deltas = iter(handle)
            with announced("compiling"):
                first = next(deltas)
            for delta in itertools.chain([first], deltas):
                ended = delta.ending.result.finish_reason if delta.ending else ""
                shown += delta.text
                tokens += len(delta.token_ids)
                for part, depth in delta.parts:
                    sys.stdout.write(coloured(part, depth) if self.show_drafts else part)
                sys.stdout.flush()
        except KeyboardInterrupt:
            handle.cancel()
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
        self.compile_ahead(tokens)
        return shown

    def compile_ahead(self, tokens: int) -> None:
        """Compile the programs of the next two turns while the user types.

        Args:
          tokens: those of the conversation so far.
        """
        turn = TURN_TOKENS + self.options.max_new_tokens
        context = self.model.config.max_position
        if min(tokens + turn, context) <= self._compiled:
            return
        self._compiled = min(tokens + 2 * turn, context)
        rule = "auto" if self.acceptance in ("greedy", "sampled") else self.acceptance
        self.server.warm_up(self._compiled, [(True, rule)], wait=False)

    def fitting_prompt(self) -> list[int]:
        """Ids of the conversation, its oldest turns left out where it fills the context.

        A quarter of the context, or as much as was asked for, is kept for the reply.
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
