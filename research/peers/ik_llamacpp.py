"""ik_llama.cpp through ik-llama-cpp-python: a GGUF file in its own type."""

import os
import time
from collections.abc import Sequence

from medusa_jax.errors import UserError
from medusa_jax.evaluate.race import Contender, Run
from research.peers import Setting
from research.peers.float32 import block_type, gguf_file


def contenders(setting: Setting) -> list[Contender]:
    """The GGUF file in its own type. Texts end where the model ends them.

    Raises:
      UserError: not a GGUF file; ik-llama-cpp-python is not installed.
    """
    path = gguf_file(setting.model)
    try:
        import ik_llama_cpp
    except ImportError as error:
        raise UserError(
            "comparing with ik_llama.cpp needs a package: pip install ik-llama-cpp-python"
        ) from error
    llama = ik_llama_cpp.IkLlama(
        path, n_ctx=setting.context + 1, n_threads=setting.threads, verbose=False
    )

    def timed(prompt: Sequence[int], n: int) -> tuple[list[int], float]:
        start = time.perf_counter()
        tokens = llama.generate(list(prompt), max_tokens=n, temperature=0.0)
        return tokens, time.perf_counter() - start

    def decode(prompt: Sequence[int]) -> Run:
        """n tokens take the prompt and n steps: its last token is read, too."""
        _, one = timed(prompt, 1)
        tokens, seconds = timed(prompt, setting.new_tokens)
        step = (seconds - one) / max(len(tokens) - 1, 1)
        return Run([tokens], one - step, seconds - one)

    label = f"ik_llama.cpp {ik_llama_cpp.__version__}"
    return [Contender(label, decode, block_type(path), {"bytes": os.path.getsize(path)})]
