"""`python -m research keystrokes`: completion times while somebody types, ours and llama.cpp's.

Source files are typed on from random places, a character at a time, and each time `POST /infill` asks for what follows.
At a place the servers answer the same requests one after the other, in an order that is drawn. The first request of a
place, which reads the whole prompt, is not counted.
"""

import dataclasses
import json
import random
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.commands.flags import CommandLine, at_least, flag
from medusa_jax.commands.model_flags import ModelFlags, load_model
from medusa_jax.console import inform
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.kept_programs import use_compilation_cache
from medusa_jax.whole_files import Json
from research.against import processors
from research.clients import ladder_of, served
from research.peers import Setting, xllamacpp
from research.peers.float32 import gguf_file

# New tokens; characters before and after the cursor; most tokens of a prompt.
NEW, BEFORE, AFTER, PROMPT = 64, 1800, 450, 900
COLUMNS = "server", "ms", "quartiles", "all, of llama.cpp's", "tokens", "read", "as plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ModelFlags):
    """Completion times while somebody types."""

    files: tuple[str, ...] = flag("comma-separated source files to type in")
    places: int = flag("in all of them", 8, type=at_least(1))
    keys: int = flag("keystrokes at each place", 6, type=at_least(1))


def answer(url: str, before: str, after: str) -> tuple[float, Any]:
    """Seconds of one completion, and the server's answer."""
    body: Json = {"input_prefix": before, "input_suffix": after, "input_extra": []}
    body |= {"n_predict": NEW, "temperature": 0, "cache_prompt": True}
    headers, start = {"Content-Type": "application/json"}, time.perf_counter()
    request = urllib.request.Request(f"{url}/infill", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        said = json.load(response)
    return time.perf_counter() - start, said


def run(flags: Flags) -> int:
    """Print the table: llama.cpp, plain decoding, drafts."""
    use_compilation_cache()
    model, rng = load_model(flags, tree="auto"), random.Random(0)
    texts = [Path(file).read_text() for file in flags.files]
    setting = Setting(flags.model, NEW, PROMPT + NEW, processors(), 0, 1.0)
    peer = xllamacpp.server_of(gguf_file(flags.model), setting, "NONE")
    with served(model, 1, NEW, PROMPT) as (server, url):
        ladders = {"plain": ladder_of(server, 1), "drafts": ladder_of(server)}
        urls = {"llama.cpp": peer.listening_address} | dict.fromkeys(ladders, url)
        runs: dict[str, list[tuple[float, Any]]] = {name: [] for name in urls}
        for place in range(flags.places):
            text = texts[place % len(texts)]
            at = rng.randrange(len(text) // 4, len(text) - AFTER)
            for name in rng.sample(list(urls), len(urls)):
                server._scheduler._chunks._ladder = ladders.get(name, ladders["plain"])
                server._scheduler._jobs.crop(0, 0)  # no prompt is in a cache
                after = text[at + flags.keys :][:AFTER]
                for key in range(flags.keys + 1):
                    took = answer(urls[name], text[max(0, at - BEFORE) : at + key], after)
                    runs[name] += [took] if key else []
    rows, whole = [], {name: sum(s for s, _ in runs[name]) for name in runs}
    for name, its_runs in runs.items():
        low, middle, high = np.quantile([1000 * s for s, _ in its_runs], (0.25, 0.5, 0.75))
        tokens = np.mean([said["tokens_predicted"] for _, said in its_runs])
        read = np.mean([said["timings"]["prompt_n"] for _, said in its_runs])
        pairs = zip(its_runs, runs["plain"])
        same = sum(a["content"] == b["content"] for (_, a), (_, b) in pairs)
        ratio = f"{whole[name] / whole['llama.cpp']:.2f}"
        cells = name, f"{middle:.0f}", f"{low:.0f}, {high:.0f}", ratio
        rows.append([*cells, f"{tokens:.1f}", f"{read:.1f}", f"{same} of {len(its_runs)}"])
    inform("\n" + markdown_table(COLUMNS, rows))
    return 0


main = CommandLine("python -m research keystrokes", Flags, run, "")
