"""The naive loss is the same loss; the command prints both."""

import pytest
from training_setup import write_config

from research import train_cost


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["", "float32"])
def test_the_command_prints_both(tokens, tmp_path, capsys, kind):
    config = write_config(tmp_path, tokens, "medusa1")
    flags = [f"--config={config}", "--steps=2", f"--config.data.cache_features={kind}"]
    flags.append("--config.data.packing=first_fit")
    assert train_cost.main(flags) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [r[1].strip() for r in rows[2:]] == ["chunked", "naive"]
    assert all(float(r[2]) > 0 for r in rows[2:])
