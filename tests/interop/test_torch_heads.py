"""Imported heads against torch on the same file, and our .pt files through torch.load."""

import json

import numpy as np
import pytest
from head_files import LLAMA, D, V, hydra_state, medusa_state, write
from our_heads import BASE, EMBEDDED, HIDDEN, T, load, our_logits

from medusa_jax.interop import heads_io, hf
from medusa_jax.interop.base_files import BaseFiles
from medusa_jax.interop.convert import convert
from medusa_jax.interop.export_heads import Export
from medusa_jax.interop.published import open_heads

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.usefixtures("x64")


class ResBlock(nn.Module):
    """As Medusa's and Hydra's code have it; `reads` is wider for Hydra's first layer."""

    def __init__(self, reads=D):
        super().__init__()
        self.linear = nn.Linear(reads, D)
        self.res_connection = nn.Linear(reads, D) if reads > D else nn.Identity()

    def forward(self, x):
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


def close(ours, theirs):
    theirs = theirs.detach().numpy()
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("n_layers", [1, 2])
def test_medusa(n_layers, tmp_path):
    folder = write(tmp_path, medusa_state(3, n_layers), "medusa_lm_head.pt")
    blocks = [[ResBlock() for _ in range(n_layers)] for _ in range(3)]
    heads = nn.ModuleList(
        nn.Sequential(*layers, nn.Linear(D, V, bias=False)) for layers in blocks
    )
    heads.load_state_dict(torch.load(folder / "medusa_lm_head.pt", weights_only=True))
    x = torch.tensor(HIDDEN[-1])
    close(our_logits(*load(folder)[:2]), torch.stack([head(x) for head in heads.double()]))


@pytest.mark.parametrize("plus", [False, True])
def test_hydra(plus, tmp_path):
    """Tied layers by Python's list repetition, dropout modules between them, the prefix layer by
    transformers."""
    transformers = pytest.importorskip("transformers")
    config = {"hydra_num_heads": 3, "hydra_num_layers": 3}
    state = hydra_state(plus=plus)
    if plus:  # recent versions of transformers store no tables
        state = {key: x for key, x in state.items() if "inv_freq" not in key}
    folder = write(tmp_path, state, "hydra_lm_head.pt", config)

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_embed_fn = nn.Embedding(V, D)
            self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(), nn.ModuleList()
            for k in range(3):
                layers = [ResBlock((k + 2) * D), *([ResBlock()] * 2)]
                out = nn.Linear(D, V)
                if plus:
                    layers = [m for layer in layers for m in (nn.Dropout(0.2), layer)]
                    out = nn.Sequential(nn.Dropout(0.2), out)
                self.hydra_mlp.append(nn.Sequential(*layers))
                self.hydra_lm_head.append(out)
            if plus:
                shape = transformers.LlamaConfig(
                    vocab_size=V, hidden_size=D, intermediate_size=LLAMA.d_ff,
                    num_hidden_layers=1, num_attention_heads=LLAMA.n_heads,
                    num_key_value_heads=LLAMA.n_kv_heads, head_dim=LLAMA.head_dim,
                    rms_norm_eps=LLAMA.rms_eps, rope_theta=LLAMA.rope_theta,
                )  # fmt: skip
                self.prefix_embeding_layer = transformers.LlamaModel(shape)

    heads = Heads()
    heads.load_state_dict(torch.load(folder / "hydra_lm_head.pt", weights_only=True))
    heads = heads.double().eval()
    hidden = torch.tensor(HIDDEN)
    x = hidden[-1]
    if plus:
        prefixed = heads.prefix_embeding_layer(inputs_embeds=hidden[None])
        x = prefixed.last_hidden_state[0, T - 1]
    logits = []
    for k in range(3):
        x = torch.cat([x, torch.tensor(EMBEDDED[k])])
        logits.append(heads.hydra_lm_head[k](heads.hydra_mlp[k](x)))
    close(our_logits(*load(folder)[:2]), torch.stack(logits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_our_files_are_torchs(dtype, tmp_path):
    """The legacy export through torch.load, also mapped into memory."""
    hf.save_backbone(str(tmp_path / "base"), LLAMA, BASE, "float32")
    base = BaseFiles.open(str(tmp_path / "base"))
    heads, head_params, _ = load(
        write(tmp_path / "a", medusa_state(2), "medusa_lm_head.pt")
    )
    record = heads_io.base_record(LLAMA, base.fingerprint())
    heads_io.save_heads(str(tmp_path / "b"), heads, head_params, base=record, recipe={})
    stored = open_heads(str(tmp_path / "b"))
    convert(Export(stored, base, "base", dtype), "tensorrt_llm", str(tmp_path / "out"))
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype
    )
    for options in ({}, {"mmap": True}):
        path = tmp_path / "out" / "medusa_lm_head.pt"
        state = torch.load(path, weights_only=True, **options)
        assert state.keys() == medusa_state(2).keys()
        for key, want in medusa_state(2).items():
            want = torch.tensor(want).to(getattr(torch, dtype))
            assert state[key].dtype == want.dtype and torch.equal(state[key], want)
