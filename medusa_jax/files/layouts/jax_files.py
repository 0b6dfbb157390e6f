"""Draft heads for the two engines in JAX: `model.safetensors` and `config.json` that they read whole.

tpu-inference 0.32.0 runs `LlamaForCausalLM` as an EAGLE-3 drafter in JAX, other names in torch or not at all. It
refuses unknown keys and files without `d2t`. sglang-jax (cddbf6f1; DSpark: 8704afbd) reads the same directory.
Embedding and LM head of DFlash and DSpark are the model's. Both engines silently ignore fields that they do
not know, so `why_not` refuses heads that they would run differently.
"""

from typing import ClassVar

import numpy as np

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files.hf_writer import config_to_hf
from medusa_jax.files.layouts.dflash_files import DFlashFiles
from medusa_jax.files.layouts.eagle3_files import Eagle3Files, unstorable
from medusa_jax.files.layouts.layout import VLLM_COMMAND, Export, Layout
from medusa_jax.files.layouts.stored_heads import Arrays
from medusa_jax.files.layouts.tapped_files import architectures, drafter_of
from medusa_jax.heads.dflash import DFlashConfig
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.heads.tapped import TappedConfig

TPU, SGLANG = "tpu_inference", "sglang_jax"
# The base by which tpu-inference rotates DFlash's layers.
THETA = 10.0**6
# Whether a fault holds, and the reason after the engine's name.
Faults = list[tuple[object, str]]


class _ForJaxEngine(Layout):
    """Refuses heads that the engine misreads, and models that it does not know by name."""

    name = TPU
    loading = f"tpu-inference: {VLLM_COMMAND}"

    @property
    def engine(self) -> str:
        return self.name.replace("_", "-")

    def why_not(self, heads: HeadsConfig, llama: LlamaConfig | None) -> str:
        """Return the first reason that applies; the heads are checked before the model."""
        for holds, reason in self.faults(heads, llama):
            if holds:
                return f"{self.engine} {reason}"
        if llama is None:
            return ""
        assert isinstance(heads, TappedConfig)
        size, width = heads.head_dim, llama.head_dim
        if self.name == TPU and size not in (0, width):
            return f"{self.engine} pads heads as the model's {width}, not {size}"
        try:
            names = config_to_hf(llama)["architectures"]
        except UserError:
            names = []
        return self.unknown_model(heads.drafter, names)

    def faults(self, heads: HeadsConfig, llama: LlamaConfig | None) -> Faults:
        """Return pairs: whether the engine misreads something, and what it misreads."""
        raise NotImplementedError

    def unknown_model(self, drafter: str, names: list[str]) -> str:
        """The reason why the engine runs no such heads with a model; "" if it does."""
        known = ["LlamaForCausalLM", "Qwen3ForCausalLM"]
        if self.name == TPU and drafter == "eagle3":
            known = known[:1]
        if not {*known}.isdisjoint(names):
            return ""
        return (
            f"{self.engine} gives {drafter} heads the inner streams of {' and '.join(known)} only, not of "
            f"{', '.join(names) or 'a model of this shape'}"
        )

    def write(self, export: Export, out: str) -> None:
        drafter = export.stored.heads.drafter
        if reason := self.unknown_model(drafter, architectures(export)):
            raise UserError(f"{export.stored.source}: {reason}")
        super().write(export, out)


