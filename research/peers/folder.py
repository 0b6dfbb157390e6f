"""A peer with its package in a separate folder: versions of one package, which cannot share a process."""

import importlib
import multiprocessing
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from medusa_jax.errors import UserError
from medusa_jax.evaluate.race import Contender, Run
from research.peers import Setting


def contenders(peer: str, folder: str, setting: Setting) -> list[Contender]:
    """The contenders of `research.peers.{peer}` in a process that imports its package from `folder`.

    The process ends with this one.

    Raises:
      UserError: the peer's own.
    """
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    arguments = peer, folder, setting, child
    context.Process(target=_serve, args=arguments, daemon=True).start()
    rows = parent.recv()
    if isinstance(rows, UserError):
        raise rows

    def decode(number: int, prompt: Sequence[int]) -> Run:
        parent.send((number, prompt))
        run: Run = parent.recv()
        return run

    return [
        Contender(label, partial(decode, number), weights, facts)
        for number, (label, weights, facts) in enumerate(rows)
    ]


def _serve(peer: str, folder: str, setting: Setting, pipe: Connection) -> None:
    sys.path.insert(0, folder)
    try:
        engines = importlib.import_module(f"research.peers.{peer}").contenders(setting)
    except UserError as error:
        return pipe.send(error)
    pipe.send([(c.label, c.weights, c.facts) for c in engines])
    with suppress(EOFError):  # the comparison has ended
        while True:
            number, prompt = pipe.recv()
            pipe.send(engines[number].decode(prompt))
