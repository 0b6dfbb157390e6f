"""Text of an editor's completion: it ends at a line's end, by indentation or by time."""

import math
import re
import time
from collections.abc import Collection, Sequence

from medusa_jax.api import StoppingText
from medusa_jax.serving.request import Lines
from medusa_jax.text.tokenizer import Tokenizer

# A text without a whole line may take this many times its time, so that an editor has a line to show.
PATIENCE = 2


class LineText(StoppingText):
    """`StoppingText` with llama.cpp's rules for completions; from the second line on, it shows whole lines.

    Args:
      lines: the rules.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        stop_ids: Collection[int],
        least: int,
        lines: Lines,
    ) -> None:
        super().__init__(tokenizer, stop, stop_ids, least)
        self._lines = lines
        self._unindented = re.compile(rf"\n(?![ \t]{{{lines.indent}}})[ \t]*[^ \t]")
        self._until: float | None = None

    def take(
        self, tokens: Sequence[int], depths: Sequence[int], is_end: bool
    ) -> list[tuple[str, int]]:
        if is_end:
            self._until = math.inf  # the text has ended by itself
        elif self._until is None:
            self._until = time.perf_counter() + self._lines.seconds
        return super().take(tokens, depths, is_end)

    def _ends(self) -> list[int]:
        # A line that is held back begins after the shown text.
        shown, text = len(self.text), self.text + self._held
        after = text.rfind("\n") + 1
        ends = []
        if found := self._unindented.search(text, max(0, shown - 1)):
            ends.append(found.start() + 1)
        late = time.perf_counter() - (math.inf if self._until is None else self._until)
        if late > 0 and after:
            ends.append(after)
        elif late > (PATIENCE - 1) * self._lines.seconds:
            ends.append(len(text))
        ends = [max(0, end - shown) for end in ends]
        stops = super()._ends()
        if min(ends, default=math.inf) < min(stops, default=math.inf):
            self.stop_reason = "length"
        return ends + stops

    def _beginning(self) -> int:
        text, held = self.text + self._held, super()._beginning()
        last_line = len(text) - text.rfind("\n") - 1
        return max(held, last_line) if "\n" in text else held