class Eagle3ForTpu(_ForJaxEngine, Eagle3Files):
    """EAGLE-3 heads for tpu-inference."""

    architecture = "LlamaForCausalLM"

    def why_not(self, heads: HeadsConfig, llama: LlamaConfig | None) -> str:
        """First why the engine misreads them, then why no file can hold them."""
        return super().why_not(heads, llama) or unstorable(heads, llama)

    def faults(self, heads: HeadsConfig, llama: LlamaConfig | None) -> Faults:
        """One layer without EAGLE-3.1's additions, which reads the streams of the paper."""
        assert isinstance(heads, Eagle3Config)
        unread = self.name == SGLANG and heads.norm_before_residual
        faults: Faults = [
            (heads.n_layers != 1, f"runs one layer, not {heads.n_layers}"),
            (heads.fc_norm, "has no norms before fc (heads.fc_norm)"),
            (heads.norm_output, "ignores norm_output"),
            (unread, "ignores norm_before_residual"),
        ]
        if llama is None:
            return faults
        drafter, L = drafter_of(heads, llama), llama.n_layers
        taps, scaling, paper = drafter.taps, drafter.shape.rope_scaling, (2, L // 2, L - 3)
        return faults + [
            (L < 7, f"reads three different layers, of which a model of {L} has fewer"),
            (taps != paper, f"reads the layers {paper}, whatever a file says, not {taps}"),
            (scaling not in ("none", "llama3"), f"misreads the rotation's {scaling!r}"),
        ]

    def arrays(self, export: Export) -> Arrays:
        """The keys that are read: d2t always, t2d never."""
        arrays = super().arrays(export)
        arrays.pop("t2d", None)
        return {"d2t": np.zeros(len(arrays["lm_head.weight"]), np.int64)} | arrays


class DFlashForTpu(_ForJaxEngine, DFlashFiles):
    """DFlash heads for tpu-inference."""

    drafters: ClassVar[tuple[str, ...]] = ("dflash",)
    copies = False

    def faults(self, heads: HeadsConfig, llama: LlamaConfig | None) -> Faults:
        """DFlash, in sglang-jax DSpark too, whose layers see all of the text and of the block."""
        assert isinstance(heads, DFlashConfig)
        tpu, rank, narrow = self.name == TPU, heads.markov_rank, heads.draft_vocab
        own = heads.lm_head != "shared"
        faults: Faults = [
            (narrow, f"scores all tokens, not the {narrow} of heads.draft_vocab"),
            (own, f"scores by the model's LM head, not by {heads.lm_head!r}"),
            (heads.window, f"ignores windows (heads.window {heads.window})"),
            (
                heads.causal == "all",
                "lets a slot see all others, not those before it alone",
            ),
            (tpu and rank, f"has no Markov head (heads.markov_rank {rank})"),
            (heads.root_guesses and not rank, "drops the guess of the root's slot"),
            (rank and not heads.root_guesses, "lets the root's slot of DSpark guess"),
        ]
        if llama is None:
            return faults
        drafter = drafter_of(heads, llama)
        shape, taps = drafter.shape, drafter.taps
        theta, scaling, size = shape.rope_theta, shape.rope_scaling, shape.head_dim
        # The stream before the first layer, or after the last one.
        missing = 0 if tpu else llama.n_layers
        other, padded = tpu and theta != THETA, tpu and size != 64 and size % 128 != 0
        return faults + [
            (scaling != "none", f"ignores the scaling {scaling!r} of DFlash's rotation"),
            (other, f"rotates DFlash by 10^6, whatever a file says, not by {theta:g}"),
            (padded, f"norms DFlash's queries and keys with padding, of head_dim {size}"),
            (missing in taps, f"does not tap stream {missing} (heads.tap_layers)"),
            ([*taps] != sorted({*taps}), f"reads each layer once, in order, not {taps}"),
        ]

    def write(self, export: Export, out: str) -> None:
        if self.name == TPU:
            inform(
                "tpu-inference 0.32.0 slows the slow planes of DFlash's rotation by 8, as Llama 3.1 does: texts of "
                "thousands of tokens may accept fewer guesses"
            )
        super().write(export, out)


_SGLANG_LOADING = (
    "sglang-jax: `--speculative-algorithm {DRAFTER} --speculative-draft-model-path {out} --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens {nodes}"
)


class Eagle3ForSglangJax(Eagle3ForTpu):
    """EAGLE-3 heads for sglang-jax."""

    name = SGLANG
    loading = f"{_SGLANG_LOADING} --speculative-num-steps {{heads}}`"


class BlocksForSglangJax(DFlashForTpu):
    """DFlash and DSpark heads for sglang-jax."""

    drafters = DFlashFiles.drafters
    name = SGLANG
    loading = f"{_SGLANG_LOADING} --speculative-num-steps 1`"
