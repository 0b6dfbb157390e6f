"""`decode.py --chat` without a prompt: a conversation at the terminal."""

import sys
from typing import Any

from medusa_jax.api import Model, Options
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.interop.chat import encode_prompt, template_source

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it; Ctrl-C stops a reply"


class Chat:
    """Turns of user and assistant, rendered by a chat template before every reply.

    Attributes:
      messages: the conversation so far, a stopped reply as far as it was shown.
    """

    def __init__(
        self, model: Model, options: Options, template: str, engine_options: dict[str, Any]
    ) -> None:
        template_source(model.tokenizer, template)  # refuse at once if there is none
        self.model = model
        self.options = options
        self.template = template
        self.engine_options = engine_options
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
            with announced("compiling"):
                self.model.compile([prompt], self.options, **self.engine_options)
        except (UserError, KeyboardInterrupt) as error:
            self.messages.pop()
            if isinstance(error, UserError):
                raise
            inform("(stopped)")
            return ""
        shown = ""
        ended = ""
        try:
            for pieces, results in self.model.stream(
                [prompt], self.options, **self.engine_options
            ):
                ended = results[0].finish_reason if results else ""
                for piece in pieces:
                    shown += piece.text
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
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
