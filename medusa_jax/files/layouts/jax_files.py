"""Draft heads for the two engines in JAX: `model.safetensors` and `config.json` that they read whole.

tpu-inference 0.32.0 runs `LlamaForCausalLM` as an EAGLE-3 drafter in JAX, and other names in torch or not at all; it
refuses keys that it does not know and files without `d2t`. sglang-jax (cddbf6f1; DSpark: 8704afbd) reads the same
directory. Both take embedding and LM head of DFlash and DSpark from the model. `jax_limits.py` has what they ignore.
"""

import os
from typing import ClassVar

import numpy as np

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files.json_files import optional_json
from medusa_jax.files.layouts.dflash_files import DFlashFiles
from medusa_jax.files.layouts.eagle3_files import Eagle3Files
from medusa_jax.files.layouts.jax_limits import SGLANG, TPU, unknown_model
from medusa_jax.files.layouts.layout import Export
from medusa_jax.files.layouts.stored_heads import Arrays

_VLLM = (
    'tpu-inference: `vllm serve {base} --speculative-config \'{{"method": "{drafter}", "model": "{out}", '
    '"num_speculative_tokens": {heads}}}\'`'
)
_SGLANG = (
    "sglang-jax: `python -m sgl_jax.launch_server --model-path {base} --speculative-algorithm {DRAFTER} "
    "--speculative-draft-model-path {out}`"
)


class Eagle3ForTpu(Eagle3Files):
    """EAGLE-3 heads for tpu-inference."""

    name = "tpu_inference"
    loading = _VLLM
    architecture = "LlamaForCausalLM"
    engine: ClassVar[str] = TPU

    def write(self, export: Export, out: str) -> None:
        _check_model(self.engine, export)
        super().write(export, out)

    def arrays(self, export: Export) -> Arrays:
        """The keys that both engines read: d2t always, t2d never."""
        arrays = super().arrays(export)
        arrays.pop("t2d", None)
        n_tokens = len(arrays["lm_head.weight"])
        return {"d2t": np.zeros(n_tokens, np.int64)} | arrays


class Eagle3ForSglangJax(Eagle3ForTpu):
    """EAGLE-3 heads for sglang-jax."""

    name = "sglang_jax"
    loading = _SGLANG
    engine = SGLANG


class DFlashForTpu(DFlashFiles):
    """DFlash heads for tpu-inference."""

    name = "tpu_inference"
    loading = _VLLM
    copies = False
    engine: ClassVar[str] = TPU

    def write(self, export: Export, out: str) -> None:
        _check_model(self.engine, export)
        if self.engine == TPU:
            inform(
                "tpu-inference 0.32.0 turns slow planes of DFlash's rotation eight times slower, as Llama 3.1 does: "
                "in texts of thousands of tokens fewer guesses may be accepted"
            )
        super().write(export, out)


class BlocksForSglangJax(DFlashForTpu):
    """DFlash and DSpark heads for sglang-jax."""

    name = "sglang_jax"
    loading = _SGLANG
    engine = SGLANG


def _check_model(engine: str, export: Export) -> None:
    """Refuse a model by its name, where another one of the same shape would do.

    Raises:
      UserError: the engine has no inner streams of such models.
    """
    config = optional_json(os.path.join(export.base.source, "config.json"))
    names = config.get("architectures")
    drafter = export.stored.heads.drafter
    if names and (reason := unknown_model(engine, drafter, names)):
        raise UserError(f"{export.stored.source}: {reason}")
