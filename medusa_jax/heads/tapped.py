"""Drafters that read the backbone's inner streams, with decoder layers of their own sizes."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Drafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.sharding import Params


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in "2,16,29"; none in an empty text."""
    return tuple(int(x) for x in text.split(",")) if text else ()


def check_numbers(name: str, text: str, most: int) -> None:
    """Refuse a text that is not empty nor numbers from 0 to `most` with commas between."""
    layers = text.split(",") if text else []
    if not all(x.strip().isdecimal() and int(x) <= most for x in layers):
        raise UserError(
            f"{name} are numbers from 0 to {most} with commas between, not {text!r}"
        )


@dataclass(unsafe_hash=True)
class TappedConfig(HeadsConfig):
    """Which layers are read, and the sizes of the drafter's layers."""

    # Layers whose input is read, such as "2,16,29"; empty: `paper_taps`.
    tap_layers: str = ""
    # Sizes of the layers, which published files may set; 0: the backbone's.
    attention_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    d_ff: int = 0
    # Base of the rotation, without scaling; 0: the backbone's rotation.
    rope_theta: float = 0.0
    # Epsilon of the norms; 0: the backbone's.
    rms_eps: float = 0.0


class TappedDrafter(Drafter):
    """Base class of these drafters."""

    # The layers norm their queries and keys, as Qwen3's do.
    qk_norm = False

    heads: TappedConfig

    def check(self) -> None:
        check_numbers("heads.tap_layers", self.heads.tap_layers, self.llama.n_layers)
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
            "d_ff": h.d_ff, "rms_eps": h.rms_eps,
        }  # fmt: skip
        fields: dict[str, Any] = form | {name: n for name, n in sizes.items() if n}
        llama = self.llama
        if h.rope_theta:
            llama, fields["rope_theta"] = llama.unscaled(), h.rope_theta
        return dataclasses.replace(llama, qk_norm=self.qk_norm, **fields)

    @property
    def taps(self) -> tuple[int, ...]:
        return numbers(self.heads.tap_layers) or self.paper_taps

    @property
    def paper_taps(self) -> tuple[int, ...]:
        """The layers that the paper reads."""
        raise NotImplementedError

    def first_input(
        self, params: Params, backbone: Backbone, hidden_BTE: jax.Array
    ) -> jax.Array:
        """What the layers read of the tapped streams [B, T, D]."""
        raise NotImplementedError
