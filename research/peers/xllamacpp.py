"""llama.cpp's newest server through xllamacpp, in this process: a GGUF file, plain and with its n-gram drafts."""

import json
import os
import urllib.request
from collections.abc import Sequence
from typing import Any

from medusa_jax.evaluate.race import Contender, Run
from research.peers import DRAFTED, Setting, counted
from research.peers.float32 import block_type, gguf_file

# Its drafts that need no second file.
DRAFTS = {
    "": "NONE", ", n-gram": "NGRAM_SIMPLE", ", n-gram map": "NGRAM_MAP_K", ", n-gram pool": "NGRAM_MOD",
}  # fmt: skip


def contenders(setting: Setting) -> list[Contender]:
    """The GGUF file in its own type.

    Raises:
      UserError: not a GGUF file.
    """
    setting.refuse_adjusted("llama.cpp")
    path = gguf_file(setting.model)
    import xllamacpp

    rows = DRAFTS | ({", EAGLE-3": "DRAFT_EAGLE3"} if setting.heads else {})
    return [_contender(xllamacpp, path, setting, *row) for row in rows.items()]


def server_of(path: str, setting: Setting, kind: str, slots: int = 1) -> Any:
    """llama.cpp's server with drafts of this kind, for as many texts at a time."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel = path, slots
    params.n_ctx, params.verbosity = slots * (setting.context + 64), 0
    for processors in (params.cpuparams, params.cpuparams_batch):
        processors.n_threads = setting.threads
    types = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    if kind == "DRAFT_EAGLE3":
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max = setting.heads, DRAFTED
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = setting.threads
    return xllamacpp.Server(params)


def _contender(
    xllamacpp: Any, path: str, setting: Setting, drafts: str, kind: str
) -> Contender:
    server = server_of(path, setting, kind)
    options = {
        "n_predict": setting.new_tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False,
        "return_tokens": True,
    }  # fmt: skip

    def decode(prompt: Sequence[int]) -> Run:
        body = json.dumps(options | {"prompt": list(prompt)}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{server.listening_address}/completion", body, headers
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        times = answer["timings"]
        seconds = times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3
        run = Run([answer["tokens"]], *seconds)
        return counted(run, times.get("draft_n_accepted", 0))

    label = f"llama.cpp (xllamacpp {xllamacpp.__version__}){drafts}"
    facts = {} if drafts else {"bytes": os.path.getsize(path)}
    return Contender(label, decode, block_type(path), facts)
