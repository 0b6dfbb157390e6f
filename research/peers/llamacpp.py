"""llama.cpp through llama-cpp-python: a GGUF file in float32, in its own type, and with drafts."""

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

from medusa_jax.errors import UserError
from medusa_jax.evaluate.race import Contender, Run
from research.peers import Setting
from research.peers.float32 import as_float32, block_type, gguf_file


def contenders(setting: Setting) -> list[Contender]:
    """The GGUF file with weights, keys and values in float32, in its own type, and with prompt lookup.

    Raises:
      UserError: not a GGUF file, or one that it cannot load.
    """
    setting.refuse_adjusted("llama.cpp")
    path = gguf_file(setting.model)
    import llama_cpp

    kind, threads = block_type(path), setting.threads
    settings = {"n_ctx": setting.context, "n_threads": threads}
    settings |= {"n_threads_batch": threads, "n_gpu_layers": 0}
    float32 = llama_cpp.GGML_TYPE_F32
    wide = settings | {"type_k": float32, "type_v": float32}
    engines = [_contender(llama_cpp, as_float32(path), "F32", wide, setting.new_tokens)]
    if kind != "F32":
        engines.append(_contender(llama_cpp, path, kind, settings, setting.new_tokens))
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    # Its only drafter; without a GPU its documentation recommends two tokens. They may exceed the text.
    drafter = LlamaPromptLookupDecoding(num_pred_tokens=2)
    drafts = settings | {"draft_model": drafter, "n_ctx": setting.context + 2}
    engines.append(
        _contender(llama_cpp, path, kind, drafts, setting.new_tokens, ", prompt lookup")
    )
    return engines


def _contender(
    llama_cpp: Any,
    path: str,
    weights: str,
    settings: dict[str, Any],
    n_tokens: int,
    drafts: str = "",
) -> Contender:
    try:
        llama = llama_cpp.Llama(model_path=path, verbose=False, **settings)
    except ValueError as error:
        raise UserError(f"llama.cpp cannot load {path}: {error}") from error

    def decode(prompt: Sequence[int]) -> Run:
        llama.reset()  # else it would reuse the prefix shared with the previous prompt
        start = time.perf_counter()
        tokens = llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0)
        first = next(tokens)
        middle = time.perf_counter()
        token_ids = list(itertools.islice(tokens, n_tokens - 1))
        return Run([[first, *token_ids]], middle - start, time.perf_counter() - middle)

    label = f"llama.cpp {llama_cpp.__version__}{drafts}"
    facts = {} if drafts else {"bytes": os.path.getsize(path)}
    return Contender(label, decode, weights, facts)
