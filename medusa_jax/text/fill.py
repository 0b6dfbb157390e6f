"""Prompts for filling in the middle: the text before and after a gap, as models of code are trained on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from medusa_jax.errors import UserError
from medusa_jax.text.fill_tokens import NEEDED
from medusa_jax.text.literal_text import literal_text
from medusa_jax.text.tokenizer import Tokenizer

# What llama.cpp's server writes for the names that a client does not send, and between files for models without
# tokens for them.
REPOSITORY, FILE, SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"
# Most tokens around a gap for which a client sends a whole window; three quarters before it.
WINDOW = 2048
# The text before a gap loses its beginning in steps of this part of the window, so that the prompt of the next
# keystroke begins equally and its cache can be used.
STEPS = 8
# Most characters per token that a text is assumed to have. Text too far from the gap by this is not tokenised: a megabyte
# takes seconds, some texts minutes.
CHARACTERS = 16


@dataclass(frozen=True)
class Gap:
    """The text before and after a gap."""

    prefix: str
    suffix: str


class Fill:
    """The tokens of a tokenizer for filling in the middle.

    Text is read as text, also where it spells one of these tokens or another special one.

    Attributes:
      ends: tokens that end a middle in addition to a text's own: padding, and those of another file.

    Raises:
      UserError: the tokenizer has no such tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = tokenizer.fill_texts
        if not texts:
            raise UserError(
                "this model cannot fill in a middle: its tokenizer has no tokens for it; use a model of code such "
                "as Qwen2.5-Coder, or complete a prompt"
            )
        ids: dict[str, Any] = {name: tokenizer.token_to_id(texts[name]) for name in texts}
        self._prefix, self._suffix, self._middle = (ids.pop(name) for name in NEEDED)
        self._repository, self._file = ids.get("repository_token"), ids.get("file_token")
        self.ends = frozenset(ids.values())
        self._literal = literal_text(tokenizer)
        self._start = tokenizer.prefix

    def prompt(self, gap: Gap) -> list[int]:
        """Return the prompt for a gap of one file, without a limit on its length."""
        prefix, suffix = self._ids(gap.prefix), self._ids(gap.suffix)
        return [*self._start, *self._around(prefix, suffix)]

    def editor_prompt(
        self, gap: Gap, line: str, files: Sequence[tuple[str, str]], room: int
    ) -> list[int]:
        """Return the prompt that llama.cpp's server makes of an editor's request.

        Other files come first, since they change least. The oldest of them are left out if there is not enough
        room, then the text farthest from the gap.

        Args:
          line: the beginning of the current line, after `gap.prefix`.
          files: names and texts of other files, the oldest first.
          room: most tokens of the prompt.
        """
        window = min(WINDOW, room // 2)
        most = CHARACTERS * window
        prefix = gap.prefix[max(0, len(gap.prefix) // most - 1) * most :]
        before, after, line_ids = map(self._ids, (prefix, gap.suffix[:most], line))
        excess, step = max(0, len(before) - 3 * (window // 4)), max(1, window // STEPS)
        before = before[-(-excess // step) * step :]
        after = after[: max(0, window // 4 - 2 - len(line_ids))]
        around = self._around([*before, *line_ids], after)
        own = self._named(FILE) if self._file is not None else []
        head = [*self._start]
        if self._repository is not None:
            head += [self._repository, *self._ids(REPOSITORY)]
        # The room for files does not depend on this text: else files would be left out as it grows, and the prompt
        # would begin differently.
        left = room - window - len(head) - len(own) - 3
        kept: list[list[int]] = []
        for name, text in reversed(files):
            if len(text) > CHARACTERS * room:
                break
            ids = [*self._named(f"{name}\n"), *self._ids(text)]
            left -= len(ids)
            if left < 0:
                break
            kept.insert(0, ids)
        return [*head, *(i for ids in kept for i in ids), *own, *around]

    def _named(self, name: str) -> list[int]:
        """Return the tokens before a file's text."""
        if self._file is None:
            return self._ids(SNIPPET)
        return [self._file, *self._ids(name)]

    def _around(self, before: list[int], after: list[int]) -> list[int]:
        return [self._prefix, *before, self._suffix, *after, self._middle]

    def _ids(self, text: str) -> list[int]:
        return self._literal.encode(text, add_bos=False) if text else []


@lru_cache(maxsize=4)
def fill_of(tokenizer: Tokenizer) -> Fill:
    """Return the cached `Fill` of a tokenizer."""
    return Fill(tokenizer)
