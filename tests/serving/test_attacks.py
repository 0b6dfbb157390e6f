"""Expensive calls: the worst wait of all other clients is printed, and bounded."""

import contextlib
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from served import QUEUE, listening

import medusa_jax
from medusa_jax.serving import Server

MEGABYTE = 1_000_000  # with the rest of its call just below the limit
WORST = 0.5


@contextlib.contextmanager
def victim(port):
    """A client that streams plain answers all the time; the list of seconds that each piece took.

    It is a thread of the server's process, so a piece counts from the one before: while the
    interpreter is held, not even its clock is read.
    """
    waits, over = [], threading.Event()
    body = {"prompt": "the cat", "max_tokens": 200, "stream": True, "logit_bias": {2: -100}}

    def ask():
        with httpx.Client(base_url=port.url, timeout=60) as http:
            while not over.is_set():
                before = time.perf_counter()
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        now = time.perf_counter()
                        waits.append(now - before)
                        before = now
                        if over.is_set():
                            return

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            while len(waits) < 10:  # its programs are compiled
                time.sleep(0.01)
            waits.clear()
            yield waits
        finally:
            over.set()
            asking.result()


def attacked(port, capsys, what, body, path="/v1/completions"):
    """The answer to a call; the victim's worst wait meanwhile is printed."""
    sent = json.dumps(body).encode()
    kind = {"content-type": "application/json"}
    with victim(port) as waits, httpx.Client(base_url=port.url, timeout=120) as http:
        time.sleep(0.1)
        start = time.perf_counter()
        answer = http.post(path, content=sent, headers=kind)
        took = time.perf_counter() - start
    with capsys.disabled():
        median = statistics.median(waits)
        print(
            f"\n{what}: {answer.status_code} after {took:.2f} s, others wait "
            f"{max(waits) * 1e3:.0f} ms at worst, {median * 1e3:.1f} ms as a rule"
        )
    assert max(waits) < WORST
    return answer


def test_a_megabyte_that_has_to_be_tokenised(port, capsys):
    """This vocabulary tells nothing of the length before."""
    body = {"prompt": "the cat and " * (MEGABYTE // 12), "n": 2}
    answer = attacked(port, capsys, "1 MB, tokenised", body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.fixture(scope="module")
def demo_port():
    model = medusa_jax.load()
    trees = {4: model.parse_tree("chain:2")}
    with (
        Server(model, slots=4, trees=trees, queue=QUEUE) as server,
        listening(server, "plain") as port,
    ):
        yield port


@pytest.mark.wide
def test_a_megabyte_that_is_too_long_whatever_it_says(demo_port, capsys):
    """Refused before it is tokenised."""
    turn = {"role": "user", "content": "def parse(text): " * (MEGABYTE // 17)}
    body, path = {"messages": [turn]}, "/v1/chat/completions"
    answer = attacked(demo_port, capsys, "1 MB, chat", body, path)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "at least" in answer.text  # a bound: the number of its tokens is not known


AMBIGUOUS = " | ".join(" ".join("s" * n) for n in range(2, 12))


@pytest.mark.wide
def test_slow_masks(demo_port, capsys):
    """Masks take up to seconds: the call ends with an error, and others do not wait for it."""
    body = {"prompt": "x", "n": 3, "temperature": 1.5, "seed": 1, "max_tokens": 100}
    quick = body | {"guided_regex": "[a-z ]{20}"}  # compiles the programs
    url = f"{demo_port.url}/v1/completions"
    httpx.post(url, json=quick, timeout=300).raise_for_status()
    slow = {"guided_grammar": f"start: s\ns: {AMBIGUOUS} | /[a-z ]/"}
    answer = attacked(demo_port, capsys, "slow masks", body | slow)
    code = answer.json()["error"]["code"]
    assert (answer.status_code, code) == (400, "constraint_too_costly")
