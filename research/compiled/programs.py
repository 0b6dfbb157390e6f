"""Compile the decode loop, or a training step, of a model of shapes only, for any device."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.config import Config
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.heads.drafter import Drafter
from medusa_jax.hlo.collectives import collectives, sent_by_kind
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.model.llama import Llama, decoding_config
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import (
    Params,
    bytes_on_device,
    decode_shardings,
    make_mesh,
    param_shardings,
    replicated,
    shapes_with,
)
from medusa_jax.training import dry
from medusa_jax.training.plan import RunPlan, backbone_shape
from medusa_jax.tree.tree import Tree
from research.compiled.targets import Target
from research.weights import abstract_state, abstract_variables


@dataclass(frozen=True)
class Case:
    """The program to compile, apart from the drafter and its tree.

    Attributes:
      context: tokens of each row before the step.
      layers: layers that are compiled; figures are extrapolated to `config.n_layers`.
      storage: the form of kernels.
    """

    config: LlamaConfig
    target: Target
    batch: int = 1
    context: int = 900
    mesh: tuple[int, int, int] = (1, 1, 1)
    acceptance: str = "greedy"
    dtype: DTypeLike = jnp.bfloat16
    layers: int = 8
    storage: Storage | None = None

    @property
    def compiled_layers(self) -> int:
        """`layers`, as far as the model has them."""
        return min(self.layers, self.config.n_layers)


@dataclass(frozen=True)
class Step:
    """A compiled loop of decode steps; bytes are of one device and of all layers of the model.

    Attributes:
      weights: weights that a step reads (the embedding is looked up).
      memory: arguments, temporaries and results; temporaries are of the compiled layers.
      sent: by collective, in a step.
      cache_numbers: elements of the keys of one layer.
    """

    compiled: Compiled
    weights: int
    memory: int
    sent: dict[str, float]
    cache_numbers: int


def compiled_loop(
    case: Case, drafter: Drafter, tree: Tree
) -> tuple[Compiled, Params, DecodeState]:
    """Compile the loop of decode steps of few layers from shapes; also returns its variables and state."""
    config = dataclasses.replace(case.config, n_layers=case.compiled_layers)
    mesh = make_mesh(case.mesh, case.target.devices)
    dtype, storage, shards = case.dtype, case.storage, mesh.shape["tensor"]
    shared_mesh = mesh if mesh.size > 1 else None
    kernels = choose_kernels(mesh)
    if storage and storage.panel:  # in panels, with fused kernels
        kernels = choose_kernels(mesh, dtype)
    llama = Llama(
        decoding_config(config), dtype, shards=shards, mesh=shared_mesh, kernels=kernels
    )
    engine = Engine(llama, drafter, tree, case.acceptance)
    of_heads = drafter if tree.depth else None
    shapes = abstract_variables(config, of_heads, dtype, storage, shards, kernels)
    state = abstract_state(engine, shapes, case.context, case.batch)
    variables = shapes_with(
        shapes, {k: param_shardings(mesh, v) for k, v in shapes.items()}
    )
    state = shapes_with(state, decode_shardings(mesh, state))
    steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    with jax.set_mesh(mesh):
        compiled = decode_loop.lower(engine, variables, state, steps).compile()
    return compiled, variables, state


def compile_step(case: Case, drafter: Drafter, tree: Tree) -> Step:
    """Compile the decode loop of few layers and read its figures.

    Raises:
      UserError: the mesh does not fit.
    """
    n_compiled = case.compiled_layers
    compiled, variables, state = compiled_loop(case, drafter, tree)
    backbone, cache = variables["backbone"], state.cache.layers[0]
    arrays = {name: x for name, x in backbone.items() if name != "embed_tokens"}
    weights = bytes_on_device((arrays, variables["heads"] if tree.depth else {}))
    n_others = case.config.n_layers - n_compiled
    sent_bytes = sent_by_kind(collectives(compiled.as_text() or ""))
    memory = dry.memory_of(compiled)["total_bytes"]
    return Step(
        compiled,
        weights + n_others * bytes_on_device(backbone["layers_0"]),
        memory + n_others * bytes_on_device((backbone["layers_0"], cache)),
        {kind: n * case.config.n_layers / n_compiled for kind, n in sent_bytes.items()},
        bytes_on_device(cache[0]) // jnp.dtype(case.dtype).itemsize,
    )


def compile_training(
    cfg: Config, target: Target, mesh: tuple[int, int, int]
) -> tuple[Compiled, dict[str, Any]]:
    """Memory and traffic of each device for the recipe's step.

    Args:
      mesh: of the target's devices; one axis may be -1.

    Returns: the program, and the object that `--json` prints: `memory_bytes` are the compiler's,
      `stored_bytes` those of a step's arguments (parameters, moments, batch), `sent_bytes` by collective.

    Raises:
      UserError: sizes that do not fit together.
    """
    cfg = copy.deepcopy(cfg)
    cfg.model.arch = backbone_shape(cfg.model, dry=True)
    cfg.model.path, cfg.model.add_layers, cfg.train.heads_path = "", 0, ""
    cfg.mesh, cfg.dry_run = mesh, True
    plan = RunPlan(cfg, make_mesh(mesh, target.devices), dry=True)
    shapes = dry.shapes_of(plan)
    program = dry.compile_step(*shapes)
    figures, layers = dry.figures(plan, program), plan.arch.n_layers
    return program, {
        "target": target.name,
        "device": target.chip.title,
        "estimated": True,
        "layers": {"compiled": layers, "all": layers},
        "memory_bytes": figures["total_bytes"],
        "sent_bytes": figures["sent_bytes"],
        "stored_bytes": sum(dry.sizes(shapes)["stored"].values()),
    }
