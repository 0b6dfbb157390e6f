"""A model that Tunix trained, as a Hugging Face directory for `medusa own --start` and all other commands.

    python examples/tunix_checkpoint.py CHECKPOINTS/STEP/model_params BASE OUT

BASE is the Hugging Face directory that the training started from: its config.json and tokenizer are kept. Parameters are
named as in Tunix's Llama 3 (google/tunix 0737eb8, tunix/models/llama3/params.py); projections are [D, N, H] and [N, H, D]. A checkpoint of LoRA parameters alone has to be merged in Tunix first.
"""

import re
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from medusa_jax.errors import UserError
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.files.source import flatten
from medusa_jax.model.convert import abstract_params
from medusa_jax.text.tokenizer_files import copy_tokenizer

# A path of our tree and its name in Tunix, in this order; weights are named w, or kernel in the MLP.
NAMES = (
    (r"^embed_tokens/embedding$", "embedder/input_embedding"),
    (r"^norm/scale$", "final_norm/w"),
    (r"^lm_head/kernel$", "lm_head/w"),
    (r"^layers_(\d+)/self_attn/(\w+)/(kernel|scale)$", r"layers/\1/attn/\2/w"),
    (r"^layers_(\d+)/mlp/(\w+)/kernel$", r"layers/\1/mlp/\2/kernel"),
    (r"^layers_(\d+)/(\w+layernorm)/scale$", r"layers/\1/\2/w"),
)


def tunix_name(path):
    """The name of a parameter in Tunix, without the "value" of its variable."""
    for ours, theirs in NAMES:
        if re.search(ours, path):
            return re.sub(ours, theirs, path)
    raise UserError(f"Tunix's Llama has no {path}")


def read(checkpoint, config):
    """The parameters of a checkpoint in our tree.

    Raises:
      UserError: a parameter is missing, or there are others, such as LoRA's.
    """
    tree = ocp.PyTreeCheckpointer().restore(Path(checkpoint).resolve())
    flat = {"/".join(map(str, keys)): x for keys, x in flatten_dict(tree).items()}
    flat = {name.removesuffix("/value"): x for name, x in flat.items()}
    shapes = {
        tunix_name(path): (path, x.shape)
        for path, x in flatten(abstract_params(config)).items()
    }
    if other := sorted(flat.keys() ^ shapes.keys()):
        raise UserError(f"{checkpoint}: {other[0]} is missing or not expected")
    params = {
        path: np.asarray(flat[name]).reshape(shape)
        for name, (path, shape) in shapes.items()
    }
    return unflatten_dict(params, sep="/")


def main(checkpoint, base, out):
    config = BaseFiles.open(base).config
    params = read(checkpoint, config)
    kind = params["norm"]["scale"].dtype.name
    save_backbone(out, config, params, kind, copy_tokenizer("", base, out))


if __name__ == "__main__":
    main(*sys.argv[1:])
