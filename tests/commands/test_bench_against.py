"""bench --against on a tiny model, with peers that stand for the real ones."""

import json

import pytest
from files import write_lines

from medusa_jax.commands import bench
from medusa_jax.evaluate.peers import huggingface, llamacpp
from medusa_jax.evaluate.peers.contender import Contender, Run


@pytest.fixture
def arguments(directory, tmp_path):
    lines = ({"prompt": p} for p in ("the cat", "a b c", "abc"))
    prompts = write_lines(tmp_path / "prompts.jsonl", lines)
    return [f"--model={directory}", f"--drafters={directory}/heads", f"--prompts={prompts}"]


def test_engines_in_one_table(arguments, tmp_path, monkeypatch, capsys):
    asked = {}

    def peer(name):
        def contenders(*how):
            asked[name] = how
            run = Run([1] * 6, 0.1, 0.5)
            return [Contender(name, "F32", lambda prompt, n_tokens: run)]

        return contenders

    monkeypatch.setattr(llamacpp, "llamacpp_contenders", peer("llama.cpp"))
    monkeypatch.setattr(huggingface, "transformers_contenders", peer("transformers"))
    flags = ["--against=transformers,llama.cpp", "--trees=chain:2", "--max_new_tokens=6"]
    flags += ["--repeats=1", "--limit=2", "--threads=3", f"--out={tmp_path}"]
    assert bench.main([*arguments, *flags]) == 0
    directory = arguments[0].removeprefix("--model=")
    # The longest prompt has 6 tokens: <s>, the, blank, c, a, t.
    assert asked["llama.cpp"] == (directory, 12, 3)
    assert asked["transformers"] == (directory, 3, 0)
    facts = json.loads((tmp_path / "bench.json").read_text())
    assert [(r["engine"], r["weights"]) for r in facts["engines"]] == [
        ("medusa_jax, plain", "float32"),
        ("medusa_jax, medusa, 3 nodes", "float32"),
        ("llama.cpp", "F32"),
        ("transformers", "F32"),
    ]
    assert (facts["threads_of_peers"], facts["prompts"], facts["new_tokens"]) == (3, 2, 6)
    printed = capsys.readouterr().out
    assert "| transformers | F32 | 10.0 |" in printed and "peers with 3 threads" in printed
    assert (tmp_path / "bench.md").read_text() in printed


@pytest.mark.parametrize("model", [None, "another"])
def test_the_demo_s_prompts_are_ids_to_the_demo_alone(model, tmp_path, monkeypatch):
    """Another model reads their texts with its own tokenizer."""
    seen = []
    monkeypatch.setattr(bench, "run_against", lambda *a: seen.extend(a[2]) or 0)
    flags = [f"--model={model}"] if model else []
    assert bench.main([*flags, "--against=llama.cpp", f"--out={tmp_path}"]) == 0
    assert seen and all(("prompt_ids" in q) == (model is None) for q in seen)
    assert all(q["prompt"] for q in seen)
