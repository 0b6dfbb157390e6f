"""`python -m research prefill_cost`: the memory needed to read a prompt.

Prefill is compiled for a published model shape without weights. Its memory is the weights, the caches
that it fills, and the temporaries of the compiled program.
"""

import dataclasses
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax.api.weightless import abstract_variables, prefill_arguments
from medusa_jax.commands.flags import Program, flag, numbers
from medusa_jax.config import LlamaConfig
from medusa_jax.console import announced, use_compilation_cache
from medusa_jax.decoding.prefill import prefill
from medusa_jax.decoding.state import Engine
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import Cell, table_of
from medusa_jax.files.shapes import SHAPES
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.model.llama import Llama, decoding_config
from medusa_jax.sharding import Params
from medusa_jax.training.dry import memory_of, stored_bytes
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json

PARTS = ("weights", "caches", "temporaries", "total")
COLUMNS: dict[str, Cell] = {
    "tokens": "{tokens:,}",
    "cache slots": "{slots:,}",
    **{part: f"{{{part}_gib:.2f}}" for part in PARTS},
}
EXAMPLES = """examples:
  python -m research prefill_cost
  python -m research prefill_cost --shape llama3.1-8b --tokens 131072
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Memory of reading a prompt: weights, caches, temporaries."""

    shape: str = flag("shape of a published model", "llama-7b", choices=sorted(SHAPES))
    tokens: tuple[int, ...] = flag(
        "lengths of the prompt", "1024,2048,8192,32768", type=numbers()
    )
    batch: int = flag("rows", 1)
    drafter: str = flag("drafter on the model", "hydra")
    json: bool = flag("one JSON object instead of a table", False)


def engine_of(
    arch: LlamaConfig, drafter_name: str, dtype: DTypeLike
) -> tuple[Engine, Params]:
    """The engine with a chain of all heads, and the shapes of its variables in `dtype`."""
    if drafter_name not in DRAFTERS:
        raise UserError(f"unknown drafter {drafter_name!r}: there are {sorted(DRAFTERS)}")
    drafter = make_drafter(drafter_class(drafter_name).Config(drafter=drafter_name), arch)
    llama = Llama(decoding_config(arch), dtype, shards=1, kernels=choose_kernels())
    engine = Engine(llama, drafter, Tree.chain(drafter.n_heads))
    return engine, abstract_variables(arch, drafter, dtype)


def temporary_bytes(arch: LlamaConfig, drafter: str, batch: int, tokens: int) -> int:
    """Temporaries of the compiled `prefill`.

    Compiled in float32, which every backend supports directly: in bfloat16 an accelerator needs at
    most as many bytes, but XLA for CPU would convert the weights.
    """
    shapes = prefill_arguments(*engine_of(arch, drafter, jnp.float32), batch, tokens)
    return memory_of(prefill.lower(*shapes).compile())["temporary_bytes"]


def measure(
    shape: str, lengths: Sequence[int], batch: int = 1, drafter: str = "hydra"
) -> Json:
    """Bytes for prompts of these lengths: weights and caches in bfloat16, and temporaries."""
    if batch < 1 or min(lengths) < 1:
        raise UserError("--batch and --tokens are 1 or more")
    arch, rows = SHAPES[shape], []
    for tokens in lengths:
        engine, slots, variables, *rest = prefill_arguments(
            *engine_of(arch, drafter, jnp.bfloat16), batch, tokens
        )
        state = jax.eval_shape(
            lambda *rest, e=engine, s=slots: prefill(e, s, *rest), variables, *rest
        )
        with announced(f"compiling prefill of {tokens:,} tokens"):
            temporaries = temporary_bytes(arch, drafter, batch, tokens)
        found = {
            "weights": stored_bytes(variables),
            "caches": stored_bytes((state.cache, state.drafter)),
            "temporaries": temporaries,
        }
        total = {"total": sum(found.values())}
        rows.append({"tokens": tokens, "slots": slots} | found | total)
    return {"shape": shape, "batch": batch, "drafter": drafter, "rows": rows}


def run(flags: Flags) -> int:
    """Measure and print."""
    lengths = flags.tokens
    use_compilation_cache()
    found = measure(flags.shape, lengths, flags.batch, flags.drafter)
    if flags.json:
        print(json.dumps(found))
        return 0
    gib = [
        row | {f"{part}_gib": row[part] / 2**30 for part in PARTS} for row in found["rows"]
    ]
    print(table_of(gib, COLUMNS))
    print(
        f"\nGiB; {found['shape']} with {found['drafter']} heads, batch {found['batch']}; weights "
        f"and caches in bfloat16, temporaries as compiled in float32"
    )
    return 0


main = Program("python -m research prefill_cost", Flags, run, EXAMPLES)
