"""Many clients that ask one call after the other, streaming; also as a process of their own.

python tests/support/clients.py < attack.json: the arguments of `attack`; prints what it returns.
"""

import http.client
import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

KIND = {"content-type": "application/json"}


class Client:
    """Notes the times of what comes. It runs next to the server, so it does little."""

    def __init__(self, url):
        self.link = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
        self.first, self.between, self.tokens = [], [], 0

    def ask(self, fields):
        """The text that a call is answered with; where the queue is full, asked again."""
        start = last = time.perf_counter()
        said, sent = "", json.dumps(fields | {"stream": True})
        while True:
            self.link.request("POST", "/v1/completions", sent, KIND)
            answer = self.link.getresponse()
            if answer.status == 429:
                answer.read()
                time.sleep(float(answer.headers["retry-after"]))
                continue
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                [choice] = json.loads(line[6:])["choices"]
                now, tokens = time.perf_counter(), choice["medusa"]["tokens"]
                if not tokens:
                    continue
                if last == start:
                    self.first.append(now - start)
                else:  # several come at once
                    self.between += [0.0] * (tokens - 1) + [now - last]
                last, said = now, said + choice["text"]
                self.tokens += tokens
            return said


def attack(url, n_clients, n_calls, asked, pause):
    """Calls of random kinds from many clients at random times.

    Returns: pairs of the number of a kind and the text that it was answered with; seconds to first
      tokens and between tokens, all tokens, and the seconds of it all.
    """
    rng = random.Random(1)
    work = iter([rng.randrange(len(asked)) for _ in range(n_calls)])
    lock, answers = threading.Lock(), []
    clients = [Client(url) for _ in range(n_clients)]

    def run(number):
        client, waits = clients[number], random.Random(number)
        while True:
            with lock:
                kind = next(work, None)
            if kind is None:
                client.link.close()
                return
            time.sleep(waits.random() * pause)
            text = client.ask(asked[kind])
            with lock:
                answers.append((kind, text))

    start = time.perf_counter()
    with ThreadPoolExecutor(n_clients) as pool:
        list(pool.map(run, range(n_clients)))
    return {
        "answers": answers,
        "first": [t for client in clients for t in client.first],
        "between": [t for client in clients for t in client.between],
        "tokens": sum(client.tokens for client in clients),
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    json.dump(attack(*json.load(sys.stdin)), sys.stdout)
