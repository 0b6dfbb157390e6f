"""Train an adapter of the draft heads on a model's answers while it is idle."""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from medusa_jax.api import Model
from medusa_jax.console import log
from medusa_jax.errors import UserError, first_line
from medusa_jax.evaluate.texts import Text
from medusa_jax.hosts import locked
from medusa_jax.learning import adapter_file
from medusa_jax.learning.adapter import REHEARSED, STEPS, WINDOWS, Adapter
from medusa_jax.learning.windows import WIDTH, Window, ranks_in, windows_of
from medusa_jax.tree.growth import TextRanks, replayed_tokens

# Most answers that wait to be read, most tokens of a prompt and of an answer, most bytes of hidden states.
ANSWERS, TOKENS, BYTES = 256, 512, 2**27
# One in this many answers is held out. After this many answers the adapter is tested on the newest windows of those.
HELD_OUT, TEST_EVERY, LEAST_HELD, MOST_HELD = 10, 5, 2, 32
# Seconds between looks at whether a request runs, and after an answer, since the next one may follow at once.
PAUSE = 0.1


class Learner:
    """Learns from a model's answers, and lets it draft with what helps.

    Args:
      directory: of the file with what was learned.

    Attributes:
      adapter: of the draft heads.
      facts: number of answers seen and of steps taken, at earlier starts too; mean accepted lengths on held-out
        answers before and after learning, 0 if unknown. The model drafts with the adapter while it is better.

    Raises:
      UserError: the drafter has no heads to learn, the file is of other heads or cannot be written, or another
        process learns in this directory.
    """

    def __init__(self, model: Model, directory: str) -> None:
        if model.heads_files is None or model.mesh.size > 1:
            raise UserError(
                "--learn is for trained draft heads on one device: give their --drafter, and no --mesh"
            )
        self._locked = ExitStack()
        self._locked.enter_context(locked(directory))
        self._model, self.adapter = model, Adapter(model)
        self._file = Path(directory) / "adapter.safetensors"
        self._mark = adapter_file.mark_of(model.fingerprint, self.adapter.heads)
        width = model.config.d_model * (1 + len(model.drafter.taps))
        self._texts: deque[tuple[bool, Text]] = deque(maxlen=ANSWERS)
        most = 1 + BYTES // (2 * WIDTH * width)
        self._windows, self._rehearsal = (deque[Window](maxlen=most) for _ in range(2))
        self._held: deque[tuple[Window, TextRanks]] = deque(maxlen=MOST_HELD)
        self._due, self._untested = 0, TEST_EVERY
        self._draw = np.random.default_rng(0)
        self._news, self._closed, self._rest = threading.Event(), False, 0.0
        self._thread = threading.Thread()
        self.facts = dict.fromkeys(("answers", "steps", "before", "after"), 0.0)
        if self._file.exists():
            shapes = self.adapter.factors
            factors, facts = adapter_file.read(self._file, shapes, self._mark)
            self.facts |= facts
            self.adapter.begin(factors, int(self.facts["steps"]))
            self._use_if_better()
        else:  # or refuse now
            self._save()

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take an answer, to learn from it or to test with it."""
        before = list(prompt)[-TOKENS:]
        text = Text([*before, *answer[:TOKENS]], len(before))
        self.facts["answers"] += 1
        self._texts.append((self.facts["answers"] % HELD_OUT == 0, text))
        self._rest = time.monotonic() + PAUSE
        self._news.set()

    def start(self, idle: Callable[[], bool]) -> None:
        """Work in a thread, a unit at a time, while `idle` returns True."""
        self._thread = threading.Thread(target=self._run, args=(idle,), daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """End after the current unit of work, and save; False if that takes more than a second.

        A compilation cannot be interrupted; only the interpreter's exit waits for it.
        """
        self._closed = True
        self._news.set()
        if self._thread.ident:
            self._thread.join(1.0)
            atexit.register(self._thread.join)
        if ended := not self._thread.is_alive():
            self._locked.close()
        return ended

    def _run(self, idle: Callable[[], bool]) -> None:
        try:
            for worked in self.work():
                if not worked:
                    self._news.wait()
                    self._news.clear()
                while not (self._closed or (idle() and time.monotonic() > self._rest)):
                    time.sleep(PAUSE)
                if self._closed:
                    break
            self._save()
        except Exception as error:  # the model answers without it
            self._model.learned = {}
            log(f"warning: learning ended: {first_line(error)}")

    def work(self) -> Iterator[bool]:
        """Do a unit of work before each value, which is False if nothing is to be done."""
        while True:
            if self._due >= 1 and self._windows:
                yield from self._step()
            elif self._untested >= TEST_EVERY and len(self._held) >= LEAST_HELD:
                yield from self._test()
            elif self._texts:
                yield from self._read(*self._texts.popleft())
            else:
                yield False

    def _read(self, is_held_out: bool, text: Text) -> Iterator[bool]:
        windows = yield from windows_of(self._model, text)
        self._untested += 1
        if not is_held_out:
            self._windows += windows
            self._due += STEPS if windows else 0
            return
        for window in windows:
            ranks = ranks_in(self._model, self._model.variables["heads"], window)
            self._held.append((window, ranks))
            yield True

    def _step(self) -> Iterator[bool]:
        self._due -= 1
        for _ in range(min(REHEARSED, len(self.adapter.rehearsal))):
            text = self.adapter.rehearsal.pop()
            read = yield from windows_of(self._model, text)
            self._rehearsal += read
            for window in read:
                yield from self.adapter.remember(window)
        for windows in filter(None, (self._windows, self._rehearsal)):
            for at in self._draw.integers(len(windows), size=WINDOWS):
                yield from self.adapter.add(windows[at])
        self.adapter.step()
        self.facts["steps"] += 1

    def _test(self) -> Iterator[bool]:
        self._untested, adapted, ranks = 0, self.adapter.adapted_heads(), []
        held = list(self._held)
        for window, _ in held:
            ranks.append(ranks_in(self._model, adapted, window))
            yield True
        tree = self._model.drafter.default_tree
        self.facts["before"] = replayed_tokens([loaded for _, loaded in held], tree)
        self.facts["after"] = replayed_tokens(ranks, tree)
        self._use_if_better()
        self._save()

    def _save(self) -> None:
        factors, facts = self.adapter.factors, self.facts
        adapter_file.save(self._file, factors, facts, self._mark)

    def _use_if_better(self) -> None:
        is_better = self.facts["after"] > self.facts["before"]
        self._model.learned = {"heads": self.adapter.adapted_heads()} if is_better else {}
