"""Keys of Hugging Face checkpoints, and the parameters that they hold."""

import re

# Buffers that old versions stored and every version recomputes.
HARMLESS = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
# Medusa heads merged into a model, which --drafter reads.
HEADS = "medusa_head."
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Of vision models: the prefix of the language model's keys, and what text does not use.
LANGUAGE_MODEL = re.compile(r"^(model\.)?language_model\.")
NOT_OF_TEXT = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|visual|mtp)\.")
# Names that torch's wrappers of a module add to keys.
WRAPPER = re.compile(
    r"(?:(?<=\.)|^)(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# A key of a decoder layer: its prefix before `model.layers` or `layers`.
LAYER = re.compile(r"(.*?)(?:model\.)?layers\.\d+\.")


def locate(path: str) -> tuple[str, bool]:
    """Return the Hugging Face key of a parameter, and whether it is stored transposed.

    Example: `layers_0/self_attn/q_proj/kernel` [in, out] is `model.layers.0.self_attn.q_proj.weight`
    [out, in]; `norm/scale` is `model.norm.weight`, unchanged.
    """
    name = re.sub(r"^layers_(\d+)/", r"layers/\1/", path).replace("/", ".")
    if not name.startswith("lm_head."):
        name = f"model.{name}"
    stem, leaf = name.rsplit(".", 1)
    return f"{stem}.{'bias' if leaf == 'bias' else 'weight'}", leaf == "kernel"
