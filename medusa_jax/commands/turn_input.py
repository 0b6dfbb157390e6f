"""Turns that a user types: line editing and history at a terminal, a line a turn from a file or pipe."""

import contextlib
import os
import select
import sys
from pathlib import Path
from types import ModuleType

from medusa_jax.cache_directories import cache_directory

# Lines of history that are kept.
KEPT_LINES = 1000
# Seconds within which the next line of a paste arrives; typing is slower.
PASTED = 0.05


class TurnInput:
    """Reads one turn after the other.

    A paste of several lines is one turn: terminals mark what is pasted (bracketed paste), and lines that
    come at once belong together where they do not.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._editor: ModuleType | None = None
        self._history = Path(cache_directory("chat")) / "history"
        if self._terminal:
            self._edit_lines()

    def read(self) -> str:
        """The next turn, without blanks around it.

        Raises:
          EOFError: there is none.
        """
        if sys.stdin.isatty() and not self._terminal:
            print("> ", end="", file=sys.stderr, flush=True)  # stdout is a file's
        lines = [input("> " if self._terminal else "")]
        while self._terminal and select.select([sys.stdin], [], [], PASTED)[0]:
            lines.append(input())
        text = "\n".join(lines).lstrip("\ufeff").strip()
        self._remember(text)
        return text

    def _edit_lines(self) -> None:
        """Have `input` edit lines and know those of earlier chats."""
        try:
            import readline
        except ImportError:  # not on every platform
            return
        self._editor = readline
        readline.set_auto_history(False)  # a turn is remembered whole
        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
        with contextlib.suppress(OSError):
            readline.read_history_file(self._history)
        readline.set_history_length(KEPT_LINES)

    def _remember(self, text: str) -> None:
        """Add a turn to the history, in a file that is this user's alone."""
        editor = self._editor
        if not text or editor is None:
            return
        if text == editor.get_history_item(editor.get_current_history_length()):
            return  # the same turn again
        editor.add_history(text)
        with contextlib.suppress(OSError, AttributeError):  # no home, no such function
            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_APPEND, 0o600))
            editor.append_history_file(1, self._history)
