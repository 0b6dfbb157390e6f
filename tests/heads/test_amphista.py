"""Amphista against its equations in plain numpy, its ablations, who sees whom, and its sizes."""

import family
import jax
import numpy as np
import pytest
from cases import thinned
from closeness import assert_close
from family import numpy_lm_head, problem
from numpy_layers import numpy_layer, numpy_norm, silu
from trees import WILD

from medusa_jax.heads.amphista import AmphistaConfig

pytestmark = pytest.mark.usefixtures("x64")

ABLATIONS = {
    "whole": {},
    "alpha": {"blocks": 2},
    "without auto-embedding": {"blocks": 0},
    "without position encoding": {"position_encoding": False},
    "without staged adaptation": {"stages": 0},
    "one adaptation layer": {"stages": 1},
    "three stages": {"stages": 3},
    "without sampled token": {"sampled_token": False},
    "eq. 5 as printed": {"plain_attention": True, "stage_norm": False, "stage_d_ff": 12},
}


def numpy_mix(params, drafter, contexts):
    """Equations 2 to 5 for one position; contexts: what each stage gave, each [D]."""
    h, c = drafter.heads, drafter.llama
    rows = []
    for k in range(1, 5):  # 1-based, as in the paper
        stage = int(np.ceil(k * h.stages / 4)) if h.stages else 1
        x, mlp = contexts[stage - 1], params[f"heads_{k - 1}"]["layers_0"]
        rows.append(x + silu(x @ mlp["kernel"] + mlp["bias"]))
    x_KD = np.stack(rows)
    if h.blocks and h.position_encoding:
        x_KD = x_KD + params["position_encoding"]["embedding"]
    for j in range(h.blocks):
        block, H = params[f"blocks_{j}"], c.head_dim
        normed = x_KD if h.plain_attention else numpy_norm(block["norm"]["scale"], x_KD)
        q, k, v = (normed @ block[f"{name}_proj"]["kernel"] for name in "qkv")
        out = np.zeros_like(q)
        for n in range(c.n_heads):
            mine = slice(n * H, (n + 1) * H)
            scores = np.exp(q[:, mine] @ k[:, mine].T / np.sqrt(H))
            out[:, mine] = scores / scores.sum(1, keepdims=True) @ v[:, mine]
        out = out @ block["o_proj"]["kernel"]
        x_KD = out if h.plain_attention else x_KD + out
    return x_KD


def numpy_contexts(params, drafter, backbone, hidden_TD, next_T):
    """Equation 1 for one text: what each stage gave, each [T, D]."""
    embedding = backbone.params["embed_tokens"]["embedding"]
    x, out = hidden_TD, []
    for s in range(drafter.heads.stages):
        stage = params[f"stages_{s}"]
        if drafter.heads.sampled_token:
            x = np.concatenate([x, embedding[next_T]], axis=1) @ stage["fc"]["kernel"]
        x = numpy_layer(stage["layers_0"], backbone.llama.config, x)
        if drafter.heads.stage_norm:
            x = numpy_norm(stage["norm"]["scale"], x)
        out.append(x)
    return out or [hidden_TD]


@pytest.mark.parametrize("ablation", thinned(ABLATIONS, "whole", "alpha"))
def test_features_and_proposals_are_those_of_the_paper(ablation):
    heads = AmphistaConfig(**{"lm_head": "low_rank", "rank": 5} | ABLATIONS[ablation])
    backbone, drafter, params = problem(heads)
    rows = hidden, tokens, *_ = family.random_rows(np.random.default_rng(0), T=7)
    n, root = [3, 6], np.array([tokens[0, 3], tokens[1, 6]])
    features, _ = family.features_and_logits(drafter, params, backbone, rows)
    state = family.committed(drafter, backbone, params, rows, n)
    propose = family.proposed_logits(drafter, backbone, WILD)
    nodes, logits = jax.tree.map(np.asarray, propose(params, state, root))
    for b in range(2):
        following = np.roll(tokens[b], -1)
        contexts = numpy_contexts(params, drafter, backbone, hidden[b], following)
        for t in range(6):
            x_KD = numpy_mix(params, drafter, [x[t] for x in contexts])
            assert_close(features[:, b, t], x_KD)
        x_KD = numpy_mix(params, drafter, [x[n[b] - 1] for x in contexts])
        order = []
        for k in range(4):
            expected = numpy_lm_head(params[f"heads_{k}"], backbone, x_KD[k])
            assert_close(logits[k][b], expected)
            order.append(np.argsort(-expected))
        by_rank = [order[len(c) - 1][c[-1]] for c in WILD.choices]
        assert nodes[b].tolist() == [root[b], *by_rank]
