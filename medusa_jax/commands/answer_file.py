"""decode.py --prompts_file: all answers of a file, a JSON object a line."""

import sys
import time
from functools import partial

from tqdm import tqdm

from medusa_jax import hosts
from medusa_jax.api.prompts import equal_batches
from medusa_jax.commands.decode_job import DecodeJob
from medusa_jax.console import inform, print_json
from medusa_jax.errors import Terminated
from medusa_jax.progress import ProgressBar


def answer_file(job: DecodeJob, *, batch_size: int, show_drafts: bool) -> int:
    """All requests of a file in batches; one JSON object a line, in the order of the file.

    Args:
      show_drafts: add `accepted_lengths` and `draft_depths`.
    """
    n, began, compiling = len(job.prompts), time.perf_counter(), 0.0
    tokens = steps = 0
    write = partial(tqdm.write, file=sys.stdout)  # above the progress bar
    with ProgressBar("answers", n, "request", shown=hosts.first()) as bar:
        bar.update(0, "compiling and decoding")
        for number, (ids, rows) in enumerate(equal_batches(n, batch_size)):
            results = job.generate(rows)
            compiling += results[0].compile_seconds
            for _, result, facts in zip(ids, results, job.facts(rows, results)):
                tokens, steps = tokens + result.new_tokens, steps + result.steps
                if show_drafts:
                    facts["draft_depths"] = result.draft_depths
                else:
                    del facts["accepted_lengths"]
                print_json(facts, write)
            sys.stdout.flush()
            bar.update(len(ids), "")
            if hosts.asked_to_stop(number):
                raise Terminated
    spent = time.perf_counter() - began
    inform(
        f"{n} requests, {tokens} tokens in {spent:.1f} s ({compiling:.1f} s of compilation), "
        f"{tokens / max(spent - compiling, 1e-9):.0f} tokens/s, mean accepted length "
        f"{(tokens - n) / max(steps, 1):.2f}"
    )
    return 0
