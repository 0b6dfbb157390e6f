"""What a dry run says of time: arithmetic against sums by hand, limits of a chip."""

import pytest
from training_setup import ROOT

from medusa_jax.commands import train as cli
from medusa_jax.training import dry
from research import planning


def load(name, *more):
    config = f"--config={ROOT}/configs/{name}.py"
    return cli.parse([config, "--workdir=w", "--config.mesh=1,1,1", *more])


def flops(name, *more):
    cfg = load(name, *more)
    return planning.flops_per_token(cfg, dry.step_shapes(cfg).state.params)


# Billions of weights that a token is multiplied with: layers of Vicuna-7B, its LM head, five heads.
LAYERS, LM_HEAD, HEADS = 6.4764, 0.1311, 5 * (0.1311 + 0.0168)
# Scores and values: 2 x 32 layers x 4096 x 2048 positions, half of them seen.
ATTENTION = 2 * 32 * 4096 * 2048 / 1e9


@pytest.mark.parametrize(
    ("name", "more", "billions"),
    [
        ("vicuna7b_m1", (), 2 * LAYERS + ATTENTION + 6 * HEADS),
        # Kept hidden states: the heads alone, whose gradients take two products more.
        ("vicuna7b_m1", ("--config.data.cache_features=bfloat16",), 6 * HEADS),
        # QLoRA: forward, again, and for inputs; 80 million weights of adapters.
        (
            "vicuna7b_m2", (),
            3 * (2 * LAYERS + ATTENTION) + 4 * LM_HEAD + 6 * HEADS + 6 * 0.0811,
        ),
        # One pass of its layer, whatever the depth: LM head there and back, and the teacher's.
        (
            "vicuna7b_eagle", ("--config.data.cache_features=bfloat16",),
            6 * 0.2359 + 4 * LM_HEAD + 2 * LM_HEAD,
        ),
        # The second and third level again in the backward pass.
        (
            "vicuna7b_eagle",
            ("--config.data.cache_features=bfloat16", "--config.train.levels=3"),
            (6 + 8 + 8) * 0.2359 + 3 * 4 * LM_HEAD + 2 * LM_HEAD,
        ),
    ],
)  # fmt: skip
def test_arithmetic_of_a_token(name, more, billions):
    assert flops(name, *more) / 1e9 == pytest.approx(billions, rel=2e-3)
