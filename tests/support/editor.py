"""Vim with the plugin llama.vim in a terminal of its own, typing; and what the plugin sends meanwhile.

`python tests/support/editor.py PLUGIN OUT.json` records the fixture `tests/serving/llama_vim.json`.
"""

import contextlib
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

# A vim that reads nothing of its user's; g:llama_config must come before the plugin.
VIMRC = """
set nocompatible noloadplugins noswapfile encoding=utf-8 shortmess+=I
let g:llama_config = {config}
set runtimepath+={plugin}
silent runtime plugin/llama.vim
"""
ESCAPE, TAB = "\x1b", "\t"


class Editor:
    """Vim, with one file open.

    Args:
      folder: for its settings.
      plugin: directory of llama.vim.
      config: fields of g:llama_config.
    """

    def __init__(self, folder, file, plugin, **config):
        vimrc = Path(folder) / "vimrc"
        vimrc.write_text(VIMRC.format(config=json.dumps(config), plugin=plugin))
        command = ["vim", "-N", "-u", str(vimrc), "-i", "NONE", file.name]
        self._terminal, inner = pty.openpty()
        kept = {
            name: os.environ[name]
            for name in ("PATH", "LD_LIBRARY_PATH")
            if name in os.environ
        }
        env = {**kept, "TERM": "xterm", "HOME": str(folder), "LANG": "C.UTF-8"}
        self._vim = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=env,
            cwd=file.parent,
            start_new_session=True,
        )
        os.close(inner)
        self.screen = b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with contextlib.suppress(OSError):
            while part := os.read(self._terminal, 65536):
                self.screen += part

    def type(self, text, pause=0.0):
        """Press the keys of a text one by one."""
        for key in text:
            os.write(self._terminal, key.encode())
            time.sleep(pause)

    def close(self, seconds=30):
        """Write the file and leave."""
        self.type(f"{ESCAPE}:wq\r")
        try:
            return self._vim.wait(seconds)
        finally:
            self._vim.kill()
            self._vim.wait()
            os.close(self._terminal)


# The file that the fixture was typed in, the lines after the cursor, and the keys.
BEFORE = '''"""A shelf of books, kept in order."""

from dataclasses import dataclass, field


@dataclass
class Book:
    """A book with its title, its author and the year that it appeared in."""

    title: str
    author: str
    year: int = 1900

    def label(self) -> str:
        return f"{self.author}: {self.title} ({self.year})"

    def is_older_than(self, other: "Book") -> bool:
        return self.year < other.year


@dataclass
class Shelf:
    """Books that stand next to each other.

    Attributes:
      books: from left to right.
      width: most books that fit.
    """

    books: list[Book] = field(default_factory=list)
    width: int = 40

    def put(self, book: Book) -> None:
        if len(self.books) == self.width:
            raise ValueError(f"no room for {book.label()} on this shelf")
        self.books.append(book)

    def take(self, title: str) -> Book:
        for number, book in enumerate(self.books):
            if book.title == title:
                return self.books.pop(number)
        raise KeyError(f"there is no {title!r} on this shelf")

    def sort(self) -> None:
        self.books.sort(key=lambda book: (book.author, book.year))


def main() -> None:
    shelf = Shelf()
'''
AFTER = "\n\nmain()\n"
TYPED = """\
shelf.put(Book("Emma", "Austen", 1815))
    shelf.put(Book("Ulysses", "Joyce", 1922))
    shelf.sort()
    for book in shelf.books:
        print(book.label())
    shelf.take("Emma")
    assert len(shelf.books) == 1, "one is left"
    print(f"{len(shelf.books)} of {shelf.width} places")
    oldest = min(shelf.books, key=lambda book: book.year)
    print(oldest.label())
"""


class JsonHandler(BaseHTTPRequestHandler):
    """Answers a POST of JSON with `answer`."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = json.dumps(self.answer(body)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


class Recorder(JsonHandler):
    """Answers /infill like a model that guesses every third time, and keeps what was asked."""

    asked: ClassVar[list] = []

    def answer(self, body):
        self.asked.append(body)
        guess = "label()" if len(self.asked) % 3 == 0 else ""
        return {"content": guess if body["n_predict"] else ""}


def differences(bodies):
    """Each body as its fields that differ from the body before; None for those that are gone."""
    last = {}
    for body in bodies:
        gone = dict.fromkeys(last.keys() - body.keys())
        yield gone | {name: x for name, x in body.items() if last.get(name, ...) != x}
        last = body


def recorded(path):
    """The bodies of a recording."""
    bodies = [{}]
    for changed in json.loads(Path(path).read_text()):
        bodies.append(bodies[-1] | changed)
    return bodies[1:]


def main(plugin, out):
    """Record what llama.vim sends while the text above is typed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shelf.py"
        file.write_text(BEFORE + AFTER)
        url = f"http://127.0.0.1:{server.server_port}/infill"
        editor = Editor(folder, file, plugin, endpoint_fim=url, show_info=0)
        time.sleep(2)
        line = BEFORE.count("\n")
        editor.type(f":w\r:{line}\r")
        time.sleep(3)  # a chunk of the file is sent ahead
        editor.type("o    ", 0.5)
        editor.type(TYPED, 0.3)
        editor.close()
    rows = [json.dumps(row, ensure_ascii=False) for row in differences(Recorder.asked)]
    Path(out).write_text("[\n" + ",\n".join(rows) + "\n]\n")
    print(len(rows), "requests")


if __name__ == "__main__":
    main(*sys.argv[1:])
