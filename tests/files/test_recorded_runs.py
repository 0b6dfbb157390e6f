"""Published heads of every depth against texts that their authors' own code wrote with the same files.

Backbone and heads are random, made here from a seed (`write_case`). The recorded texts come from
`MedusaModel.medusa_generate` (FasterDecoding/Medusa e2a5d20) and `HydraModel.hydra_generate`
(zankner/Hydra 3f39fbd) on these directories, unmodified, with torch 2.13 on a CPU: greedy, and
typical acceptance at temperature 0.7 (epsilon 0.09, delta 0.3), in which the drafts decide the text.
"""

import dataclasses

import jax
import numpy as np
import pytest
from cases import thinned
from head_files import LLAMA, hydra_state, medusa_state, write
from tiny import random_params

import medusa_jax
from medusa_jax.api.results import Options
from medusa_jax.commands.decode_report import draft_weights, products
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.native import library
from medusa_jax.tree.tree import Tree

# The authors' code has as many key and value heads as query heads.
CONFIG = dataclasses.replace(LLAMA, n_kv_heads=4, max_position=256)
PROMPT = [3, 1, 4, 15, 9]
# A tree without paths of several lengths: Medusa's code accepts what it fills short ones up with.
TREE = [[a] for a in range(4)]
TREE += [[*p, b] for p in TREE[:4] for b in range(3)]
TREE += [[*p, c] for p in TREE[4:] for c in range(2)]
N_TOKENS = 48


def write_case(folder, arch, n_layers):
    """A backbone in `folder`/base and published heads in `folder`/heads."""
    params = jax.tree.map(np.float32, random_params(CONFIG, 3))
    save_backbone(str(folder / "base"), CONFIG, params, "float32")
    config = {"base_model_name_or_path": str(folder / "base")}
    if arch == "medusa":
        state = medusa_state(5, n_layers, seed=n_layers)
        # The authors run one layer n times and save it n times.
        state = {
            key: state[key.replace(f".{j}.linear", ".0.linear")] if "linear" in key else x
            for key, x in state.items()
            for j in [key.split(".")[1]]
        }
        config |= {"medusa_num_heads": 5, "medusa_num_layers": n_layers}
        return write(folder / "heads", state, "medusa_lm_head.pt", config)
    state = hydra_state(3, n_layers, arch == "prefix-mlp", seed=n_layers, kv_heads=4)
    # Copies of the backbone's, which their code reads back into it.
    state["input_embed_fn.weight"] = params["embed_tokens"]["embedding"]
    for key in [key for key in state if key.endswith("inv_freq")]:
        state[key] = np.float32(1 / CONFIG.rope_theta ** (np.arange(0, 4, 2) / 4))
    config |= {"hydra_num_heads": 3, "hydra_num_layers": n_layers, "grounded_heads": True}
    config |= {"hydra_head_arch": arch, "hidden_state_offset": 0}
    return write(folder / "heads", state, "hydra_lm_head.pt", config)


# Token i is the i-th letter. Greedy text is the backbone's, whatever the heads.
GREEDY = "wurqlbemgunghtmghtefmgugjmgqlgjmemgughtmgbnghtmi"
# (architecture, layers): for each token of the greedy text the depth it was accepted at; the typical
# text; its depths.
RECORDED = {
    ("medusa", 0): (
        "000000100000000010012000000000000000000000000000",
        "wuwunghfmghtlelgucucugbnglglgucppqlghfmiqlghfmmn",
        "001000010010100001010000010100120100010000001012",
    ),
    ("medusa", 1): (
        "000100000000001000001000000010000000000000000000",
        "wphcuclwamgemilwuclwamghtlwunmgtlwunminiqlghtmiq",
        "012012012012301230120010012012001201201001000000",
    ),
    ("medusa", 2): (
        "001000000000000100000000000000000000000000000000",
        "wurdwtlghcdwtmifmcdkbntlwapefwtmeththhtmiqllbvlw",
        "001230001012301201230001200120012010123010100120",
    ),
    ("medusa", 4): (
        "000010000000000000000000000010120000000001000000",
        "wurqlefmgjmngqungjmemgjmelelgjmelmiqlbngqucqlemi",
        "000012000120012001230012010101201201012012301200",
    ),
    ("mlp", 1): (
        "000010000000000000010000000000000000000000012000",
        "wpqlbbbkbbefwucqlblwucqpalkjmmefwpqlbbbjmnghtocu",
        "010100010101001230010123001201230101000101200100",
    ),
    ("mlp", 2): (
        "000101200100000000000012000100000120100000120000",
        "wpeclpapqlbethqlbbbvlbbbbkbnquefbviqlwucpqlwucpq",
        "012301012300101000000100000101200012001012001012",
    ),
    ("mlp", 4): (
        "000000000001000000000000100000100000000000000000",
        "wurqljmgqlwtjmgjmngqlgnmqlefkbefkbbbbvljmqlbnbel",
        "000001000000100100000012300012301000000100001230",
    ),
    ("prefix-mlp", 1): (
        "000010000000000010000000000000000000010000001000",
        "wpilblljmjmwusmgusmiqllgunmghtiqlgunmqlgunghfmiq",
        "012001010100010001012010001010101200120123012012",
    ),
    ("prefix-mlp", 2): (
        "000100012010000000000010000000010001000000000000",
        "wurqelbvltefwusmnghtqlgunguqlwqlgqlgqruncdfmnght",
        "000120000120001012001001001200000100120120101200",
    ),
    ("prefix-mlp", 4): (
        "000000001000000100000001000000100000100000010000",
        "wurqljmgqlwtqlgjmngqlgjmngqlnqkeefkbbjmgugbjmefk",
        "000001010000100101000010100010123010010101010001",
    ),
}
SHALLOWEST = [("medusa", 0), ("prefix-mlp", 1)]


def read(folder, heads, dtype="float64", **more):
    tree = Tree.from_choices(TREE)
    return medusa_jax.load(str(folder / "base"), str(heads), tree=tree, dtype=dtype, **more)


def run(model, acceptance):
    """(text, depths) as they are recorded."""
    temperature = 0.7 if acceptance == "typical" else 0.0
    options = Options(N_TOKENS, temperature, eos_ids=())
    [result] = model.generate([PROMPT], options, acceptance=acceptance)
    letters = "".join(chr(ord("a") + i) for i in result.token_ids)
    return letters, "".join(map(str, result.draft_depths))


@pytest.mark.wide
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("arch", "n_layers"), thinned(RECORDED, *SHALLOWEST))
def test_texts_are_those_of_the_authors_code(arch, n_layers, tmp_path):
    heads = write_case(tmp_path, arch, n_layers)
    depths, *typical = RECORDED[arch, n_layers]
    model = read(tmp_path, heads)
    assert run(model, "greedy") == (GREEDY, depths)
    assert run(model, "typical") == tuple(typical)


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("arch", "n_layers"), thinned(RECORDED, ("mlp", 1)))
def test_native_products_leave_typical_texts_alone(arch, n_layers, tmp_path, monkeypatch):
    """Heads in int8 would draft other tokens, some of which typical acceptance takes."""
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "native")
    heads = write_case(tmp_path, arch, n_layers)
    model = read(tmp_path, heads, "float32")
    assert products(model) == "native" and run(model, "greedy")[0] == GREEDY
    assert run(model, "typical") == RECORDED[arch, n_layers][1:]
    kinds = [draft_weights(model, rule) for rule in ("greedy", "typical", "rejection")]
    assert kinds == ["int8", "float32", "float32"]
