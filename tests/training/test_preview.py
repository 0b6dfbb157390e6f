"""`--config.data.preview`: the marked text is exactly what the loss counts."""

import io
import json

import numpy as np
import pytest
from training_setup import ROOT, tiny_config

from medusa_jax.commands import train as cli
from medusa_jax.errors import UserError
from medusa_jax.heads.eagle import EagleConfig
from medusa_jax.interop.tokenizer import load_tokenizer
from medusa_jax.training.data.preview import mark_counted, preview


def config(vicuna, source, **data):
    cfg = tiny_config(str(source), "medusa1")
    cfg.model.tokenizer = vicuna
    settings = {"seq_len": 256, "packing": "first_fit", "chat_template": "vicuna"}
    for name, value in (settings | data).items():
        setattr(cfg.data, name, value)
    return cfg


def shown(cfg):
    out = io.StringIO()
    preview(cfg, out)
    return out.getvalue()


def test_what_the_assistant_says_is_marked_and_nothing_else(vicuna, sharegpt):
    said = shown(config(vicuna, sharegpt))
    text, legend = said.split("-" * 60)
    assert (
        "USER: What is a tree? ASSISTANT:⟦ A tree is a graph without cycles.</s>⟧USER:"
        in text
    )
    assert text.count("⟦") == 2 and text.rstrip().endswith("side by side.</s>⟧")
    assert "sample 0 of 9" in legend and "⟦like this⟧" in legend and "\x1b" not in said
    cfg = config(vicuna, sharegpt)
    ids = load_tokenizer(vicuna).encode(text.replace("⟦", "").replace("⟧", "").strip())
    assert f"{len(ids)} tokens, " in legend
    counted = int(legend.split(" of them counted")[0].split()[-1])
    # Two answers: the first head loses one pair in each, the next two, the third three.
    pairs = [counted - 2 * n for n in (1, 2, 3)]
    assert f"targets of heads 1 ... 3: {pairs[0]} {pairs[1]} {pairs[2]}" in legend
    cfg.heads = EagleConfig(n_heads=3)
    assert f"targets of head 1: {pairs[0]}\n" in shown(
        cfg
    )  # what trains of its three levels
    cfg.train.levels = 2
    assert f"targets of heads 1 ... 2: {pairs[0]} {pairs[1]}\n" in shown(cfg)
    cfg.train.stage = "backbone"
    assert f"next-token targets: {counted}" in shown(cfg)


def test_line_breaks_inside_an_answer_are_seen(vicuna):
    tokenizer = load_tokenizer(vicuna)
    ids = tokenizer.encode("a é\nb")
    counted = [False, *[True] * (len(ids) - 1)]
    assert mark_counted(tokenizer, ids, counted).count("↵⟧\n⟦b⟧") == 1


def test_a_cut_sample_is_shown_cut_and_unusable_ones_are_skipped(vicuna, tmp_path):
    source = tmp_path / "talk.jsonl"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo " * 90}]
    source.write_text("{broken\n" + json.dumps({"messages": talk}))
    said = shown(config(vicuna, source, seq_len=240))
    assert "sample 1 of 2" in said and "1 before it skipped" in said
    assert "240 tokens, cut from" in said
    source.write_text("{broken\n")
    with pytest.raises(UserError, match=r"none of the 1 samples .*broken JSON"):
        shown(config(vicuna, source))


def test_token_directories(vicuna, tmp_path):
    ids = load_tokenizer(vicuna).encode("A tree is a graph.")
    np.save(tmp_path / "tokens.npy", np.array(ids + ids, np.int32))
    np.save(tmp_path / "doc_starts.npy", np.array([0, len(ids)]))
    counted = [False] * len(ids) + [True] * len(ids)
    counted[len(ids) - 1] = True
    np.save(tmp_path / "counted.npy", np.array(counted))
    said = shown(config(vicuna, tmp_path))
    assert said.startswith("A tree is a graph⟦.⟧\n") and "sample 0 of 2" in said


def test_the_command_needs_no_workdir(vicuna, sharegpt, capsys):
    args = [f"--config={ROOT}/configs/vicuna7b_m1.py", "--config.data.preview"]
    args += [f"--config.model.path={vicuna}", f"--config.data.source={sharegpt}"]
    assert cli.main(args) == 0
    assert "of them counted" in capsys.readouterr().out
    assert cli.main([*args, "--config.model.path=", "--config.model.tokenizer="]) == 2
    assert "needs a tokenizer" in capsys.readouterr().err
