"""Hydra and Hydra++ heads in their authors' layout: read (recognised by their keys) and written.

  hydra_mlp.{k}.{i}.linear.weight, .bias     hidden layers; the first reads (k + 2) D
  hydra_mlp.{k}.{i}.res_connection.*         the first layer's skip connection
  hydra_lm_head.{k}.weight, .bias            LM heads (Hydra++: .{k}.1.weight, .bias)
  prefix_embeding_layer.layers.0.*           Hydra++'s decoder layer, as in a Llama model
  prefix_embeding_layer.norm.weight          and its norm

The numbers i skip modules without weights (dropout). Layers 2 to n of a head are one module that runs n - 1
times, so a file has it n - 1 times, or once. The copy of the backbone's embedding, the unused embedding of the
prefix layer and rotary tables are ignored.
"""

import re

import numpy as np

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.files.hf_keys import HARMLESS
from medusa_jax.files.hf_keys import locate as locate_in_llama
from medusa_jax.files.layouts.layout import Export, HeadFiles, Layout, without_factor
from medusa_jax.files.layouts.medusa_files import check_count
from medusa_jax.files.layouts.stored_heads import Arrays, StoredHeads
from medusa_jax.files.tensor import Tensors, read_whole
from medusa_jax.heads.hydra import HydraConfig
from medusa_jax.heads.hydrapp import HydraPPConfig
from medusa_jax.typed import Fields

HYDRA = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(?:linear|res_connection)\.(?:weight|bias)")
_PREFIX = "prefix_embeding_layer."
_UNUSED = ("input_embed_fn.weight", f"{_PREFIX}embed_tokens.weight")


class HydraFiles(Layout):
    """The authors' `hydra_lm_head.pt` and `config.json`."""

    name = "hydra"
    drafters = ("hydra", "hydrapp")
    loading = "`HydraModel.from_pretrained` of the authors' code"

    def why_not(self, heads: HeadsConfig, llama: LlamaConfig | None) -> str:
        """Layers 2 to n are one module in the authors' code, and LM heads are separate."""
        assert isinstance(heads, HydraConfig)
        if heads.n_layers > 2 and not heads.tie_layers:
            return (
                "Hydra's code runs one layer for layers 2 to n, heads.tie_layers is false"
            )
        if heads.lm_head == "shared" or heads.skip == "fixed" or not heads.lm_bias:
            return (
                "Hydra's code needs separate LM heads with biases and skip identity or random, not "
                f"lm_head {heads.lm_head!r}, lm_bias {heads.lm_bias}, skip {heads.skip!r}"
            )
        return without_factor("Hydra's code", llama)

    def fits(self, tensors: Tensors) -> bool:
        return any(HYDRA.fullmatch(key) for key in tensors)

    def open(self, files: HeadFiles) -> StoredHeads:
        """Describe the heads.

        Raises:
          UserError: other layers than in the configuration; heads that do not read the last hidden state or the
            drafted tokens.
        """
        source, tensors, config = files.source, files.tensors, files.config
        fields = Fields(
            files.config_file, {k: x for k, x in config.items() if x is not None}
        )
        fields.expect({"hidden_state_offset": (0,), "grounded_heads": (True,)})
        numbers: dict[int, set[int]] = {}
        for key in tensors:
            if match := HYDRA.fullmatch(key):
                numbers.setdefault(int(match[1]), set()).add(int(match[2]))
        n_heads = max(numbers) + 1
        layers = sorted(numbers[min(numbers)])
        check_count(files, "heads", n_heads, "hydra_num_heads")
        n_layers = fields.count("hydra_num_layers", len(layers))
        # A conversion to safetensors may have dropped copies of the shared layer.
        dropped = len(layers) == 2 < n_layers
        if not dropped:
            check_count(files, "layers", len(layers), "hydra_num_layers")
        is_tied = dropped or _same_weights(tensors, layers, n_heads)
        plus = any(key.startswith(_PREFIX) for key in tensors)
        between = ".1" if "hydra_lm_head.0.1.weight" in tensors else ""
        heads = (HydraPPConfig if plus else HydraConfig)(
            n_heads=n_heads,
            n_layers=n_layers,
            tie_layers=is_tied,
            lm_bias=f"hydra_lm_head.0{between}.bias" in tensors,
            skip="random",
            dropout=0.0,
        )

        def locate(path: str) -> tuple[str, bool]:
            return _key(path, layers, between), path.endswith("/kernel")

        copies = {f"{j}" for j in layers[2:]} if is_tied else set()

        def ignore(key: str) -> bool:
            match = HYDRA.fullmatch(key)
            copy = match is not None and match[2] in copies
            return copy or key in _UNUSED or bool(HARMLESS.search(key))

        return StoredHeads(
            source=source,
            directory=files.directory,
            layout="Hydra++ heads" if plus else "Hydra heads",
            heads=heads,
            tensors=tensors,
            locate=locate,
            ignore=ignore,
            meta=config,
            copied_embedding=_UNUSED[0],
        )

    def write(self, export: Export, out: str) -> None:
        """Write them with copies of the shared layer and of the backbone's embedding."""
        heads = export.stored.heads
        plus = heads.drafter == "hydrapp"
        arrays: Arrays = {}
        for path, array in export.whole.items():
            for key in _keys_of(path, heads.n_layers, plus):
                arrays[key] = array.T if path.endswith("/kernel") else array
        arrays |= dict.fromkeys(_UNUSED if plus else _UNUSED[:1], export.embedding())
        config = {
            "base_model_name_or_path": export.base_name,
            "hydra_num_heads": heads.n_heads,
            "hydra_num_layers": heads.n_layers,
            "hydra_head_arch": "prefix-mlp" if plus else "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
        }
        export.write(out, "hydra_lm_head.pt", arrays, config)


