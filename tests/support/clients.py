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


def ask(link, fields):
    """The text that a call is answered with, and its number of tokens; where the queue is full, asked again."""
    said, tokens, sent = "", 0, json.dumps(fields | {"stream": True})
    while True:
        link.request("POST", "/v1/completions", sent, KIND)
        answer = link.getresponse()
        if answer.status == 429:
            answer.read()
            time.sleep(float(answer.headers["retry-after"]))
            continue
        for line in answer:
            if line.startswith(b"data: {"):
                [choice] = json.loads(line[6:])["choices"]
                said, tokens = said + choice["text"], tokens + choice["medusa"]["tokens"]
        return said, tokens


def attack(url, n_clients, n_calls, asked, pause):
    """Calls of random kinds from many clients at random times.

    Returns: for each call the number of its kind and the text that it was answered with; all tokens.
    """
    rng = random.Random(1)
    work = iter([rng.randrange(len(asked)) for _ in range(n_calls)])
    lock, answers = threading.Lock(), []

    def run(number):
        link = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
        waits, tokens = random.Random(number), 0
        while True:
            with lock:
                kind = next(work, None)
            if kind is None:
                link.close()
                return tokens
            time.sleep(waits.random() * pause)
            text, new = ask(link, asked[kind])
            tokens += new
            with lock:
                answers.append((kind, text))

    with ThreadPoolExecutor(n_clients) as pool:
        tokens = sum(pool.map(run, range(n_clients)))
    return {"answers": answers, "tokens": tokens}


if __name__ == "__main__":
    json.dump(attack(*json.load(sys.stdin)), sys.stdout)
