"""Decoding with the tree that is fastest in this process: chunks of steps, timed and chosen by `chooser`.

All sizes share one state, made for the largest tree. A chunk's time is the time between two moments at
which the host saw a result become ready; the device has the next chunk by then, so it never waits.
Programs of further sizes are compiled on a thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.decoding.chooser import Chooser, Chunk, Learned
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.decoding.state import DecodeState, Engine, Progress
from medusa_jax.devices.platforms import platform, program
from medusa_jax.heads.drafter import Drafter
from medusa_jax.heads.registry import no_drafter
from medusa_jax.model.cache import KVCache
from medusa_jax.sharding import Params, decode_shardings, pin_state
from medusa_jax.tree.tree import Tree


def follows_free(drafter: Drafter) -> bool:
    """Whether plain steps may keep the drafter's state: accepted tokens cost it no layers.

    A drafter with a cache of keys and values runs layers over every accepted token.
    """
    state = jax.eval_shape(lambda: drafter.start(1, 1, jnp.float32))
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, KVCache))
    return not any(isinstance(part, KVCache) for part in parts)


@dataclass(frozen=True)
class Sizes:
    """Engines that differ in their tree, and what this process has learned of them.

    Attributes:
      engine: with the largest tree; its state fits all sizes.
      trees: by number of nodes, each contained in the next, without the empty one.
      learned: shared by all requests.
      keep: called at the end of a request.
    """

    engine: Engine
    trees: Mapping[int, Tree]
    learned: Learned
    keep: Callable[[], None]

    @cached_property
    def by_size(self) -> dict[int, Engine]:
        """The engine of each size. Plain steps keep the drafter only if it follows at no cost."""
        drafter = self.engine.drafter
        if not self.learned.returns:
            drafter = no_drafter(self.engine.llama.config)
        plain = replace(self.engine, tree=Tree.none(), drafter=drafter)
        return {1: plain} | {n: replace(self.engine, tree=t) for n, t in self.trees.items()}

    def compile_first(self, variables: Params, state: DecodeState) -> DecodeState:
        """Compile the loops that a first request needs at this cache size. Consumes the state.

        Plain steps are among them unless their time is known, or a tree file promises that drafts pay.
        """
        first, learned = self.learned.first, self.learned
        known = learned.by_size[first].samples or learned.expected or first == 1
        for n in {first} if known else {first, 1}:
            shapes = shapes_of(state)
            state, _ = decode_loop(self.by_size[n], variables, state, np.int32(0))
            COMPILED.add(self.by_size[n], shapes)
        return state

    def adapting(
        self, variables: Params, most: int, steps_by_size: dict[int, int]
    ) -> "Adapting":
        """The runner of one request; arguments as of `Adapting`."""
        return Adapting(self, variables, most, steps_by_size)


class Run(NamedTuple):
    """A dispatched chunk.

    Attributes:
      progress: its result; of a copy only its readiness counts.
      alone: nothing else ran between the end of the chunk before it and its own.
    """

    chunk: Chunk | None
    progress: Progress | jax.Array
    alone: bool


class Adapting:
    """Runs the chunks of one request."""

    def __init__(
        self, sizes: Sizes, variables: Params, most: int, steps_by_size: dict[int, int]
    ) -> None:
        self.sizes, self.variables, self.most = sizes, variables, most
        self.chooser = Chooser(sizes.learned)
        self.steps_by_size = steps_by_size
        self._runs: deque[Run] = deque()
        self._seen: Progress | None = None
        self._stamp: float | None = None
        self._slots, self._ready = 0, set[int]()
        self._shapes: Shapes = ()

    def dispatch(self, state: DecodeState) -> tuple[DecodeState, Progress]:
        """Start the next chunk; consumes the state."""
        grown = state.cache.slots != self._slots
        if grown:
            self._slots, self._shapes = state.cache.slots, shapes_of(state)
            self._ready = set[int]()
        by_size, variables = self.sizes.by_size, self.variables
        if not COMPILED.busy:
            for n in self.chooser.wanted():
                if not self._is_compiled(n):
                    COMPILED.start(by_size[n], variables, state, self._shapes)
                    break
        alone = not (grown or COMPILED.busy)
        chunk = self.chooser.next(self._is_compiled, self.most)
        while chunk.apart:
            copy, copied_B = copied(by_size[1], state)
            self._runs.append(Run(None, copied_B, False))
            progress = decode_loop(by_size[1], variables, copy, np.int32(chunk.steps))[1]
            self._runs.append(Run(chunk, progress, alone))
            chunk = self.chooser.next(self._is_compiled, self.most)
        steps = np.int32(chunk.steps)
        state, progress = decode_loop(by_size[chunk.size], variables, state, steps)
        if not self._is_compiled(chunk.size):
            COMPILED.add(by_size[chunk.size], self._shapes)
            alone = False
        self._runs.append(Run(chunk, progress, alone))
        return state, progress

    def _is_compiled(self, n: int) -> bool:
        if n in self._ready:
            return True
        if COMPILED.ready(self.sizes.by_size[n], self._shapes):
            self._ready.add(n)
        return n in self._ready

    def see(self, progress: Progress) -> None:
        """Wait for a chunk's result, and report the chunks up to it."""
        if not any(run.progress is progress for run in self._runs):  # prefill's
            jax.block_until_ready(progress)
            self._stamp = now()
        else:
            while self._finish(self._runs.popleft()) is not progress:
                pass
        self._seen = progress

    def _finish(self, run: Run) -> object:
        late = _is_ready(run.progress)
        jax.block_until_ready(run.progress)
        end, before = now(), self._stamp
        self._stamp = None if late else end
        if run.chunk:
            alone = run.alone and before is not None and not late
            self._report(run, end - (before or 0) if alone else None)
        return run.progress

    def _report(self, run: Run, seconds: float | None) -> None:
        assert run.chunk is not None
        if run.chunk.apart:
            self.chooser.report(run.chunk, run.chunk.steps, 0, 0, seconds)
            return
        before, after = self._seen, run.progress
        steps_B = np.asarray(after.steps_B) - np.asarray(before.steps_B)  # type: ignore[union-attr]
        tokens_B = np.asarray(after.n_new_B) - np.asarray(before.n_new_B)  # type: ignore[union-attr]
        rounds, size = int(steps_B.max()), run.chunk.size
        self.steps_by_size[size] = self.steps_by_size.get(size, 0) + rounds
        self.chooser.report(
            run.chunk, rounds, int(steps_B.sum()), int(tokens_B.sum()), seconds
        )