def _keys_of(path: str, n_layers: int, plus: bool) -> list[str]:
    """The keys of all copies of a parameter of tied heads in the authors' code."""
    numbers = [2 * j + 1 if plus else j for j in range(n_layers)]
    between = ".1" if plus else ""
    if "/layers_1/" not in path:
        return [_key(path, numbers, between)]
    return [_key(path, [numbers[0], number], between) for number in numbers[1:]]


def _key(path: str, layers: list[int], between: str) -> str:
    """A path of `heads/hydra.py` or `heads/hydrapp.py` -> key.

    Args:
      layers: the number of each layer's module.
      between: the part of the key between the number of an LM head and its leaf.
    """
    if path.startswith("prefix/"):
        inner, _ = locate_in_llama(path.removeprefix("prefix/"))
        return f"{_PREFIX}{inner.removeprefix('model.')}"
    match = re.fullmatch(
        r"heads_(\d+)/(?:layers_(\d+)(?:/(linear|skip))?|lm_head)/(kernel|bias)", path
    )
    assert match is not None, path
    k, j, part, leaf = match.groups()
    leaf = {"kernel": "weight"}.get(leaf, leaf)
    if j is None:
        return f"hydra_lm_head.{k}{between}.{leaf}"
    part = {"skip": "res_connection"}.get(part, "linear")
    return f"hydra_mlp.{k}.{layers[int(j)]}.{part}.{leaf}"


def _same_weights(tensors: Tensors, layers: list[int], n_heads: int) -> bool:
    """Whether layers 2 to n of every head have the same weights (n > 2)."""
    for k in range(n_heads):
        for leaf in ("weight", "bias"):
            names = [f"hydra_mlp.{k}.{j}.linear.{leaf}" for j in layers[1:]]
            if len(names) < 2 or not tensors.keys() >= set(names):
                return False
            kernel, *twins = (read_whole(tensors[name]) for name in names)
            if not all(np.array_equal(kernel, twin) for twin in twins):
                return False
    return True
