"""Programs for accelerators, made where there is none: every drafter's steps lower for TPU and CUDA, and
float32 means float32.

GPUs multiply float32 in TF32, TPUs in bfloat16, unless a product asks for `Precision.HIGHEST`. Programs
are traced and lowered, none is compiled.
"""

import re
from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from cases import thinned, wide

from medusa_jax.config import (
    Config,
    DataConfig,
    LlamaConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from medusa_jax.decoding.prefill import prefill
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.step import decode_step
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.kernels.cuda import CudaKernels
from medusa_jax.kernels.tpu import TpuKernels
from medusa_jax.model.llama import Llama, decoding_config
from medusa_jax.model.lora import merge
from medusa_jax.model.stored import Storage
from medusa_jax.training import dry
from medusa_jax.training.plan import RunPlan
from medusa_jax.tree.tree import Tree
from research.weights import abstract_prompts, abstract_state, abstract_variables

PLATFORMS = {"tpu": TpuKernels(), "cuda": CudaKernels()}
ARCH = LlamaConfig(64, 32, 2, 4, 2, 8, 48, max_position=256)
TREE = Tree.from_choices([[0], [1], [0, 0], [0, 1]])
SLOTS = 1024
NAMES = sorted(DRAFTERS)


def heads_of(name, **fields):
    few = 16 if name in ("medusa", "eagle3") else 0  # of the vocabulary
    fields = {"n_heads": 2, "draft_vocab": few, "rank": 8} | fields
    return drafter_class(name).Config(drafter=name, **fields)


def decoding(heads, dtype, tree=TREE, weights="", platform="cuda"):
    """A platform's decode step and the prefill before it, each with its arguments."""
    config, kernels = decoding_config(ARCH), PLATFORMS[platform]
    llama = Llama(config, dtype, shards=1, kernels=kernels)
    drafter = make_drafter(heads, decoding_config(ARCH))
    engine = Engine(llama, drafter, tree, "sampled")
    variables = abstract_variables(ARCH, drafter, dtype, Storage(weights=weights))
    state = abstract_state(engine, variables, 8)
    assert state.cache.slots == SLOTS
    slots, prompts = abstract_prompts(engine, 1, 8)
    yield partial(decode_step, engine), variables, state
    yield partial(prefill, engine.depth_only, slots), variables, prompts


def training(cfg):
    shapes = dry.shapes_of(RunPlan(cfg, dry=True))
    return shapes.step, shapes.state, shapes.frozen, shapes.batch


def config_of(heads, dtype, **train):
    small = {"batch_size": 2, "loss_chunk": 16, "remat": False, "steps": 2, "dtype": dtype}
    return Config(
        model=ModelConfig(arch=ARCH, param_dtype=dtype),
        heads=heads,
        data=DataConfig(seq_len=32),
        optim=OptimConfig(name="adamw"),
        train=TrainConfig(**small | train),
        mesh=(1, 1, 1),
        dry_run=True,
    )


def adapted(cfg):
    """Adapters with heads, recomputed, against the teacher."""
    cfg.train.stage, cfg.train.backbone_loss, cfg.train.remat = "medusa2", "kl", True
    cfg.lora.rank = 4
    return cfg


def lowered(platforms, function, *shapes):
    """The program for these platforms."""
    return jax.export.export(jax.jit(function), platforms=platforms)(*shapes).mlir_module()


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


@pytest.mark.parametrize(
    ("name", "platform"),
    thinned(product(NAMES, PLATFORMS), ("hydrapp", "tpu"), ("medusa", "cuda")),
)
def test_the_decode_step_lowers(name, platform):
    step, _ = decoding(heads_of(name), jnp.bfloat16, platform=platform)
    assert what_would_be_slow(lowered([platform], *step)) == set()


@pytest.mark.parametrize("name", thinned(NAMES, "medusa"))
def test_the_training_step_lowers(name):
    cfg = config_of(heads_of(name), "bfloat16")
    if name == "medusa":
        cfg = adapted(cfg)
        cfg.optim.name = "adamw8bit"
    assert what_would_be_slow(lowered([*PLATFORMS], *training(cfg))) == set()


def test_what_would_be_slow_is_seen():
    slow = jax.jit(lambda x: (jax.debug.callback(print, x[0, 0, 0, 0]), x.swapaxes(2, 3)))
    text = slow.lower(jnp.zeros((1, 2, SLOTS, 8))).as_text()
    assert what_would_be_slow(text) == {"host callback", "transpose of a cache"}
    assert what_would_be_slow("tensor<4x?xf64>") == {"dynamic shape", "float64"}


def products(jaxpr):
    """Every float32 product of a program: (where it is written, its precision)."""
    for equation in jaxpr.eqns:
        is_product = equation.primitive.name == "dot_general"
        if is_product and equation.invars[0].aval.dtype == jnp.float32:
            yield equation.source_info.traceback, equation.params["precision"]
        inside = list(equation.params.values())
        for inner in jax.tree.leaves(inside, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner)


def check_products(function, *shapes):
    """All products of a program are exact ones, and there are some."""
    found = list(products(jax.make_jaxpr(function)(*shapes).jaxpr))
    assert found
    for where, precision in found:
        assert precision == (jax.lax.Precision.HIGHEST,) * 2, f"{precision}\n{where}"


@pytest.mark.parametrize("lm_head", [*wide("shared", "own"), "low_rank"])
@pytest.mark.parametrize(
    ("name", "weights"),
    thinned(
        product(NAMES, ("", "int8")),
        ("medusa", "int8"),
        *((name, "") for name in ("medusa", "eagle3")),
    ),
)
def test_drafters_multiply_exactly(name, weights, lm_head):
    heads = heads_of(name, lm_head=lm_head)
    for tree in (TREE, Tree.none())[: 1 + (name == "medusa")]:
        for program in decoding(heads, jnp.float32, tree, weights):
            check_products(*program)
    if not weights:
        check_products(*training(config_of(heads, "float32")))


@pytest.mark.parametrize("stage", ["backbone", "native", "medusa1", "medusa2"])
def test_losses_multiply_exactly(stage):
    """medusa1 with a teacher and noise; medusa2 with adapters on a quantised backbone, its loss the KL."""
    cfg = config_of(heads_of("medusa", lm_head="low_rank"), "float32", stage=stage)
    cfg.model.arch = replace(ARCH, tie_embeddings=stage == "backbone")
    if stage == "medusa1":
        cfg.train.teacher_weight = cfg.train.hidden_noise = 1.0
    if stage == "medusa2":
        cfg = adapted(cfg)
        cfg.lora.dropout, cfg.model.path, cfg.model.quantise = 0.1, "somewhere", "nf4"
    check_products(*training(cfg))


def test_adapters_are_merged_exactly():
    cfg = adapted(config_of(heads_of("medusa"), "float32"))
    shapes = dry.shapes_of(RunPlan(cfg, dry=True))
    given = shapes.frozen["backbone"], shapes.state.params["lora"]
    check_products(lambda *parts: merge(ARCH, *parts, cfg.lora)[1], *given)
