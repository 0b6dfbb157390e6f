"""Features and loss of draft heads as pure functions of arrays, for training loops that are not ours.

    functions = HeadFunctions(Eagle3Config(n_heads=4), arch, TrainConfig(levels=4, teacher_weight=1, label_weight=0))
    params = functions.init(jax.random.key(0), frozen)
    loss, grads = jax.value_and_grad(functions.loss)(params, frozen, hidden_BTE, tokens_BT, counted_BT)

`frozen` holds the parts of the backbone that heads read, kernels as [in, out]:

    {"backbone": {"embed_tokens": {"embedding": [V, D]}, "norm": {"scale": [D]}, "lm_head": {"kernel": [D, V]}}}

without `lm_head` if `arch.tie_embeddings`, and with `"draft_vocab": {"ids": [O] int32}`,
ascending, if the heads have one. `hidden_BTE` is the output of the backbone's last norm,
followed by the streams that enter the layers `taps`: E = (1 + A) D. With transformers and
`output_hidden_states=True`, concatenate `hidden_states[-1]` and `hidden_states[i] for i in
taps`. Everything can be jitted, differentiated and sharded.
"""

from typing import Any

import jax
import jax.numpy as jnp

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.config import LoraConfig, TrainConfig
from medusa_jax.errors import UserError, differences
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts.native_heads import base_record, save_heads
from medusa_jax.heads import vocabulary
from medusa_jax.heads.drafter import Params, TextRows
from medusa_jax.heads.optional import loss_view
from medusa_jax.heads.registry import make_drafter
from medusa_jax.training.losses.pairs import Batch, StepInputs, draw_anchors, pair_counts
from medusa_jax.training.partition import trained_groups
from medusa_jax.training.stage import make_stage
from medusa_jax.whole_files import replacing


class HeadFunctions:
    """The functions of one kind of heads on one shape of backbone; `train.py` minimises the same loss.

    Attributes:
      taps: layers whose input the heads read, after the backbone's last hidden state.
    """

    def __init__(
        self, heads: HeadsConfig, arch: LlamaConfig, train: TrainConfig | None = None
    ):
        """Args:
          heads: the kind and sizes of the heads, such as `Eagle3Config()`.
          arch: the backbone's shape (`files.hf_config.read_config` reads it from a model's directory).
          train: of it are read: `dtype`, `loss_chunk`, the weights of the terms, `levels`, `lambda_decay`,
            `anchors`, `hidden_noise` and `confidence_gradient`.

        Raises:
          UserError: fields that do not fit together.
        """
        train = train or TrainConfig()
        if train.stage != "medusa1":
            raise UserError(
                f"the backbone is frozen: train.stage medusa1, not {train.stage}"
            )
        drafter, lora = make_drafter(heads, arch), LoraConfig()
        groups = trained_groups(train.stage, lora.rank)
        self._stage = make_stage(train, arch, groups, drafter, lora, 1)
        self.heads, self.arch, self.taps = drafter.heads, arch, drafter.taps
        self._levels = loss_view(drafter, train.levels)

    def init(self, key: jax.Array, frozen: Params) -> Params:
        """Fresh float32 parameters, as docs/formats.md lists them, in nested dictionaries."""
        params: Params = self._stage.init(key, frozen)["heads"]
        return params

    def loss(
        self, params: Params, frozen: Params, hidden_BTE: jax.Array, tokens_BT: jax.Array,
        counted_BT: jax.Array, segment_ids_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None, key: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """The sum of the heads' mean losses, weighted by lambda_decay^k: a scalar.

        Args:
          hidden_BTE: hidden states and tapped streams of frozen text; no gradient flows into them.
          tokens_BT: int32 token ids; position t of `hidden_BTE` has read them up to t.
          counted_BT: bool; head k learns token t + k + 2 at t if tokens t + 1 ... t + k + 2 are counted.
          segment_ids_BT: numbers of the texts of a row, from 1; 0 is padding. Default: one text a row.
          positions_BT: positions within the texts. Default: 0, 1, ...
          key: turns dropout, noise and drawn anchors on.
        """
        batch = self._batch(tokens_BT, counted_BT, segment_ids_BT, positions_BT)
        if self._stage.anchors and key is not None:
            batch["anchors"] = draw_anchors(key, batch, self._stage.anchors)
        counts_K = pair_counts(batch, self._stage.offsets)
        inputs = StepInputs(batch | {"hidden": hidden_BTE}, counts_K, key)
        return self._stage.loss({"heads": params}, frozen, inputs)[0]

    def features(
        self, params: Params, frozen: Params, hidden_BTE: jax.Array, tokens_BT: jax.Array,
        segment_ids_BT: jax.Array | None = None, positions_BT: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """Inputs of the heads' LM heads at every position [K, B, T, D]; K levels for EAGLE.

        Args: as for `loss`.
        """
        counted_BT = jnp.ones(tokens_BT.shape, bool)
        batch = self._batch(tokens_BT, counted_BT, segment_ids_BT, positions_BT)
        text = (batch[name] for name in ("tokens", "positions", "segment_ids"))
        rows = TextRows(hidden_BTE.astype(self._stage.llama.dtype), *text)
        return self._levels.features(params, self._stage.drafting(frozen), rows)

    def logits(
        self, params: Params, frozen: Params, k: int, features: jax.Array
    ) -> jax.Array:
        """Logits [..., O] of token t + k + 2 from head k's features [..., D] at t; k is 0-based."""
        backbone = self._stage.drafting(frozen)
        return self._levels.head_logits(params, backbone, k, features)

    def save(self, directory: str, params: Params, frozen: Params, model: str) -> None:
        """Write heads that `decode.py --drafter` and `convert` read.

        Args:
          model: directory or hub id of the backbone, by whose fingerprint they are bound to it.

        Raises:
          UserError: the model is not of this shape, or the directory cannot be written.
        """
        base = BaseFiles.open(model)
        if base.config != self.arch:
            differing = differences(base.config, self.arch)
            raise UserError(f"{model} has another shape than the heads' model: {differing}")
        if vocabulary.GROUP in frozen:
            params = params | {vocabulary.GROUP: frozen[vocabulary.GROUP]}
        record = base_record(self.arch, base.fingerprint())
        with replacing(directory) as new:
            save_heads(new, self.heads, params, base=record, recipe={})

    def _batch(
        self, tokens_BT: Any, counted_BT: Any, segments: Any, positions: Any
    ) -> Batch:
        shape = tokens_BT.shape
        if segments is None:
            segments = jnp.ones(shape, jnp.int32)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        return {
            "tokens": tokens_BT, "counted": counted_BT, "segment_ids": segments,
            "positions": positions,
        }  # fmt: skip
