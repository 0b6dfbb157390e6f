"""A peer with its package in a separate folder: versions of one package, which cannot share a process."""

import importlib
import multiprocessing
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from medusa_jax.errors import UserError
from medusa_jax.evaluate.race import Contender, Run
from research.peers import Setting


def contenders(peer: str, folder: str, setting: Setting) -> list[Contender]:
    """The contenders of `research.peers.{peer}` in a process that imports its package from `folder`.

    The process ends with this one.

    Raises:
      UserError: the peer's own error, or the last line of any other. Decoding raises the same.
    """
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    arguments = peer, folder, setting, child
    context.Process(target=_serve, args=arguments, daemon=True).start()
    child.close()  # else the end of that process would not be seen

    def received() -> Any:
        try:
            answer = parent.recv()
        except EOFError:
            raise UserError(f"{peer} in {folder} ended without an answer") from None
        if isinstance(answer, UserError):
            raise answer
        return answer

    def decode(number: int, prompt: Sequence[int]) -> Run:
        parent.send((number, prompt))
        run: Run = received()
        return run

    return [
        Contender(label, partial(decode, number), weights, facts)
        for number, (label, weights, facts) in enumerate(received())
    ]


def _serve(peer: str, folder: str, setting: Setting, pipe: Connection) -> None:
    sys.path.insert(0, folder)
    try:
        engines = importlib.import_module(f"research.peers.{peer}").contenders(setting)
        pipe.send([(c.label, c.weights, c.facts) for c in engines])
        while True:
            number, prompt = pipe.recv()
            pipe.send(engines[number].decode(prompt))
    except EOFError:  # the comparison has ended
        return
    except UserError as error:
        pipe.send(error)
    except Exception as error:
        reason = str(error).strip().splitlines()[-1:] or [repr(error)]
        pipe.send(UserError(f"{peer} in {folder} failed: {reason[0]}"))
