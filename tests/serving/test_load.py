"""Many clients at once: every answer that of a solo run, none lost, no slot leaked."""

import json
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import children
import clients
import pytest
from served import NAME, Port

import medusa_jax
from medusa_jax import Options
from medusa_jax.decoding import rows
from medusa_jax.decoding.step import decode_loop
from medusa_jax.serving import Server
from medusa_jax.serving.http import make_app

PROMPTS = ["in", "the cat and", "abcab, a hat.\n", "in the hat, the cat", "a", "hat " * 9]
CODE = [
    "def parse(",
    "import os\n",
    "class Stack:\n    def",
    "for i in range(",
    "a = [",
    "#",
]


def kinds(prompts, limits):
    """Calls that come again and again, so that few solo runs tell what all should say."""
    rng = random.Random(0)
    return [
        {
            "prompt": prompt,
            "max_tokens": rng.choice(limits),
            "temperature": rng.choice([0, 0, 0.8]),
            "seed": rng.randrange(99),
        }
        for prompt in prompts
        for _ in range(4)
    ]


def options_of(asked):
    return [
        Options(
            max_new_tokens=a["max_tokens"], temperature=a["temperature"], seed=a["seed"]
        )
        for a in asked
    ]


def expected_texts(model, asked):
    """Solo runs, by a batch of fixed rows (`tests/decoding/test_exactness.py`)."""
    prompts, ids = [a["prompt"] for a in asked], [0] * len(asked)
    results = model.generate(prompts, options_of(asked), ids, tree="none")
    return [result.text for result in results]


def test_some_clients_at_once(port):
    asked = kinds(PROMPTS, [1, 7, 30])
    expected = expected_texts(port.model, asked)
    done = clients.attack(port.url, 8, 60, asked, 0.005)
    assert len(done["answers"]) == 60
    assert all(text == expected[kind] for kind, text in done["answers"])
    assert len({kind for kind, _ in done["answers"]}) > 15


def test_nothing_is_compiled_in_steady_state(port):
    """Once warm, texts of any length, arrival and parameters run the same programs."""
    programs = (decode_loop, rows.begin_row, rows.read_row, rows.insert_row, rows.run_only)
    port.server.warm_up(95, [(True, "auto"), (False, "auto")])
    warm = [program._cache_size() for program in programs]
    asked = kinds(PROMPTS, [1, 3, 11, 25, 40])
    for fields in asked[::3]:
        fields["drafts"] = False
    clients.attack(port.url, 4, 40, asked, 0.0)
    assert [program._cache_size() for program in programs] == warm


@pytest.mark.slow
@pytest.mark.parametrize("n_clients", [8, 64])
def test_two_thousand_requests(n_clients, capsys):
    """On the demo; prints rates and latencies beside the static batch of the same size."""
    slots, calls = 8, 2000
    model, asked = medusa_jax.load(), kinds(CODE, [16, 64, 128])
    expected = expected_texts(model, asked)
    with Server(model, slots=slots, queue=16) as server:
        server.warm_up(256, [(True, "auto")])
        port = Port(server, make_app(server, name=NAME, template="plain"))
        apart(port.url, n_clients, 200, asked)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        done = apart(port.url, n_clients, calls, asked)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        port.wait_idle()
        port.close()
    wrong = sum(text != expected[kind] for kind, text in done["answers"])
    rate, static = done["tokens"] / done["seconds"], static_rate(model, asked, slots)
    with capsys.disabled():
        print(f"\n{n_clients} clients: {rate:.0f} tokens/s, static batches {static:.0f}")
        for name in ("first", "between"):
            cuts = statistics.quantiles(done[name], n=100)
            print(f"{name}: median {cuts[49] * 1e3:.1f} ms, p99 {cuts[98] * 1e3:.1f} ms")
        print(f"{grown / 1024:.1f} MiB more memory, {wrong} of {calls} answers differ")
    assert len(done["answers"]) == calls
    # In float32, passes of other sizes round differently, and a near tie may fall the other way.
    assert wrong <= calls // 100
    assert grown < 64 * 1024
    assert rate > 0.85 * static


def apart(url, n_clients, n_calls, asked):
    """`clients.attack` from a process of its own."""
    given = json.dumps([url, n_clients, n_calls, asked, 0.0])
    command = [sys.executable, str(Path(clients.__file__))]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, env=children.environment()
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def static_rate(model, asked, slots):
    """Tokens/s of whole batches of that size, one after the other, each to its end."""
    prompts, options = [a["prompt"] for a in asked], options_of(asked)
    for timed in (False, True):
        start, tokens = time.perf_counter(), 0
        for at in range(0, len(asked), slots):
            batch = prompts[at : at + slots], options[at : at + slots]
            tokens += sum(result.new_tokens for result in model.generate(*batch))
        if timed:
            return tokens / (time.perf_counter() - start)
