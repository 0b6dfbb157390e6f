"""config.json of DFlash and DSpark heads of z-lab, SpecForge, DeepSpec and speculators.

It describes the layers. `block_size`, `mask_token_id`, `target_layer_ids` and the fields of the Markov head are there,
in its table `dflash_config`, or in both. Layers are numbered from 0 by their outputs (-1: the embedding), one less
than in `heads.tap_layers`. Architecture and fields say whether the root's slot guesses: then a block has `block_size`
guesses, else one less. speculators has the layers' fields in a table (`speculators_config.py`) and numbers layers by
their inputs.
"""

from medusa_jax.errors import UserError
from medusa_jax.files.families import FAMILIES
from medusa_jax.files.hf_config import window_layers
from medusa_jax.files.layouts import speculators_config
from medusa_jax.files.layouts.other_fields import check_others
from medusa_jax.typed import Fields
from medusa_jax.whole_files import Json

TABLE, TAPS = "dflash_config", "target_layer_ids"
# The tapped layers of speculators, and its other fields that are read here.
INPUTS = "aux_hidden_state_layer_ids"
_SPECULATORS = {
    "block_size", "mask_token_id", "sample_from_anchor", "sliding_window_non_causal", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
}  # fmt: skip
# Values that the computation here has; others would change it.
_EXPECTED = {
    "projector_type": ("dflash", "dspark"), "markov_head_type": ("vanilla",),
    "attention_bias": (False,), "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0), "final_logit_softcapping": (0, 0.0),
}  # fmt: skip
_READ = {"mask_token_id", "sliding_window_non_causal", "is_causal", "causal"}


def read(file: str, config: Json) -> Fields:
    """The fields that z-lab's form has, without nulls; those of speculators too.

    Raises:
      UserError: a value that is not supported, or two of one field.
    """
    if speculators_config.TYPE in config:
        values = _of_speculators(file, config)
    else:
        table = Fields(file, config).table(TABLE)
        for name in config.keys() & table.keys():
            if config[name] != table[name]:
                raise UserError(
                    f"{file}: {name} is {config[name]!r}, and {table[name]!r} in {TABLE}"
                )
        values = config | table
    fields = Fields(file, {k: x for k, x in values.items() if x is not None})
    check_others(file, fields.values, _READ | _EXPECTED.keys())
    fields.expect(_EXPECTED)
    return fields


def _of_speculators(file: str, config: Json) -> Json:
    """The fields that z-lab's form has; layers by their outputs."""
    kinds = ("dflash", "dspark")
    values, taps = speculators_config.read(file, config, kinds, _SPECULATORS, INPUTS)
    if (width := values.get("target_hidden_size")) not in (None, values.get("hidden_size")):
        raise UserError(
            f"{file}: target_hidden_size {width!r} is not the layers' hidden_size"
        )
    if taps:
        values[TAPS] = [i - 1 for i in taps]
    dspark = config[speculators_config.TYPE] == "dspark"
    values.setdefault("sample_from_anchor", dspark)
    values.setdefault("markov_rank", 256 if dspark else 0)
    values.setdefault("sliding_window_non_causal", False)
    return values


def tapped(fields: Fields, n_layers: int) -> list[int]:
    """`target_layer_ids`; where a file lacks them as many as it has layers, as z-lab's code distributes them."""
    if TAPS in fields.values:
        taps = fields.items(TAPS, int)
        if sorted(taps) != taps or min(taps, default=-2) < -1:
            raise UserError(
                f"{fields.file}: {TAPS} should be ascending numbers from -1 on, not {taps}"
            )
        return taps
    depth = fields.count("num_target_layers")
    if n_layers == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (n_layers - 1)) for i in range(n_layers)]


def root_guesses(fields: Fields, rank: int) -> bool:
    """Whether the root's slot guesses, as in DSpark and all that DeepSpec trains, DFlash of rank 0 included."""
    if "sample_from_anchor" in fields.values:
        return fields.switch("sample_from_anchor")
    names = " ".join(fields.items("architectures", str, []))
    if rank or "DSpark" in names or fields.values.get("projector_type") == "dspark":
        return True
    return "num_anchors" in fields.values and "DFlash" not in names


def sight(fields: Fields, n_layers: int) -> Json:
    """What slots see in each layer: fields of `heads/dflash.py`. speculators counts windows from the root."""
    qwen3 = FAMILIES["qwen3"]
    fields = Fields(fields.file, qwen3.defaults | fields.values)
    windows = window_layers(qwen3, fields, n_layers)
    sliding = [str(j) for j, has_window in enumerate(windows) if has_window]
    causal = "none" if fields.switch("sliding_window_non_causal") else "sliding"
    for name in ("causal", "is_causal"):  # of all layers; the second wins in vLLM
        if name in fields.values:
            causal = "all" if fields.switch(name) else "none"
    return {
        "sliding_layers": ",".join(sliding),
        "window": fields.count("sliding_window") if sliding else 0,
        "window_at_root": bool(sliding) and "sliding_window_non_causal" in fields.values,
        "causal": causal,
    }
