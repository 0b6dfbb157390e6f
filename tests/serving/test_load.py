"""Many clients at once: every answer that of a solo run, none lost, no slot leaked."""

import gc
import json
import random
import resource
import sys
from pathlib import Path

import children
import clients
import jax
import pytest
from live import compilations
from served import TREE, listening
from tiny import write_model

import medusa_jax
from medusa_jax import Options, Tree
from medusa_jax.serving import Server
from medusa_jax.serving.job import BASE, Group, Job

PROMPTS = ["in", "the cat and", "abcab, a hat.\n", "in the hat, the cat", "a", "hat " * 9]
# As many rows as a static batch has; calls of the long run; rounds of a comparison, calls of each.
SLOTS = 8
CALLS = 2000


def kinds(prompts, limits):
    """Calls that come again and again, so that few solo runs tell what all should say."""
    rng = random.Random(0)

    def call(prompt):
        limit, temperature = rng.choice(limits), rng.choice([0, 0, 0.8])
        drawn = {"temperature": temperature, "seed": rng.randrange(99)}
        return {"prompt": prompt, "max_tokens": limit} | drawn

    return [call(prompt) for prompt in prompts for _ in range(4)]


def expected_texts(model, asked):
    """Solo runs, by a batch of fixed rows (`tests/decoding/test_exactness.py`)."""
    prompts, ids = [a["prompt"] for a in asked], [0] * len(asked)
    options = [Options(a["max_tokens"], a["temperature"], seed=a["seed"]) for a in asked]
    results = model.generate(prompts, options, ids, tree="none")
    return [result.text for result in results]


def test_some_clients_at_once(port):
    asked = kinds(PROMPTS, [1, 7, 30])
    expected = expected_texts(port.model, asked)
    done = clients.attack(port.url, 8, 60, asked, 0.005)
    assert len(done["answers"]) == 60
    assert all(text == expected[kind] for kind, text in done["answers"])
    assert len({kind for kind, _ in done["answers"]}) > 15


@pytest.mark.wide
def test_nothing_is_compiled_in_steady_state(port):
    """Once warm, texts of any length, arrival and parameters run the same programs.

    A new server: those of an older one may have been dropped after another module's tests.
    """
    asked = kinds(PROMPTS, [1, 3, 11, 25, 40])
    for fields in asked[::3]:
        fields["drafts"] = False
    with Server(port.model, slots=3, trees={3: TREE}) as server, listening(server) as own:
        server.warm_up(95, [BASE, Group(False)])
        with compilations() as compiled:
            clients.attack(own.url, 4, 40, asked, 0.0)
    assert compiled == []


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("n_clients", [8, 64])
def test_two_thousand_requests(n_clients, tmp_path, capsys):
    """In float64, where texts are equal without exception; with drafts and without, at any time."""
    write_model(tmp_path, max_position=300)
    files = str(tmp_path), str(tmp_path / "heads")
    model = medusa_jax.load(*files, tree=TREE, dtype="float64")
    asked = kinds([*PROMPTS, "the cat and in the hat, " * 8], [2, 20, 90])
    for fields in asked[::3]:
        fields["drafts"] = False
    expected = expected_texts(model, asked)
    trees = {2: TREE, SLOTS: Tree.chain(2)}
    with Server(model, slots=SLOTS, trees=trees) as server, listening(server) as port:
        port.server.warm_up(model.config.max_position, [BASE, Group(False)])
        apart(port.url, n_clients, 300, asked, 0.05)
        port.wait_idle()
        before, memory = alive(), resident()
        done = apart(port.url, n_clients, CALLS, asked, 0.05)
        port.wait_idle()
        grown, after = resident() - memory, alive()  # which takes memory itself
    wrong = sum(text != expected[kind] for kind, text in done["answers"])
    with capsys.disabled():
        print(
            f"\n{n_clients} clients, {len(done['answers'])} answers of {CALLS}, {wrong} differ "
            f"from their solo runs, {done['tokens']} tokens, {grown / 2**20:.1f} MiB more memory"
        )
    assert len(done["answers"]) == CALLS and not wrong
    assert after == before
    assert grown < 16 * 2**20


def alive():
    """How many requests and device arrays are still held."""
    gc.collect()
    jobs = sum(isinstance(thing, Job) for thing in gc.get_objects())
    return jobs, len(jax.live_arrays())


def resident():
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def apart(url, n_clients, n_calls, asked, pause):
    """`clients.attack` from a separate process."""
    given = json.dumps([url, n_clients, n_calls, asked, pause])
    command = (sys.executable, clients.__file__)
    return json.loads(children.output_of(command=command, stdin=given))
