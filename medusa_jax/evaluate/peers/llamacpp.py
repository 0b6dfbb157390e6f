"""llama.cpp through llama-cpp-python: a GGUF file in its usual type, and in float32."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

from medusa_jax.errors import UserError
from medusa_jax.evaluate.peers.contender import Contender, Run
from medusa_jax.interop.gguf.float32 import as_float32, block_type
from medusa_jax.interop.hub import gguf_file


def llamacpp_contenders(model: str | None, context: int, threads: int) -> list[Contender]:
    """Contenders for the file in its own type, and for its weights, keys and values in float32.

    Args:
      model: as for `--model`; it must name a GGUF file.
      context: tokens of the longest text.

    Raises:
      UserError: not a GGUF file; llama-cpp-python is not installed or cannot load the file.
    """
    path = gguf_file(model)
    try:
        import llama_cpp
    except ImportError as error:
        raise UserError(
            "comparing with llama.cpp needs llama-cpp-python: pip install 'medusa-jax[llamacpp]'"
        ) from error
    own, settings = block_type(path), {"n_ctx": context, "n_threads": threads}
    settings |= {"n_threads_batch": threads, "n_gpu_layers": 0}
    float32 = llama_cpp.GGML_TYPE_F32
    alike = settings | {"type_k": float32, "type_v": float32}
    found = [_contender(llama_cpp, as_float32(path), "F32", alike)]
    if own != "F32":
        found.append(_contender(llama_cpp, path, own, settings))
    return found


def _contender(
    llama_cpp: Any, path: str, weights: str, settings: dict[str, int]
) -> Contender:
    try:
        llama = llama_cpp.Llama(model_path=path, verbose=False, **settings)
    except ValueError as error:
        raise UserError(f"llama.cpp cannot load {path}: {error}") from error

    def decode(prompt: Sequence[int], n_tokens: int) -> Run:
        llama.reset()  # else it would reuse the prefix shared with the previous prompt
        start = time.perf_counter()
        tokens = llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0)
        first = next(tokens)
        middle = time.perf_counter()
        rest = list(itertools.islice(tokens, n_tokens - 1))
        return Run([first, *rest], middle - start, time.perf_counter() - middle)

    return Contender("llama.cpp", weights, decode)
