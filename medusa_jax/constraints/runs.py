"""The text that a grammar forces next, with blanks as the text so far has them: drafts that cost nothing.

JSON may have blanks between its parts, so little is forced in the strict sense. But a text repeats its form:

    {"name": "Ann",      forces     " "age": "      where one structural character can follow, or none but a value

The blanks are a guess, as all drafts are.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any

QUOTE, BACKSLASH, COLON, COMMA = b'"\\:,'
BLANK, OPEN, CLOSE = b" \t\r\n", b"{[", b"}]"
STRUCTURE, DIGITS = b'"{}[],:', b"0123456789"
# Most bytes of a run.
LONGEST = 96


class Layout:
    """Which blanks a JSON text has had so far.

    They are kept by depth and by the character before them; before a closing bracket, by the bracket.

    Attributes:
      last: the last byte, blanks outside of strings aside.
      in_string: whether the text ends within a string.
    """

    def __init__(self) -> None:
        self.last, self._blank, self._depth = 0, b"", 0
        self.in_string = self._escaped = False
        self._seen: dict[tuple[int, int], bytes] = {}

    def after(self, text: bytes) -> "Layout":
        """The layout of a longer text."""
        longer = copy(self)
        longer._seen = self._seen.copy()
        longer.read(text)
        return longer

    def read(self, text: bytes) -> None:
        """Read more of the text."""
        for byte in text:
            if self.in_string:
                self.in_string = self._escaped or byte != QUOTE
                self._escaped = byte == BACKSLASH and not self._escaped
            elif byte in BLANK:
                self._blank += bytes([byte])
                continue
            else:
                self._seen[self._place(byte)] = self._blank
                self._depth += (byte in OPEN) - (byte in CLOSE)
                self.in_string = byte == QUOTE
            self.last, self._blank = byte, b""

    def blanks_before(self, byte: int) -> bytes:
        """The rest of the blanks that this text is likely to have before a byte."""
        place = self._place(byte)
        blanks = self._seen.get(place, self._unseen(place))
        return blanks[len(self._blank) :] if blanks.startswith(self._blank) else b""

    def _place(self, byte: int) -> tuple[int, int]:
        place = CLOSE[0] if byte in CLOSE else OPEN[0] if self.last in OPEN else self.last
        return place, 0 if place == COLON else self._depth

    def _unseen(self, place: tuple[int, int]) -> bytes:
        """The blanks at a place that the text has not had yet."""
        last, depth = place
        first = self._seen.get((OPEN[0], depth), b"")
        if last == CLOSE[0] and b"\n" in first:
            return self._seen.get((OPEN[0], depth - 1), b"\n")
        if last == COMMA and b"\n" in first:
            return first
        if last == OPEN[0] and self._blank:  # a token often has the last blank
            return self._blank + b" "
        return b" " if last in (COLON, COMMA) else b""


def forced(matcher: Any, layout: Layout, byte_ids: Mapping[int, int]) -> bytes:
    """Return the bytes that must follow a text, blanks aside.

    Args:
      matcher: llguidance's.
      layout: the layout of its text.
      byte_ids: tokens of one byte.
    """
    run = b""
    while len(run) < LONGEST:
        part = matcher.compute_ff_bytes()[:LONGEST]
        if not part:
            nexts = [
                byte
                for byte in STRUCTURE
                if byte in byte_ids and matcher.validate_tokens([byte_ids[byte]])
            ]
            if len(nexts) == 1:
                part = layout.blanks_before(nexts[0]) + bytes(nexts)
            elif not nexts and layout.last == COLON:
                part = layout.blanks_before(0)
        ids = [byte_ids[byte] for byte in part if byte in byte_ids]
        if not ids:
            break
        if not run:
            matcher = matcher.deep_copy()
        n = matcher.try_consume_tokens(ids)
        run += part[:n]
        if n < len(part):
            break
        layout = layout.after(part)
    return run
