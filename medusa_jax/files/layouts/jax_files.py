"""Draft heads for the two engines in JAX: `model.safetensors` and `config.json` that they read whole.

tpu-inference 0.32.0 runs `LlamaForCausalLM` as an EAGLE-3 drafter in JAX, other names in torch or not at all. It
refuses unknown keys and files without `d2t`. sglang-jax (cddbf6f1; DSpark: 8704afbd) reads the same directory.
Embedding and LM head of DFlash and DSpark are the model's. `jax_limits.py` has what both ignore.
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
from medusa_jax.files.layouts.layout import Export, Layout
from medusa_jax.files.layouts.stored_heads import Arrays


class _ForTpu(Layout):
    """Checks the model by its name, where others have the same shape."""

    name = "tpu_inference"
    loading = "tpu-inference: as for vLLM, with `--speculative-config` and this directory as the model"
    engine: ClassVar[str] = TPU

    def write(self, export: Export, out: str) -> None:
        config = optional_json(os.path.join(export.base.source, "config.json"))
        names, drafter = config.get("architectures"), export.stored.heads.drafter
        reason = unknown_model(self.engine, drafter, names) if names else ""
        if reason:
            raise UserError(f"{export.stored.source}: {reason}")
        super().write(export, out)


class Eagle3ForTpu(_ForTpu, Eagle3Files):
    """EAGLE-3 heads for tpu-inference."""

    architecture = "LlamaForCausalLM"

    def arrays(self, export: Export) -> Arrays:
        """The keys that are read: d2t always, t2d never."""
        arrays = super().arrays(export)
        arrays.pop("t2d", None)
        return {"d2t": np.zeros(len(arrays["lm_head.weight"]), np.int64)} | arrays


class DFlashForTpu(_ForTpu, DFlashFiles):
    """DFlash heads for tpu-inference."""

    copies = False

    def write(self, export: Export, out: str) -> None:
        if self.engine == TPU:
            inform(
                "tpu-inference 0.32.0 slows the slow planes of DFlash's rotation by 8, as Llama 3.1 does: texts of "
                "thousands of tokens may accept fewer guesses"
            )
        super().write(export, out)


class Eagle3ForSglangJax(Eagle3ForTpu):
    """EAGLE-3 heads for sglang-jax."""

    name, engine = "sglang_jax", SGLANG
    loading = "sglang-jax: `--speculative-draft-model-path {out}`"


class BlocksForSglangJax(DFlashForTpu):
    """DFlash and DSpark heads for sglang-jax."""

    name, engine = "sglang_jax", SGLANG
    loading = Eagle3ForSglangJax.loading
