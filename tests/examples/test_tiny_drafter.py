"""docs/write_a_drafter.md as it is written: its file, and its commands from training to a server."""

import re
import shlex

import pytest
from files import write_lines
from tiny import write_ending_model
from training_setup import ROOT
from turns import check, run, scheduler_of

import medusa_jax
from medusa_jax import Options, Tree
from medusa_jax.__main__ import main
from medusa_jax.commands import train
from medusa_jax.commands.serve import main as serving
from medusa_jax.errors import UserError
from medusa_jax.heads.medusa import Medusa
from medusa_jax.serving import Request

PAGE = (ROOT / "docs" / "write_a_drafter.md").read_text()
NAME = "examples.tiny_drafter:Tiny"
# Smaller than the page's.
MORE = {
    "train.py": "--config.train.steps 20 --config.train.eval_every 20 --config.data.seq_len 48",
    "calibrate": "--limit 3 --max_new_tokens 16 --sizes 1,2,4 --rounds 1 --batches 1",
    "decode": "--max_new_tokens 24",
}


def test_the_page_shows_the_file():
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert code == (ROOT / "examples" / "tiny_drafter.py").read_text()


@pytest.mark.wide
def test_the_commands_from_top_to_bottom(tmp_path, capsys, monkeypatch):
    """Trained, fitted, decoded with the text of plain decoding, and served to two at a time."""
    model, place = tmp_path / "model", tmp_path / "tiny"
    write_ending_model(model, max_position=128)
    turns = (
        {"role": "user", "content": "the cat in"},
        {"role": "assistant", "content": "a bar"},
    )
    text = write_lines(tmp_path / "messages.jsonl", [{"messages": turns}] * 24)
    monkeypatch.chdir(ROOT)
    pytest_call, *blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    assert pytest_call == f"pytest tests/heads/test_contract.py --drafter {NAME}\n"
    for block in blocks:
        if "configs/demo_medusa.py" in block:  # the same on the demo, in minutes
            continue
        block = block.replace("path/to/model", str(model)).replace("work/tiny", str(place))
        block = block.replace("messages.jsonl", str(text)).replace("\\\n", "")
        _, *words = shlex.split(block)  # python or medusa
        if words[0] == "train.py":
            assert train.main([*words[1:], *shlex.split(MORE["train.py"])]) == 0
            following = f"--drafter {NAME}:{place}/export"
            assert following in capsys.readouterr().err
            continue
        name, *flags = words
        if name == "serve":
            assert serving.parse(flags).drafter == f"{NAME}:{place}/export"
            continue
        assert main([name, *flags, *shlex.split(MORE[name])]) == 0
    printed = capsys.readouterr().err
    assert "identical" in printed and "not identical" not in printed

    # What `serve` runs.
    tree = Tree.cartesian([2, 1])
    loaded = medusa_jax.load(str(model), f"{NAME}:{place}/export", tree=tree)
    assert loaded.drafter.name == NAME and not isinstance(loaded.drafter, Medusa)
    asked = [Request(prompt, Options(20)) for prompt in ("the cat", "in a bar")]
    check(loaded, run(scheduler_of(loaded, {2: tree}), {0: asked}, loaded))

    with pytest.raises(UserError, match="give the directory of its heads"):
        medusa_jax.load(str(model), NAME)
