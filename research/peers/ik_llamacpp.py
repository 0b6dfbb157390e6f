"""ik_llama.cpp through ik-llama-cpp-python: a GGUF file in its own type."""

import os
import time
from collections.abc import Sequence

import numpy as np

from medusa_jax.evaluate.race import Contender, Run
from research.peers import Setting
from research.peers.float32 import block_type, gguf_file


def contenders(setting: Setting) -> list[Contender]:
    """The GGUF file in its own type.

    The package's `generate` copies all logits in Python, which takes longer than a step; this calls its library.

    Raises:
      UserError: not a GGUF file.
    """
    setting.refuse_adjusted("ik_llama.cpp")
    path = gguf_file(setting.model)
    import ik_llama_cpp
    from ik_llama_cpp import _ctypes_api, _internals

    llama = ik_llama_cpp.IkLlama(
        path, n_ctx=setting.context, n_threads=setting.threads, verbose=False
    )
    context, n_vocab = llama._context, llama._model.n_vocab

    def best_after(tokens: Sequence[int], at: int) -> int:
        batch = _internals.make_batch_range(list(tokens), pos_start=at, logits_last=True)
        assert context.decode(batch) == 0
        _ctypes_api.llama_batch_free(batch)
        logits = _ctypes_api.llama_get_logits_ith(llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (n_vocab,)).argmax())

    def decode(prompt: Sequence[int]) -> Run:
        context.kv_cache_clear()
        start = time.perf_counter()
        tokens = [best_after(prompt, 0)]
        middle = time.perf_counter()
        for at in range(len(prompt), len(prompt) + setting.new_tokens - 1):
            tokens.append(best_after(tokens[-1:], at))
        return Run([tokens], middle - start, time.perf_counter() - middle)

    label = f"ik_llama.cpp {ik_llama_cpp.__version__}"
    return [Contender(label, decode, block_type(path), {"bytes": os.path.getsize(path)})]
