"""Low-rank adapters (LoRA, Hu et al. 2021): a variable collection next to the parameters.

    y = x W + (alpha / rank) (dropout(x) A) B        A [in, rank] at random, B [rank, out] zero

`apply({"params": p, "lora": scale(l, ...)})` is the adapted model, `apply({"params": p})` the original.
Every linear layer has an adapter, including the LM head, even if tied. `x W` and `(x A) B` are
separate products in training: with W + AB, autodiff would build a full-size dW.
"""

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from medusa_jax.arch import LlamaConfig
from medusa_jax.config import LoraConfig
from medusa_jax.model.convert import abstract_params
from medusa_jax.model.llama import decoding_config
from medusa_jax.sharding import Params


def adapted_layers(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """Module path -> (in, out) of every layer that gets an adapter: all with a kernel, and the LM head, even if tied.

    From the configuration, since the parameters may be quantised.
    """
    shapes = flatten_dict(abstract_params(decoding_config(config)), sep="/")
    return {
        path.removesuffix("/kernel"): leaf.shape
        for path, leaf in shapes.items()
        if path.endswith("/kernel")
    }


def init_lora(config: LlamaConfig, key: jax.Array, rank: int) -> Params:
    """Fresh adapters of every layer of a backbone."""
    return init_factors(adapted_layers(config), key, rank)


def init_factors(sizes: dict[str, tuple[int, int]], key: jax.Array, rank: int) -> Params:
    """Fresh float32 adapters by path: A uniform in +-1/sqrt(in) (as peft draws it), B zero."""
    lora: Params = {}
    for i, (path, (n_in, n_out)) in enumerate(sizes.items()):
        bound = n_in**-0.5
        a = jax.random.uniform(
            jax.random.fold_in(key, i), (n_in, rank), jnp.float32, -bound, bound
        )
        lora |= {f"{path}/a": a, f"{path}/b": jnp.zeros((rank, n_out))}
    return unflatten_dict(lora, sep="/")  # type: ignore[no-any-return]


def scale(lora: Params, cfg: LoraConfig) -> Params:
    """The collection that layers read: B times alpha / rank, and the dropout's keep rate."""

    def walk(module: Params) -> Params:
        if "a" not in module:
            return {name: walk(inner) for name, inner in module.items()}
        b = module["b"] * (cfg.alpha / cfg.rank)
        return {"a": module["a"], "b": b, "keep": jnp.asarray(1.0 - cfg.dropout)}

    return walk(lora)


def with_dropout(lora: Params, key: jax.Array) -> Params:
    """The scaled collection with a dropout seed for every adapter.

    One call draws all: folding a key per layer would compile a program per layer.
    """
    treedef: jax.tree_util.PyTreeDef
    leaves, treedef = jax.tree.flatten(lora, is_leaf=lambda module: "a" in module)
    seeds = jax.random.bits(key, (len(leaves), 2), jnp.uint32)
    return treedef.unflatten([
        module | {"seed": seed} for module, seed in zip(leaves, seeds, strict=True)
    ])  # fmt: skip


def merge(
    config: LlamaConfig, params: Params, lora: Params, cfg: LoraConfig
) -> tuple[LlamaConfig, Params]:
    """Merge the adapters into every layer of a backbone: W + (alpha / rank) A B in float32.

    A tied LM head becomes a separate one, so the configuration may change.
    """
    if config.tie_embeddings:
        lm_head = {"kernel": params["embed_tokens"]["embedding"].T}
        params = params | {"lm_head": lm_head}
    return decoding_config(config), merged(params, lora, cfg)


def merged(params: Params, lora: Params, cfg: LoraConfig) -> Params:
    """Parameters of layers of any kind with the adapters that they have."""
    if "a" in lora:
        product = jnp.dot(lora["a"], lora["b"], precision=lax.Precision.HIGHEST)
        kernel = params["kernel"].astype(jnp.float32) + product * (cfg.alpha / cfg.rank)
        return params | {"kernel": kernel}
    return params | {name: merged(params[name], inner, cfg) for name, inner in lora.items()}
