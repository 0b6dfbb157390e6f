"""Token arrays and a Vicuna-shaped directory with a sentencepiece tokenizer, made here."""

import json

import jax
import pytest
from pieces import train_sentencepiece
from training_setup import training_arch, write_tokens

from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.model.llama import init_params
from medusa_jax.text.tokenizer import load_tokenizer
from medusa_jax.training import prepare

TALK = [
    ("What is a tree?", "A tree is a graph without cycles."),
    ("And a forest?", "A forest is several trees side by side."),
    ("Write a loop in Python.", "for i in range(10):\n    print(i)"),
    ("Thank you very much!", "You are welcome. Ask me anything else."),
]


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A token directory of 64 ids."""
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The directory of a backbone of one layer, as `training_arch` has it."""
    path = str(tmp_path_factory.mktemp("model"))
    params = init_params(training_arch(), jax.random.key(3))
    save_backbone(path, training_arch(), params, "float32")
    return path


@pytest.fixture(scope="session")
def vicuna(tmp_path_factory):
    """A model directory shaped like Vicuna's: Llama with own LM head, tokenizer.model only."""
    path = tmp_path_factory.mktemp("vicuna")
    train_sentencepiece(path, "\n".join(line for pair in TALK for line in pair) * 20, 340)
    size = load_tokenizer(str(path)).vocab_size
    arch = training_arch(vocab_size=size, n_layers=2, max_position=256)
    save_backbone(str(path), arch, init_params(arch, jax.random.key(0)), "float32")
    return str(path)


@pytest.fixture
def compiled_once(monkeypatch):
    """All runs of a test are of one program."""
    compile_step, made = prepare.compile_step, []

    def once(*args):
        if not made:
            made.append(compile_step(*args))
        return made[0]

    monkeypatch.setattr(prepare, "compile_step", once)


def conversation(*turns: int) -> dict:
    """A ShareGPT record of the given pairs of TALK."""
    said = [pair for i in turns for pair in zip(("human", "gpt"), TALK[i])]
    talk = [{"from": who, "value": text} for who, text in said]
    return {"id": str(turns), "conversations": talk}


@pytest.fixture(scope="session")
def sharegpt(tmp_path_factory):
    """Seven good conversations, an empty one, one without an answer."""
    file = tmp_path_factory.mktemp("sharegpt") / "talk.json"
    turns = (0, 1), (2,), (3,), (0, 3), (1, 2), (2, 3), (0, 1, 2)
    good = [conversation(*t) for t in turns]
    bad = [
        {"id": "empty", "conversations": []},
        {"id": "no answer", "conversations": [{"from": "human", "value": "Hello?"}]},
    ]
    file.write_text(json.dumps(good + bad))
    return str(file)
