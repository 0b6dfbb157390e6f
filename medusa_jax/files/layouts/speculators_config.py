"""config.json of a directory of speculators, known by `TYPE`: EAGLE-3, DFlash or DSpark, read and written.

  speculators_model_type             "eagle3", "dflash" or "dspark"
  speculators_config                 algorithm, proposal_methods, default_proposal_method, verifier
  transformer_layer_config           the layers, as in a model's config.json
  draft_vocab_size, target_hidden_size
  eagle_aux_hidden_state_layer_ids   EAGLE-3: layers whose input is read; none: 2, L / 2, L - 3
  aux_hidden_state_layer_ids         DFlash, DSpark: layers whose input is read
  ...                                fields of the kind of heads, under the names of its other files

Tapped layers are numbered as in vLLM: i is the stream that enters layer i. SpecForge, SGLang and z-lab number them by
the stream that leaves a layer; EAGLE-3 files that were converted from theirs may hold these numbers unchanged,
and vLLM runs such heads on other layers than they were trained on.
"""

from collections.abc import Set

from medusa_jax.errors import UserError
from medusa_jax.files.layouts.other_fields import check_others
from medusa_jax.typed import Fields
from medusa_jax.whole_files import Json

TYPE, LAYERS = "speculators_model_type", "transformer_layer_config"
PARTS = "speculators_config"
# `Layout.loading`.
LOADING = "`vllm serve {out}`, which serves the base model with these heads"
# Fields of any kind, read under the same names.
COMMON_FIELDS = {"draft_vocab_size", "target_hidden_size"}


def read(
    file: str, config: Json, kinds: tuple[str, ...], names: Set[str], taps: str
) -> tuple[Json, list[int]]:
    """The fields of the layers, `COMMON_FIELDS` and `names`; the tapped layers, [] for the paper's.

    Args:
      kinds: the kinds of heads that the weights may be.
      names: the fields of these kinds.
      taps: the field with the tapped layers.

    Raises:
      UserError: another kind of heads; a field that may change the computation.
    """
    layers, parts = (Fields(file, config).table(name) for name in (LAYERS, PARTS))
    kind, algorithm = config[TYPE], parts.get("algorithm")
    if kind not in kinds or algorithm != kind:
        raise UserError(
            f"{file}: only {' or '.join(kinds)} is supported for these weights, not {kind!r} with "
            f"algorithm {algorithm!r}"
        )
    names = names | COMMON_FIELDS
    check_others(file, config, names)
    tapped = []
    if config.get(taps) is not None:
        tapped = Fields(file, config).items(taps, int, [])
    return layers | {name: config[name] for name in names & config.keys()}, tapped


def write(
    *, kind: str, architecture: str, layers: Json, fields: Json, tokens: int, verifier: Json
) -> Json:
    """config.json of heads.

    Args:
      layers: config.json of a model of these layers.
      fields: the fields of this kind of heads, the tapped layers among them.
      tokens: how many tokens engines draft at a time by default.
      verifier: `name_or_path` (speculators reads the embedding there) and `architectures` of the backbone.
    """
    parts = {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "verifier": verifier,
    }
    return fields | {
        "architectures": [architecture],
        TYPE: kind,
        PARTS: parts,
        LAYERS: {name: x for name, x in layers.items() if name != "architectures"},
        "tie_word_embeddings": False,
    }  # fmt: skip
