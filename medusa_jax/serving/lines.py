"""Text of an editor's completion: it ends at a line's end, by indentation or by time."""

import math
import re
import time
from collections.abc import Sequence
from typing import Any

from medusa_jax.api import StoppingText
from medusa_jax.serving.request import Lines

# A text without a whole line may take this many times its time, so that an editor has a line to show.
LATE = 2


class LineText(StoppingText):
    """`StoppingText` with llama.cpp's rules for completions; from the second line on, it shows whole lines."""

    def __init__(self, lines: Lines, *of_text: Any) -> None:
        super().__init__(*of_text)
        self._seconds, self._started_at = lines.seconds, math.inf
        self._unindented = re.compile(rf"\n(?![ \t]{{{lines.indent}}})[ \t]*[^ \t]")

    def take(
        self, tokens: Sequence[int], depths: Sequence[int], is_end: bool
    ) -> list[tuple[str, int]]:
        if is_end:
            self._seconds = math.inf  # the text has ended by itself
        self._started_at = min(self._started_at, time.perf_counter())
        return super().take(tokens, depths, is_end)

    def _ends(self) -> list[int]:
        shown, text = len(self.text), self.text + self._held
        # A line that is held back begins after the shown text.
        last_line, places = text.rfind("\n") + 1, []
        if found := self._unindented.search(text, max(0, shown - 1)):
            places.append(found.start() + 1)
        seconds = time.perf_counter() - self._started_at
        if seconds > self._seconds and last_line:
            places.append(last_line)
        elif seconds > LATE * self._seconds:
            places.append(len(text))
        stops, ends = super()._ends(), [place - shown for place in places]
        if min(ends, default=math.inf) < min(stops, default=math.inf):
            self.stop_reason = "length"
        return ends + stops

    def _beginning(self) -> int:
        text, held = self.text + self._held, super()._beginning()
        return max(held, len(text) - text.rfind("\n") - 1) if "\n" in text else held
