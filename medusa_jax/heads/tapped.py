"""Drafters that read the backbone's inner streams, with decoder layers of their own sizes."""

import dataclasses
from typing import Any

from medusa_jax.arch import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Drafter


class TappedDrafter(Drafter):
    """Base class; the drafter's `Config` has these fields.

    tap_layers: layers whose input is read, such as "2,16,29"; empty: `paper_taps`.
    attention_heads, kv_heads, head_dim, d_ff: sizes of the layers; 0: the backbone's.
    rope_theta: base of the rotation, without scaling; 0: the backbone's rotation.
    """

    # The layers norm their queries and keys, as Qwen3's do.
    qk_norm = False

    heads: Any

    def check(self) -> None:
        L, tap_layers = self.llama.n_layers, self.heads.tap_layers
        layers = tap_layers.split(",") if tap_layers else []
        if not all(x.strip().isdecimal() and int(x) <= L for x in layers):
            raise UserError(
                f"heads.tap_layers are numbers from 0 to {L} with commas between, not {tap_layers!r}"
            )
        c = self.shape
        sizes = (c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff)
        if min(sizes) < 1 or c.n_heads % c.n_kv_heads or c.head_dim % 2:
            raise UserError(
                f"heads.attention_heads {c.n_heads}, kv_heads {c.n_kv_heads}, head_dim {c.head_dim} "
                f"and d_ff {c.d_ff} do not fit together"
            )

    @property
    def shape(self) -> LlamaConfig:
        """Layers without biases, the only form that engines support."""
        h = self.heads
        form = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
        sizes = {
            "n_heads": h.attention_heads, "n_kv_heads": h.kv_heads, "head_dim": h.head_dim,
            "d_ff": h.d_ff,
        }  # fmt: skip
        fields: dict[str, Any] = form | {name: n for name, n in sizes.items() if n}
        if h.rope_theta:
            fields |= {"rope_theta": h.rope_theta, "rope_scaling": "none"}
        return dataclasses.replace(self.llama, qk_norm=self.qk_norm, **fields)

    @property
    def taps(self) -> tuple[int, ...]:
        if self.heads.tap_layers:
            return tuple(int(x) for x in self.heads.tap_layers.split(","))
        return self.paper_taps

    @property
    def paper_taps(self) -> tuple[int, ...]:
        """The layers of the paper."""
        raise NotImplementedError