def now() -> float:
    """Seconds; on a CPU those that this process has computed, which other processes lengthen little."""
    return time.process_time() if platform() == "cpu" else time.perf_counter()


def _is_ready(tree: object) -> bool:
    return all(x.is_ready() for x in jax.tree.leaves(tree))


@program(static_argnums=0)
def copied(engine: Engine, state: DecodeState) -> tuple[DecodeState, jax.Array]:
    """A copy of a state, to run steps that are dropped, and an array that is ready with it."""
    copy = pin_state(engine.llama.mesh, jax.tree.map(jnp.copy, state))
    return copy, jnp.copy(state.length_B)


Shapes = tuple[object, ...]


def shapes_of(state: DecodeState) -> Shapes:
    """Determines, with the engine, the program that a state needs."""
    leaves, kind = jax.tree.flatten(state)
    return kind, *((x.shape, x.dtype) for x in leaves)


class Compiled:
    """The compiled loops of this process; compiles one at a time on a thread."""

    def __init__(self) -> None:
        self._ready: set[tuple[Engine, Shapes]] = set()
        self._failed: set[tuple[Engine, Shapes]] = set()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether the thread compiles now, which slows decoding down."""
        return self._thread is not None and self._thread.is_alive()

    def ready(self, engine: Engine, shapes: Shapes) -> bool:
        return (engine, shapes) in self._ready

    def add(self, engine: Engine, shapes: Shapes) -> None:
        """Take note of a program that has run."""
        self._ready.add((engine, shapes))

    def start(
        self, engine: Engine, variables: Params, state: DecodeState, shapes: Shapes
    ) -> None:
        """Compile the loop for states like this one, unless another is being compiled."""
        key = engine, shapes
        if self.busy or key in self._ready or key in self._failed:
            return
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)

        def run() -> None:
            self._failed.add(key)
            with suppress(Exception):  # decoding goes on without this size
                compile_loop(engine, variables, like)
                self._ready.add(key)

        # No daemon: JAX aborts the process if Python ends while another thread calls it.
        self._thread = threading.Thread(target=run, name="compiling a tree")
        self._thread.start()


def compile_loop(engine: Engine, variables: Params, like: DecodeState) -> None:
    """Compile the loop for a state of these shapes, by no steps on zeros."""
    mesh = engine.llama.mesh
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    if mesh is not None:
        state = jax.device_put(state, decode_shardings(mesh, state))
    jax.block_until_ready(decode_loop(engine, variables, state, np.int32(0)))


COMPILED = Compiled()
