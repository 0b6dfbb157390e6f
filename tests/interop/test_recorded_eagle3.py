"""EAGLE-3 heads against a recorded run of SpecForge's training model (sgl-project/SpecForge a6b6b02).

Weights, streams and teacher are random, made here from seeds. `OnlineEagle3Model` ran over them unmodified, four
levels, in float64 with torch 2.13 on a CPU, with the loss of SpecForge's own reference of its Triton kernel.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from head_files import EAGLE3, IDS, LLAMA, V, eagle3_state, write
from tiny import random_params

from medusa_jax.heads import Backbone, make_drafter, vocabulary
from medusa_jax.heads.drafter import TextRows
from medusa_jax.interop.published import open_heads
from medusa_jax.interop.tensors import unflatten
from medusa_jax.model.llama import Llama

pytestmark = pytest.mark.usefixtures("x64")
LEVELS, B, T, D = 4, 2, 12, LLAMA.d_model
CONFIG = dataclasses.replace(LLAMA, n_layers=8)
# By variant: the loss of each level, and its best draft token (as letters) after each position of row 0.
RECORDED = {
    "3.0": (
        [1.784856, 1.44226, 1.133485, 1.115047],
        ["ghbgbbeac", "gjbbbbbac", "bbbbbcbbc", "bbbbbcbbi"],
        [[0.63265, 1.92216, -1.15365], [-0.1892, 2.84389, 0.43464],
         [-0.2404, 3.53466, 1.82183], [-0.01846, 3.57127, 2.52647]],
    ),
    "3.1": (
        [1.729832, 1.283968, 1.182915, 1.069404],
        ["ghagbhebd", "gjageeebd", "hjbggiecd", "gdbbciecd"],
        [[0.11176, -1.72407, -2.10377], [0.74591, -0.68887, -2.19439],
         [0.30923, 0.92402, -1.0615], [0.36057, 1.29473, -1.10985]],
    ),
}  # fmt: skip


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


@pytest.mark.parametrize("version", RECORDED)
def test_levels_and_losses_are_specforge_s(version, tmp_path):
    newer = version == "3.1"
    rng = np.random.default_rng(5)
    final_BTD, head_DV = rng.standard_normal((B, T + 1, D)), rng.standard_normal((D, V))
    tokens_BT = rng.integers(0, V, (B, T + 1))
    streams_BTE = rng.standard_normal((B, T, 3 * D))
    teacher_BTV = final_BTD @ head_DV / 2
    params = random_params(CONFIG, 0)
    params["embed_tokens"]["embedding"] = rng.standard_normal((V, D))
    config = EAGLE3 | ({"fc_norm": True} if newer else {})
    write(tmp_path, eagle3_state(newer=newer), "model.safetensors", config)
    stored = open_heads(str(tmp_path))
    heads = unflatten({k: np.float64(x) for k, x in stored.read(CONFIG).items()})
    backbone = vocabulary.narrowed(
        Backbone(Llama(CONFIG, dtype=jnp.float64), params), jnp.asarray(IDS)
    )
    drafter = make_drafter(stored.heads, CONFIG).loss_view(LEVELS)
    # SpecForge has no stream after the last token, whose level-0 row no other row here reads.
    streams_BTE = np.concatenate([streams_BTE, np.zeros((B, 1, 3 * D))], axis=1)
    hidden_BTE = np.concatenate([final_BTD, streams_BTE], axis=-1)
    positions_BT = np.broadcast_to(np.arange(T + 1), (B, T + 1))
    rows = TextRows(hidden_BTE, tokens_BT, positions_BT, np.ones((B, T + 1), int))
    features_KBTD = drafter.features(heads, backbone, rows)
    losses, best, shown = RECORDED[version]
    for k in range(LEVELS):
        logits_BTO = np.asarray(
            drafter.head_logits(heads, backbone, k, features_KBTD[k]), np.float64
        )
        letters = "".join(chr(97 + o) for o in logits_BTO[0, : T - 3].argmax(-1))
        assert letters == best[k]
        np.testing.assert_allclose(logits_BTO[1, 5, :3], shown[k], atol=2e-5)
        # Its mask: the position's token k before the last four, and the teacher's choice can be drafted.
        loss = 0.0
        for b, t in np.ndindex(B, T - 4 - k):
            teacher_V = teacher_BTV[b, t + k + 1]
            if teacher_V.argmax() in IDS:
                loss -= np.exp(log_softmax(teacher_V[IDS])) @ log_softmax(logits_BTO[b, t])
        assert_close(loss / (B * T), np.float64(losses[k]), dtype="float32")
