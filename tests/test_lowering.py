"""Programs for accelerators, made where there is none: every drafter's steps lower for TPU and CUDA."""

import re

import jax
import jax.numpy as jnp
import pytest
from cases import thinned

from medusa_jax.api.weightless import abstract_state, abstract_variables
from medusa_jax.config import (
    Config,
    DataConfig,
    LlamaConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.step import decode_step
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.model.llama import Llama, decoding_config
from medusa_jax.training import dry
from medusa_jax.tree.tree import Tree

PLATFORMS = ("tpu", "cuda")
ARCH = LlamaConfig(64, 32, 2, 4, 2, 8, 48, max_position=256)
TREE = Tree.from_choices([[0], [1], [0, 0], [0, 1]])
SLOTS = 128


def heads_of(name):
    few = 16 if name in ("medusa", "eagle3") else 0  # of the vocabulary
    return drafter_class(name).Config(drafter=name, n_heads=2, draft_vocab=few)


def lowered(function, *shapes):
    """The program for both platforms at once."""
    return jax.export.export(jax.jit(function), platforms=PLATFORMS)(*shapes).mlir_module()


def what_would_be_slow(text):
    """Operations that an accelerator waits for, or that it has no units for."""
    cache = rf"tensor<\d+x\d+x{SLOTS}x{ARCH.head_dim}x\w+>"
    signs = {
        "host callback": r"callback|outfeed|infeed|send_to_host",
        "float64": r"tensor<[^>]*f64>",
        "dynamic shape": r"tensor<\?|x\?",
        "transpose of a cache": rf"stablehlo\.transpose.*\({cache}\)",
    }
    return {what for what, sign in signs.items() if re.search(sign, text)}


@pytest.mark.parametrize("name", thinned(sorted(DRAFTERS), "hydrapp", "medusa"))
def test_the_decode_step_lowers(name):
    llama = Llama(decoding_config(ARCH), jnp.bfloat16, shards=1)
    drafter = make_drafter(heads_of(name), decoding_config(ARCH))
    engine = Engine(llama, drafter, TREE, "sampled")
    variables = abstract_variables(ARCH, drafter, jnp.bfloat16)
    state = abstract_state(engine, variables, 8)
    assert state.cache.slots == SLOTS
    text = lowered(lambda v, s: decode_step(engine, v, s), variables, state)
    assert what_would_be_slow(text) == set()


@pytest.mark.parametrize("name", thinned(sorted(DRAFTERS), "medusa"))
def test_the_training_step_lowers(name):
    cfg = Config(
        model=ModelConfig(arch=ARCH, param_dtype="bfloat16"),
        heads=heads_of(name),
        data=DataConfig(seq_len=32),
        optim=OptimConfig(name="adamw8bit" if name == "medusa" else "adamw"),
        train=TrainConfig(batch_size=2, loss_chunk=16, remat=False, steps=2),
        mesh=(1, 1, 1),
    )
    if name == "medusa":  # the whole: adapters with heads, recomputed, against the teacher
        cfg.train.stage, cfg.train.backbone_loss, cfg.train.remat = "medusa2", "kl", True
        cfg.lora.rank, cfg.dry_run = 4, True
    shapes = dry.step_shapes(cfg)
    text = lowered(shapes.step, shapes.state, shapes.frozen, shapes.batch)
    assert what_would_be_slow(text) == set()


def test_what_would_be_slow_is_seen():
    def slow(x, cache):
        jax.debug.callback(lambda v: None, x[0])
        return x, jnp.transpose(cache, (0, 1, 3, 2))

    x, cache = jnp.zeros(4), jnp.zeros((1, 2, SLOTS, 8))
    text = jax.jit(slow).lower(x, cache).as_text()
    assert what_would_be_slow(text) == {"host callback", "transpose of a cache"}
    assert what_would_be_slow("tensor<4x?xf32>") == {"dynamic shape"}
    assert what_would_be_slow("tensor<4x2xf64>") == {"float64"}
