"""EAGLE-3 heads against recorded runs of SpecForge (sgl-project/SpecForge a6b6b02) and speculators
(vllm-project/speculators c05b95b).

Weights, streams and teacher are random, made here from seeds. `OnlineEagle3Model` and `Eagle3DraftModel` ran over
them unmodified, four levels, in float64 with torch 2.13 on a CPU: SpecForge with the loss of its own reference of
its Triton kernel, speculators with its eager KL, on the directory that `convert --to speculators` wrote.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
from cases import thinned
from closeness import assert_close
from head_files import EAGLE3, IDS, LLAMA, V, eagle3_state, write
from numpy_layers import numpy_norm
from our_heads import exported, load, logits_of, write_base
from tiny import random_params

from medusa_jax.files.layouts.heads_io import open_heads
from medusa_jax.heads.optional import loss_view
from medusa_jax.heads.registry import make_drafter

pytestmark = pytest.mark.usefixtures("x64")
LEVELS, B, T, D = 4, 2, 12, LLAMA.d_model
CONFIG = dataclasses.replace(LLAMA, n_layers=8)


class Recorded(NamedTuple):
    """The loss of each level, its best draft token (as letters) after the positions of row 0, three logits."""

    losses: list[float]
    letters: list[str]
    logits: list[list[float]]


SPECFORGE = {
    "3.0": Recorded(
        [1.784856, 1.44226, 1.133485, 1.115047],
        ["ghbgbbeac", "gjbbbbbac", "bbbbbcbbc", "bbbbbcbbi"],
        [[0.63265, 1.92216, -1.15365], [-0.1892, 2.84389, 0.43464],
         [-0.2404, 3.53466, 1.82183], [-0.01846, 3.57127, 2.52647]],
    ),
    "fc_norm": Recorded(
        [1.729832, 1.283968, 1.182915, 1.069404],
        ["ghagbhebd", "gjageeebd", "hjbggiecd", "gdbbciecd"],
        [[0.11176, -1.72407, -2.10377], [0.74591, -0.68887, -2.19439],
         [0.30923, 0.92402, -1.0615], [0.36057, 1.29473, -1.10985]],
    ),
}  # fmt: skip
SPECULATORS = {
    "3.0": Recorded(
        [2.496022, 2.344979, 2.251088, 2.696339],
        ["ghbgbbea", "gjbbbbba", "bbbbbcbb", "bbbbbcbb"],
        [[0.63265, 1.92216, -1.15365], [-0.1892, 2.84389, 0.43464],
         [-0.2404, 3.53466, 1.82183], [-0.01846, 3.57127, 2.52647]],
    ),
    "3.1": Recorded(
        [2.310455, 2.207841, 2.588362, 2.457433],
        ["ghagbheb", "aaaagaei", "bbdijiik", "kajhiibh"],
        [[0.11176, -1.72407, -2.10377], [0.38579, -1.38673, -0.61575],
         [-2.02674, 1.69892, 1.85002], [1.08222, 2.24873, 1.73402]],
    ),
    "residual": Recorded(
        [2.637741, 2.246476, 2.459565, 2.637923],
        ["ghbgbbga", "bjgbbjbb", "biibjabb", "bbgiibki"],
        [[0.61199, 1.88439, -1.17464], [0.88524, -0.78298, 0.82654],
         [2.38882, -1.71, 0.59606], [1.04245, 1.61892, 1.93857]],
    ),
}  # fmt: skip
FLAGS = {
    "3.0": {},
    "fc_norm": {"fc_norm": True},
    "3.1": {"fc_norm": True, "norm_output": True},
    "residual": {"norm_before_residual": True},
}


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


class Inputs:
    """What both engines were given."""

    rng = np.random.default_rng(5)
    final_BTD, head_DV = rng.standard_normal((B, T + 1, D)), rng.standard_normal((D, V))
    tokens_BT = rng.integers(0, V, (B, T + 1))
    streams_BTE = rng.standard_normal((B, T, 3 * D))
    teacher_BTV = final_BTD @ head_DV / 2
    params = random_params(CONFIG, 0)
    params["embed_tokens"]["embedding"] = rng.standard_normal((V, D))


def directory(version, path):
    """The heads in SpecForge's layout."""
    newer = "fc_norm" in FLAGS[version]
    state = eagle3_state(newer=newer)
    return write(path, state, "model.safetensors", EAGLE3 | FLAGS[version])


def our_logits(path):
    """Logits [levels, B, T, O] of the heads in a directory."""
    heads, params, _ = load(path, CONFIG)
    drafter = loss_view(make_drafter(heads, CONFIG), LEVELS)
    # The engines have no stream after the last token, whose level-0 row no other row here reads.
    streams_BTE = np.concatenate([Inputs.streams_BTE, np.zeros((B, 1, 3 * D))], axis=1)
    hidden_BTE = np.concatenate([Inputs.final_BTD, streams_BTE], axis=-1)
    return logits_of(drafter, params, Inputs.params, hidden_BTE, Inputs.tokens_BT)


def check(recorded, logits_KBTO, tolerance):
    for k, logits_BTO in enumerate(logits_KBTO):
        best = logits_BTO[0, : len(recorded.letters[k])].argmax(-1)
        assert "".join(chr(97 + o) for o in best) == recorded.letters[k]
        np.testing.assert_allclose(logits_BTO[1, 5, :3], recorded.logits[k], atol=tolerance)


@pytest.mark.parametrize("version", thinned(SPECFORGE, "3.0"))
def test_levels_and_losses_are_specforge_s(version, tmp_path):
    recorded, logits_KBTO = SPECFORGE[version], our_logits(directory(version, tmp_path))
    check(recorded, logits_KBTO, 2e-5)
    for k, logits_BTO in enumerate(logits_KBTO):
        # Its mask: the position's token k before the last four, and the teacher's choice can be drafted.
        loss = 0.0
        for b, t in np.ndindex(B, T - 4 - k):
            teacher_V = Inputs.teacher_BTV[b, t + k + 1]
            if teacher_V.argmax() in IDS:
                loss -= np.exp(log_softmax(teacher_V[IDS])) @ log_softmax(logits_BTO[b, t])
        assert_close(loss / (B * T), np.float64(recorded.losses[k]), dtype="float32")


@pytest.mark.parametrize("version", thinned(SPECULATORS, "3.1"))
def test_levels_and_losses_are_those_of_speculators(version, tmp_path):
    """Of the directory that `convert` writes for it."""
    base = write_base(tmp_path / "base", CONFIG, Inputs.params, "float64")
    stored = open_heads(str(directory(version, tmp_path / "specforge")))
    out = exported(stored, base, "speculators", tmp_path / "out")
    recorded, logits_KBTO = SPECULATORS[version], our_logits(out)
    # Its teacher norms the last stream, which stands for `final_BTD`.
    normed_BTD = numpy_norm(np.ones(D), Inputs.final_BTD, LLAMA.rms_eps)
    teacher_BTO = (normed_BTD @ Inputs.head_DV / 2)[..., IDS]
    check(recorded, logits_KBTO, 5e-5)  # its norms and rotation are in float32
    for k, logits_BTO in enumerate(logits_KBTO):
        losses = []
        for b, t in np.ndindex(B, T - k):
            teacher_O = log_softmax(teacher_BTO[b, t + k + 1])
            divergence = teacher_O - log_softmax(logits_BTO[b, t])
            losses.append(np.exp(teacher_O) @ divergence)
        assert_close(np.mean(losses), np.float64(recorded.losses[k]), 64, dtype="float32")
