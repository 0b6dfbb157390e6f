"""`decode.py --chat` without a prompt: a conversation at the terminal."""

import itertools
import sys

from medusa_jax.api import Options
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.interop.chat import encode_prompt, template_source
from medusa_jax.serving import Request, Server

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it; Ctrl-C stops a reply"


class Chat:
    """Turns of user and assistant, rendered by a chat template before every reply.

    A server of one slot keeps what the turns before came to: only what is new is read.

    Attributes:
      messages: the conversation so far, a stopped reply as far as it was shown.
    """

    def __init__(
        self, server: Server, options: Options, template: str, acceptance: str
    ) -> None:
        self.server, self.model = server, server.model
        template_source(self.model.tokenizer, template)  # refuse at once if there is none
        self.options = options
        self.template = template
        self.acceptance = acceptance
        self.messages: list[dict[str, str]] = []

    def run(self) -> int:
        """Read, reply, repeat; returns the exit status."""
        inform(HELP)
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                inform("")
                return 0
            except KeyboardInterrupt:
                inform(f"\n({HELP})")
                continue
            if text == "/exit":
                return 0
            if text == "/reset":
                self.messages = []
            elif text:
                try:
                    self.reply(text)
                except UserError as error:  # the conversation goes on without this turn
                    inform(f"error: {error}")

    def reply(self, text: str) -> str:
        """Answer one user turn; Ctrl-C ends the answer, not the chat.

        Raises:
          UserError: the turn alone is too long for the context; it is taken back.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self.fitting_prompt()
            request = Request(prompt, self.options, acceptance=self.acceptance)
            handle = self.server.submit(request)
        except UserError:
            self.messages.pop()
            raise
        shown = ""
        ended = ""
        try:
            deltas = iter(handle)
            with announced("compiling"):
                first = next(deltas)
            for delta in itertools.chain([first], deltas):
                ended = delta.ending.result.finish_reason if delta.ending else ""
                shown += delta.text
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            handle.cancel()
            inform("\n(stopped)")
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()
            if ended == "context":
                inform("(the context is full)")
        self.messages.append({"role": "assistant", "content": shown})
        return shown

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
