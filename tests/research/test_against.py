"""bench against on a tiny model, with peers that stand for the real ones."""

import json
from types import SimpleNamespace

import pytest
from files import write_lines

from medusa_jax.evaluate.questions import DEMO_PROMPTS
from medusa_jax.evaluate.race import Contender, Run
from research import against as bench
from research.asking import questions_of
from research.peers import Setting, huggingface, llamacpp


@pytest.fixture
def arguments(directory, tmp_path):
    lines = ({"prompt": p} for p in ("the cat", "a b c", "abc"))
    prompts = write_lines(tmp_path / "prompts.jsonl", lines)
    return [f"--model={directory}", f"--drafters={directory}/heads", f"--prompts={prompts}"]


def test_engines_in_one_table(arguments, tmp_path, monkeypatch, capsys):
    asked = {}

    def peer(name):
        def contenders(setting):
            asked[name] = setting
            run = Run([[1] * 6], 0.1, 0.5)
            return [Contender(name, lambda prompt: run, "F32")]

        return contenders

    monkeypatch.setattr(llamacpp, "contenders", peer("llama.cpp"))
    monkeypatch.setattr(huggingface, "contenders", peer("transformers"))
    flags = ["--peers=transformers,llama.cpp", "--trees=chain:2", "--max_new_tokens=6"]
    flags += ["--repeats=1", "--limit=2", "--threads=3", f"--out={tmp_path}"]
    assert bench.main([*arguments, *flags]) == 0
    directory = arguments[0].removeprefix("--model=")
    # The longest prompt has 6 tokens: <s>, the, blank, c, a, t.
    assert asked["llama.cpp"] == asked["transformers"] == Setting(directory, 6, 12, 3, 0)
    facts = json.loads((tmp_path / "against.json").read_text())
    assert [(r["label"], r["weights"]) for r in facts["engines"]] == [
        ("medusa_jax, plain", "float32"),
        ("medusa_jax, medusa, 3 nodes", "float32"),
        ("llama.cpp", "F32"),
        ("transformers", "F32"),
    ]
    assert (facts["threads_of_peers"], facts["prompts"], facts["new_tokens"]) == (3, 2, 6)
    printed = capsys.readouterr().out
    assert "| transformers | F32 | 10.0 |" in printed and "peers with 3 threads" in printed
    assert (tmp_path / "against.md").read_text() in printed


@pytest.mark.parametrize("model", [None, "another"])
def test_the_demo_s_prompts_are_ids_to_the_demo_alone(model):
    """Another model reads their texts with its own tokenizer."""
    flags = SimpleNamespace(questions=None, prompts=str(DEMO_PROMPTS), limit=3)
    questions = questions_of(flags, model)
    assert questions and all(("prompt_ids" in q) == (model is None) for q in questions)
    assert all(q["prompt"] for q in questions)
