"""`python -m research clients`: what load does to drafts, measured.

Clients in a closed loop on this package's HTTP server, with each size of the tree alone and with the ladder that
chooses (`serving/ladder.py`), and on llama.cpp's. In each round all answer the same prompts, in an order that is drawn,
so that ratios within a round count: a machine changes its pace from second to second.
"""

import dataclasses
import http.client
import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from medusa_jax.api import Model, Options
from medusa_jax.commands.flags import CommandLine, at_least, flag, numbers
from medusa_jax.commands.model_flags import BaseFlags, load_model
from medusa_jax.console import inform
from medusa_jax.evaluate.prompt_files import read_prompts, record_prompts
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.kept_programs import use_compilation_cache
from medusa_jax.learning.learner import Learner
from medusa_jax.serving import Server
from medusa_jax.serving.http import Limits, make_app, make_listener
from medusa_jax.serving.job import BASE, Group
from medusa_jax.serving.ladder import Ladder
from medusa_jax.serving.programs import Programs
from medusa_jax.serving.server import row_sizes
from research.against import processors
from research.peers import Setting, xllamacpp
from research.peers.float32 import gguf_file

# SLOTS: requests answered at a time. NEW: least and most new tokens. PROMPT: most tokens of a prompt.
SLOTS, NEW, PROMPT = 8, (64, 96), 160
COLUMNS = "clients", "drafts", "tokens/s", "first token", "ladder over it", "quartiles", "rounds"  # fmt: skip

# A prompt and its limit.
Call = tuple[list[int], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(BaseFlags):
    """What load does to drafts, measured."""

    prompts: str = flag("questions, as for bench", "mt_bench.jsonl")
    clients: tuple[int, ...] = flag("numbers", (1, 2, 4, 8, 16), type=numbers(least=1))
    sizes: tuple[int, ...] = flag("nodes; 1 is plain", (1, 2, 4, 8), type=numbers(least=1))
    peers: tuple[str, ...] = flag("llama.cpp's drafts: NONE, NGRAM_SIMPLE, ...", ())
    seconds: float = flag("of all rounds", 60.0, type=at_least(0, float))


@dataclasses.dataclass(frozen=True)
class Contender:
    """A server at a port: this package's with a ladder, or llama.cpp's, which ends with its object."""

    url: str
    ladder: Ladder | None = None
    peer: Any = None

    def answer(self, call: Call) -> Iterator[int]:
        """The numbers of tokens of an answer's pieces, as they arrive."""
        body = {"prompt": call[0], "temperature": 0, "ignore_eos": True, "stream": True}
        path, body["max_tokens"] = "/v1/completions", call[1]
        if not self.ladder:
            path, body["return_tokens"] = "/completion", True
        link = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=600)
        link.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = link.getresponse()
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                known = event.get("choices", [{}])[0].get("medusa", {})
                yield known["tokens"] if known else len(event["tokens"])
        link.close()

    def speed(self, calls: list[Call], clients: int) -> tuple[float, list[float]]:
        """Tokens per second of clients that ask these calls, and the seconds until each first token."""

        def ask(call: Call) -> tuple[int, float]:
            total, asked, first = 0, time.perf_counter(), 0.0
            for tokens in self.answer(call):
                first = first or time.perf_counter() - asked
                total += tokens
            return total, first

        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            tokens, firsts = zip(*pool.map(ask, calls))
        return sum(tokens) / (time.perf_counter() - began), list(firsts)


def contenders(flags: Flags, server: Server, url: str) -> dict[str, Contender]:
    """All contenders by name, the ladder first."""
    found = {"ladder": Contender(url, ladder_of(server))}
    for n in flags.sizes:
        found["plain" if n == 1 else f"{n} nodes"] = Contender(url, ladder_of(server, n))
    setting = Setting(flags.model, NEW[1], PROMPT + NEW[1], processors(), 0, 1.0)
    for drafts in flags.peers:
        path = gguf_file(flags.model)
        peer = xllamacpp.server_of(path, setting, drafts, SLOTS)
        found[f"llama.cpp, {drafts}"] = Contender(peer.listening_address, peer=peer)
    return found


