"""config.json of an EAGLE-3 directory of speculators, known by `TYPE`, read into the fields of EAGLE's form and written.

  speculators_model_type             "eagle3"
  speculators_config                 algorithm, proposal_methods, default_proposal_method, verifier
  transformer_layer_config           the layers, as in a model's config.json
  draft_vocab_size, target_hidden_size
  norm_before_residual, fc_norm, norm_output, norm_before_fc
  eagle_aux_hidden_state_layer_ids   layers whose input is read; none: 2, L / 2, L - 3

Tapped layers are numbered as in vLLM: i is the stream that enters layer i. SpecForge and SGLang number them by
the stream that leaves a layer; files that were converted from theirs may hold these numbers unchanged,
and vLLM runs such heads on other layers than they were trained on.
"""

from collections.abc import Set

from medusa_jax.errors import UserError
from medusa_jax.interop.fields import Fields
from medusa_jax.whole_files import Json

TYPE, LAYERS = "speculators_model_type", "transformer_layer_config"
PARTS, TAPS = "speculators_config", "eagle_aux_hidden_state_layer_ids"
# Fields that `eagle3_files.py` reads under the same names.
SHARED = {
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "fc_norm", "norm_output",
    "norm_before_fc",
}  # fmt: skip
UNUSED = {
    "architectures", "auto_map", "dtype", "speculators_version", "tie_word_embeddings",
    "torch_dtype", "transformers_version",
}  # fmt: skip
# Tokens that engines draft at a time by default.
SPECULATIVE_TOKENS = 4


def unknown(fields: Json, known: Set[str]) -> list[str]:
    """Unknown fields with a value: null, false, 0 and empty values change nothing."""
    return sorted(name for name in fields.keys() - known if fields[name])


def read(file: str, config: Json) -> tuple[Json, str]:
    """The fields as EAGLE's form has them, and `heads.tap_layers`.

    Raises:
      UserError: another kind of heads; fields that are unknown, missing or ambiguous.
    """
    layers, parts = (Fields(file, config).table(name) for name in (LAYERS, PARTS))
    algorithm = parts.get("algorithm")
    if (config[TYPE], algorithm) != ("eagle3", "eagle3"):
        raise UserError(
            f"{file}: of speculators' heads only eagle3 is supported, not {config[TYPE]!r} with "
            f"algorithm {algorithm!r}"
        )
    known = SHARED | UNUSED | {TYPE, PARTS, LAYERS, TAPS, "embed_requires_grad"}
    for name in unknown(config, known):
        raise UserError(
            f"{file} has a field that speculators is not known to write: {name!r}"
        )
    if config.get("embed_requires_grad"):
        raise UserError(f"{file}: heads with a trained embedding are not supported")
    if "norm_before_residual" not in config:
        raise UserError(
            f"{file} does not say norm_before_residual, which is false in speculators and true in "
            "vLLM: add it"
        )
    fields = {name: config[name] for name in SHARED & config.keys()}
    taps = Fields(file, config).items(TAPS, int, []) if config.get(TAPS) is not None else []
    return layers | fields, ",".join(map(str, taps))


def write(
    layers: Json, fields: Json, taps: tuple[int, ...], n_heads: int,
    verifier: Json,
) -> Json:  # fmt: skip
    """config.json of heads.

    Args:
      layers: config.json of a model of these layers.
      fields: `SHARED`, as far as they are not false, and the type of the tensors.
      verifier: `name_or_path` (speculators reads the embedding there) and `architectures` of the backbone.
    """
    absent = dict.fromkeys(
        sorted(SHARED - {"draft_vocab_size", "target_hidden_size"}), False
    )
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": min(n_heads, SPECULATIVE_TOKENS),
    }
    parts = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": verifier,
    }
    return absent | fields | {
        "architectures": ["Eagle3DraftModel"],
        TYPE: "eagle3",
        PARTS: parts,
        TAPS: list(taps),
        LAYERS: {name: x for name, x in layers.items() if name != "architectures"},
        "tie_word_embeddings": False,
    }  # fmt: skip
