"""The study on a tiny model: every kind of variant runs, is measured and is not run twice."""

import json

import numpy as np
import pytest
from tiny import write_model

from medusa_jax.model import quantise
from medusa_jax.training.data.rows import write_tokens
from research.recipes import command, figures, text, variants


@pytest.mark.slow
def test_arms_end_in_a_table(tmp_path, monkeypatch, capsys):
    config, _ = write_model(tmp_path / "model")
    rng = np.random.default_rng(0)
    letters = list("abcdefghij ,.")
    texts = ["".join(rng.choice(letters, 900)) for _ in range(3)]
    monkeypatch.setattr(text, "new_text", lambda: texts)
    pieces = [rng.integers(3, config.vocab_size, 400, dtype=np.int32) for _ in range(2)]
    write_tokens(tmp_path / "old", pieces)
    args = [
        f"--original={tmp_path}/old", f"--model={tmp_path}/model", f"--out={tmp_path}/out",
        "--variants=baseline,medusa1,medusa2", "--steps=4", "--seeds=1",
        "--length=32", "--rank=8", "--distill=4", "--prompts=2", "--new_tokens=8", "--rows=8",
    ]  # fmt: skip
    assert command.main(args) == 0
    said = capsys.readouterr().out
    for variant in ("baseline", "medusa1", "medusa2"):
        assert f"| {variant} |" in said
    results = {
        name: json.loads((tmp_path / "out" / f"{name}-0" / "result.json").read_text())
        for name in ("baseline", "medusa1", "medusa2")
    }
    # Heads alone leave the backbone as it was, the other variant does not.
    assert results["medusa1"]["agreement"] == 1.0
    assert results["medusa1"]["perplexity"] == results["baseline"]["perplexity"]
    assert results["medusa2"]["perplexity"] != results["baseline"]["perplexity"]
    steps, losses = figures.loss_curve(tmp_path / "out", "medusa1", 1)
    assert steps == [1, 4] and np.isfinite(losses).all()
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
    assert all(f["accepted_new"] >= 1.0 for f in results.values())
    counted = np.load(tmp_path / "out" / "self" / "counted.npy")
    assert not counted[:8].any() and counted[8:32].all()

    def refuse(*_):
        raise AssertionError("a finished variant ran again")

    monkeypatch.setattr(command, "train_variant", refuse)
    assert command.main(args) == 0 and capsys.readouterr().out == said
    assert (tmp_path / "out" / "table.md").read_text() == said


def test_every_arm_names_fields_that_exist(tmp_path):
    from medusa_jax.commands.train import override
    from medusa_jax.training.partition import trained_groups

    flags = command.main.parse(["--original=x", f"--out={tmp_path}"])
    for name, (_, runs) in variants.variants().items():
        shares = [fields["share"] for fields in runs]
        assert not runs or sum(shares) == 1.0, (
            name
        )  # all variants make the same number of steps
        for fields in runs:
            cfg = variants.recipe(flags, 0, tmp_path)
            for field, value in fields.items():
                if "." in field:
                    override(cfg, field, value)
            assert "heads" in trained_groups(cfg.train, cfg.lora), name
            assert cfg.model.quantise in ("", *quantise.KINDS)
