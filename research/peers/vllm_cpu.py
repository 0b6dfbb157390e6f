"""vLLM on a CPU: the weights in float32 from a directory in Hugging Face form, plain and with EAGLE-3 heads."""

import os
import time
from collections.abc import Sequence
from typing import Any

from medusa_jax.api import DEMO
from medusa_jax.errors import UserError
from medusa_jax.evaluate.race import Contender, Run
from medusa_jax.files.hub import resolve
from medusa_jax.files.tensors import stands_for_gguf
from medusa_jax.whole_files import Json
from research.peers import DRAFTED, Setting, counted

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def contenders(setting: Setting) -> list[Contender]:
    """The model without compiled graphs, since compiling them takes minutes.

    Raises:
      UserError: a GGUF file.
    """
    setting.refuse_adjusted("vLLM")
    import vllm

    directory = resolve(setting.model or str(DEMO / "backbone"))
    if stands_for_gguf(directory):
        raise UserError("vLLM needs --model in Hugging Face form, not a GGUF file")
    here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= here | {"OMP_NUM_THREADS": str(setting.threads)}
    heads: Json = {"method": "eagle3", "model": setting.heads}
    heads["num_speculative_tokens"] = DRAFTED
    rows = [("", None), (", EAGLE-3", heads)] if setting.heads else [("", None)]
    return [_contender(vllm, directory, setting, *row) for row in rows]


def _contender(
    vllm: Any, directory: str, setting: Setting, drafts: str, heads: Json | None
) -> Contender:
    llm = vllm.LLM(
        directory, dtype="float32", max_model_len=setting.context + DRAFTED, max_num_seqs=1, enforce_eager=True,
        speculative_config=heads, disable_log_stats=False, enable_prefix_caching=False,
    )  # fmt: skip

    def accepted() -> int:
        return sum(x.value for x in llm.get_metrics() if x.name == ACCEPTED)

    def decode(prompt: Sequence[int]) -> Run:
        def seconds(n_tokens: int) -> tuple[float, list[int]]:
            options = vllm.SamplingParams(
                temperature=0, max_tokens=n_tokens, ignore_eos=True
            )
            start = time.perf_counter()
            given = {"prompt_token_ids": list(prompt)}
            (found,) = llm.generate(given, options, use_tqdm=False)
            return time.perf_counter() - start, list(found.outputs[0].token_ids)

        first, _ = seconds(1)
        before = accepted()
        whole, tokens = seconds(setting.new_tokens)
        return counted(Run([tokens], first, whole - first), accepted() - before)

    return Contender(f"vLLM {vllm.__version__} (CPU){drafts}", decode, "F32")