def ladder_of(server: Server, nodes: int = 0) -> Ladder:
    """A new ladder for a server's sizes; it always takes this one unless it is 0."""
    sizes = server._scheduler._batch.engines.sizes
    made = Ladder(sizes, server.model.trees.tokens(sizes))
    if nodes:
        made.choose = lambda *_: (nodes, nodes)  # type: ignore[method-assign]
    return made


def measure(
    found: dict[str, Contender], server: Server, calls: list[Call], n: int, seconds: float
) -> list[list[str]]:
    """The table's rows for n clients."""
    scheduler, rng = server._scheduler, random.Random(0)
    runs = {name: list[tuple[float, list[float]]]() for name in found}
    began, per_round = time.monotonic(), max(4, 2 * min(n, SLOTS))
    names = ["ladder"]  # at first alone: a server that has run for a while
    while not runs["plain"] or time.monotonic() - began < seconds:
        for name in names:
            scheduler._jobs.crop(0, 0)  # no prompt is in a cache
            scheduler._chunks._ladder = found[name].ladder or scheduler._chunks._ladder
            runs[name].append(found[name].speed(calls[:per_round], n))
        calls = [*calls[per_round:], *calls[:per_round]]
        names = rng.sample(list(found), len(found))
    del runs["ladder"][0]
    speeds = {name: np.array([speed for speed, _ in runs[name]]) for name in found}
    rows = []
    for name, speed_R in speeds.items():
        low, middle, high = np.quantile(speeds["ladder"] / speed_R, (0.25, 0.5, 0.75))
        first = np.median([first for _, firsts in runs[name] for first in firsts])
        cells = f"{np.median(speed_R):.0f}", f"{1e3 * first:.0f} ms", f"{middle:.2f}"
        rows.append([f"{n}", name, *cells, f"{low:.2f}, {high:.2f}", f"{len(speed_R)}"])
    return rows


def run(flags: Flags) -> int:
    """Print the table."""
    use_compilation_cache()
    model = load_model(flags, tree="auto")
    _, texts, _ = record_prompts(model, read_prompts(flags.prompts), Options())
    rng, prompts = random.Random(0), [model.encode(text) for text in texts]
    calls = [(ids, rng.randint(*NEW)) for ids in prompts if len(ids) <= PROMPT]
    with served(model, SLOTS, NEW[1], PROMPT) as (server, url):
        found = contenders(flags, server, url)
        for n in flags.clients:
            rows = measure(found, server, calls, n, flags.seconds / len(flags.clients))
            inform("\n" + markdown_table(COLUMNS, rows))
    return 0


@contextmanager
def served(
    model: Model, slots: int, new: int, prompt: int, learner: Learner | None = None
) -> Iterator[tuple[Server, str]]:
    """A warm HTTP server of a model and its address, for this many tokens of a text and of its prompt."""
    with Server(model, slots=slots, max_new_tokens=new, learner=learner) as server:
        server.warm_up(prompt + new, [BASE, Group(drafts=False)])
        cache_sizes = server._scheduler.slot_sizes(prompt + new)
        nodes = [tree.n_nodes for tree in server._scheduler._batch.engines.sizes[1:]]
        sized = itertools.product([BASE], row_sizes(slots), cache_sizes, nodes)
        server._compiler.plan(itertools.starmap(Programs, sized))
        server._compiler.wait()
        listener = socket.create_server(("127.0.0.1", 0))
        port = make_listener(make_app(server, name="model", template="plain"), Limits())
        threading.Thread(target=port.run, args=([listener],), daemon=True).start()
        yield server, "http://{}:{}".format(*listener.getsockname())
        port.should_exit = True


main = CommandLine("python -m research clients", Flags, run)
