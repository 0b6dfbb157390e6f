"""Compile the decode loop of a model of shapes only, for any device."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Compiled
from jax.typing import DTypeLike

from medusa_jax.api.weightless import abstract_state, abstract_variables
from medusa_jax.config import LlamaConfig
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.devices.collectives import collectives, sent_by_kind
from medusa_jax.evaluate.compiled.cycles import Cost, kernels, of_all_layers, step_costs
from medusa_jax.evaluate.compiled.reads import bytes_read
from medusa_jax.evaluate.compiled.targets import Target
from medusa_jax.evaluate.compiled.text import Program, read_program
from medusa_jax.heads.drafter import Drafter
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
from medusa_jax.training.dry import memory_of
from medusa_jax.tree.tree import Tree


@dataclass(frozen=True)
class Case:
    """What is compiled, the drafter and its tree aside.

    Attributes:
      context: tokens of each row before the step.
      filters: `cycles.FILTERS` that the rows use.
      layers: layers that are compiled; figures are extrapolated to `config.n_layers`.
      storage: the form of kernels.
    """

    config: LlamaConfig
    target: Target
    batch: int = 1
    context: int = 900
    mesh: tuple[int, int, int] = (1, 1, 1)
    acceptance: str = "greedy"
    filters: tuple[str, ...] = ()
    dtype: DTypeLike = jnp.bfloat16
    layers: int = 2
    storage: Storage | None = None

    @property
    def compiled_layers(self) -> int:
        """`layers`, as far as the model has them."""
        return min(self.layers, self.config.n_layers)

    @property
    def within(self) -> float:
        """What extrapolating to all layers may be off, as a share (docs/accelerators.md)."""
        if self.compiled_layers == self.config.n_layers:
            return 0.0
        return 0.02 if self.layers >= 8 else 0.07


@dataclass(frozen=True)
class Step:
    """Figures of one device for a model of all layers.

    Attributes:
      stages: cycles by stage; empty on a GPU.
      weights: bytes of weights that a step has to read (the embedding is looked up).
      memory: bytes of arguments, temporaries and results; temporaries are of the compiled layers.
      kernels: kernels of a step, instructions that move or compute on a TPU.
      read: bytes that the kernels of a step read; 0 on a TPU.
      sent: bytes that a device sends in a step, by collective.
      program, costs: the compiled program of few layers.
    """

    stages: dict[str, float]
    weights: int
    memory: int
    kernels: int
    read: int
    sent: dict[str, float]
    program: Program
    costs: list[Cost]
    cache_numbers: int

    @property
    def cycles(self) -> float | None:
        """Cycles of a step; None without estimates."""
        return sum(self.stages.values()) or None

    def share_of_bound(self, target: Target) -> float | None:
        """Cycles of reading each weight once at peak bandwidth, over those of the step."""
        if self.cycles is None:
            return None
        return self.weights / target.bytes_per_cycle / self.cycles


def compiled_loop(
    config: LlamaConfig, drafter: Drafter, tree: Tree, mesh: Mesh, rows: int, context: int,
    dtype: DTypeLike, acceptance: str = "greedy", storage: Storage | None = None,
) -> tuple[Compiled, Params, DecodeState]:  # fmt: skip
    """Compile the loop of decode steps on a mesh from shapes; also returns its variables and state.

    Args:
      context: tokens of each row before the step, which determine the number of cache slots.
    """
    several = mesh if mesh.size > 1 else None
    shards = mesh.shape["tensor"]
    llama = Llama(decoding_config(config), dtype, shards=shards, mesh=several)
    engine = Engine(llama, drafter, tree, acceptance)
    of_heads = drafter if tree.depth else None
    shapes = abstract_variables(config, of_heads, dtype, storage, shards)
    state = abstract_state(engine, shapes, context, rows)
    variables = shapes_with(
        shapes, {k: param_shardings(mesh, v) for k, v in shapes.items()}
    )
    state = shapes_with(state, decode_shardings(mesh, state))
    steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    with jax.set_mesh(mesh):
        compiled = decode_loop.lower(engine, variables, state, steps).compile()
    return compiled, variables, state


def compile_step(case: Case, drafter: Drafter, tree: Tree) -> Step:
    """Compile `decode_loop` and read its figures.

    Raises:
      UserError: the mesh does not fit.
    """
    few = dataclasses.replace(case.config, n_layers=case.compiled_layers)
    mesh = make_mesh(case.mesh, case.target.devices)
    compiled, variables, state = compiled_loop(
        few,
        drafter,
        tree,
        mesh,
        case.batch,
        case.context,
        case.dtype,
        case.acceptance,
        case.storage,
    )
    text = compiled.as_text() or ""
    program = read_program(text)
    peaks = case.target.bytes_per_cycle, case.target.flops_per_cycle
    costs = step_costs(program, *peaks, case.filters)
    more = case.config.n_layers - few.n_layers
    layer = bytes_on_device((variables["backbone"]["layers_0"], state.cache.layers[0]))
    backbone = {k: v for k, v in variables["backbone"].items() if k != "embed_tokens"}
    weights = bytes_on_device((backbone, variables["heads"] if tree.depth else {}))
    weights += more * bytes_on_device(variables["backbone"]["layers_0"])
    sent = sent_by_kind(collectives(text))
    return Step(
        stages=of_all_layers(costs, few.n_layers, case.config.n_layers)
        if case.target.bytes_per_cycle
        else {},
        weights=weights,
        memory=memory_of(compiled)["total_bytes"] + more * layer,
        kernels=round(kernels(costs, few.n_layers, case.config.n_layers)),
        read=round(bytes_read(program, costs, few.n_layers, case.config.n_layers))
        if not case.target.bytes_per_cycle
        else 0,
        sent={k: v * case.config.n_layers / few.n_layers for k, v in sent.items()},
        program=program,
        costs=costs,
        cache_numbers=bytes_on_device(state.cache.layers[0][0])
        // jnp.dtype(case.dtype).itemsize,
    )
