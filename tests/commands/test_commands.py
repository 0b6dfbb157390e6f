"""calibrate and convert: files, figures, resuming; how flags are declared."""

import dataclasses
import importlib
import json
import re
import shlex
import shutil

import jax
import numpy as np
import pytest
from files import PROMPTS, write_lines
from live import compilations
from safetensors.numpy import load_file

import medusa_jax
from medusa_jax import Options, progress
from medusa_jax.__main__ import COMMANDS
from medusa_jax.api import find_heads, find_model
from medusa_jax.commands import bench, calibrate, convert, decode, serve, train
from medusa_jax.commands.flags import CommandLine, at_least, flag, parser_of
from medusa_jax.commands.model_flags import to_repeat
from medusa_jax.commands.next_command import print_next
from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.evaluate import tree_fit
from medusa_jax.evaluate.tree_fit import MARGIN
from medusa_jax.files.layouts import convert as conversion
from medusa_jax.files.layouts.heads_io import open_heads
from medusa_jax.notation import byte_size
from medusa_jax.text.chat import encode_prompt
from medusa_jax.training import run_log
from medusa_jax.tree.tree import Order, Tree


@pytest.mark.wide
def test_calibrate_writes_a_tree_with_its_evidence(files, tmp_path, capsys, monkeypatch):
    directory, prompts = files
    for name in ("LINES", "SHARE"):  # every text is told
        monkeypatch.setattr(progress, name, 0.0)
    monkeypatch.setattr(run_log, "outlook", lambda workdir: f"outlook of {workdir}")
    out, heads = tmp_path / "tree.json", f"medusa_jax.heads.medusa:Medusa:{directory}/heads"
    flags = [
        f"--model={directory}", f"--drafter={heads}", f"--prompts={prompts}",
        f"--out={out}", "--max_new_tokens=40", "--sizes=1,2,4,", "--rounds=2",
        "--batches=1,2", f"--plots={tmp_path}/plots", "--weights=bfloat16", "--allow_other_base",
    ]  # fmt: skip
    assert calibrate.main(flags) == 0
    found = json.loads(out.read_text())
    evidence = found["evidence"]
    ladder = evidence["ladder"]
    assert [row["nodes"] for row in ladder] == [1, 2, 4]
    assert ladder[0]["tokens_per_step"] == 1 and ladder[0]["step_latency_ratio"] == 1
    assert ladder[1]["tokens_per_step"] <= ladder[2]["tokens_per_step"]
    one, two = found["batches"]
    assert (one["batch"], two["batch"]) == (1, 2)
    for rung in (one, two):
        fastest = max(row["speedup"] for row in rung["rows"])
        chosen = {1: 1.0} | {row["nodes"]: row["speedup"] for row in rung["rows"]}
        assert chosen[rung["nodes"]] >= max(1, fastest) / MARGIN
    assert found["nodes"] == one["nodes"] == len(found["choices"]) + 1
    assert Tree.from_choices(found["growth"]).n_nodes == len(found["growth"]) + 1
    assert np.shape(evidence["head_accuracies"])[0] == 3
    assert (found["temperature"], found["batch"], found["platform"]) == (0, 1, "cpu")
    printed, said = capsys.readouterr()
    assert "2 at a time" in printed and f"outlook of {directory}\n" in printed
    assert "the heads' guesses in 4 answers that are written now, " in said
    assert "tokens/step: on texts that the tree was not fitted to" in printed
    assert "first guesses that are right, head by head: " in printed
    assert re.search(r"texts and their ranks: 4 of 4 texts, .+, 0 seconds left", said)
    assert "trees for batch 1: " in said and "trees for batch 2: " in said
    assert not out.with_name("tree.json.ranks").exists()
    [named] = [line for line in said.splitlines() if line.startswith("next: ")]
    assert f"--weights bfloat16 --allow_other_base --drafter {heads}" in named
    assert f"--tree {out} --prompt" in named  # the file is not next to the heads
    pictures = {p.name for p in (tmp_path / "plots").iterdir()}
    assert pictures == {"tree.png", "curves.png"}


def test_a_flag_is_declared_once():
    """With its help and type in one class; another default in a subclass keeps both."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Shared:
        rows: int = flag("rows of a batch", 2, type=at_least(1))
        names: list[str] = flag("several", [])  # noqa: RUF009
        limit: float | None = flag("at most", None)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Flags(Shared):
        """What it does."""

        rows: int = 3
        out: str = flag("a file")
        quick: bool = flag("no wait", False)

    seen = []
    main = CommandLine("x", Flags, lambda flags: seen.append(flags) or 0)
    assert main(["--out=a", "--names=b", "--names=c", "--limit=0.5", "--quick"]) == 0
    assert main(["--out=a"]) == 0
    assert seen == [
        Flags(out="a", names=["b", "c"], limit=0.5, quick=True, rows=3),
        Flags(out="a"),
    ]
    text = parser_of(main.kind, main.name).format_help()
    assert "rows of a batch (default: 3)" in text and "What it does." in text
    assert "at most\n" in text
    for wrong in ("--rows=0", "--names=b"):  # too few; no --out
        assert main([wrong]) == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_have_the_defaults_of_the_command_line(name):
    """So that one command runs another with `Flags`."""
    module = importlib.import_module(COMMANDS[name].module)
    main, words, given = module.main, [], {}
    for field in dataclasses.fields(module.Flags):
        if field.default is field.default_factory is dataclasses.MISSING:
            given[field.name] = "x"
            words.append("x" if "name" in field.metadata else f"--{field.name}=x")
    assert isinstance(main, CommandLine) and main.run is module.run
    assert main.parse(words) == module.Flags(**given)


def test_calibrate_takes_the_template_of_the_training(files, tmp_path, monkeypatch, capsys):
    """In the line that training prints, for a model without a template; `bench` takes it as well."""
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a"}]
    talk = write_lines(tmp_path / "talk.jsonl", [{"messages": turns}])
    heads, (directory, _), given = tmp_path / "export", files, []
    shutil.copytree(directory / "heads", heads)
    data = DataConfig(str(talk), chat_template="vicuna")
    train.tell_calibration(str(tmp_path), str(directory), data, "medusa")
    words = shlex.split(capsys.readouterr().err.split("medusa calibrate")[1])

    def fit_tree(model, prompts, options, *_, **more):
        given.append((prompts, options.eos_ids))
        raise UserError("enough")

    monkeypatch.setattr(tree_fit, "fit_tree", fit_tree)
    assert calibrate.main(words) == 2 and "enough" in capsys.readouterr().err
    model = medusa_jax.load(str(directory), "none", dtype="float32")
    prompt = encode_prompt(model.tokenizer, turns[:1], "vicuna")
    assert given == [([prompt], (2,))]
    flags = bench.Flags(prompts=str(talk), chat_template="vicuna", model=str(directory))
    assert bench.prompt_tasks(flags, model).prompts == [prompt]


def test_calibrate_continues_where_it_was_interrupted(files, tmp_path, monkeypatch):
    """The ranks of whole batches of texts are kept, for the same settings only. Programs are compiled once."""
    directory, _ = files
    model = medusa_jax.load(str(directory), str(directory / "heads"), tree="none")
    monkeypatch.setattr(tree_fit, "ROWS", 2)
    write, written = tree_fit.answer_prompts, []

    def answer_prompts(model, prompts, *given, **more):
        written.append(len(prompts))
        if len(written) == 2:
            raise KeyboardInterrupt
        return write(model, prompts, *given, **more)

    monkeypatch.setattr(tree_fit, "answer_prompts", answer_prompts)
    options, keep = Options(max_new_tokens=30), tmp_path / "ranks"
    with pytest.raises(KeyboardInterrupt):
        tree_fit.rank_texts(model, PROMPTS, options, keep)
    found = tree_fit.rank_texts(model, PROMPTS, options, keep)
    assert written == [2, 2, 2]
    clock = tree_fit.StepClock([model.engine()], model.variables, [1], n_steps=2)
    clock.seconds(model.engine())
    with compilations() as compiled:
        whole = tree_fit.rank_texts(model, PROMPTS, options)
        clock.seconds(model.engine())
    assert not compiled
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_array_equal(one.ranks_PK, other.ranks_PK)
    tree_fit.rank_texts(model, PROMPTS, dataclasses.replace(options, seed=1), keep)
    assert written == [2] * 7
    model.variables = jax.tree.map(lambda x: x * 2, model.variables)
    tree_fit.rank_texts(model, PROMPTS, dataclasses.replace(options, seed=1), keep)
    assert written == [2] * 9
    # Of the model, not of the options.
    model.no_repeat_ngram_size = 2
    tree_fit.rank_texts(model, PROMPTS, dataclasses.replace(options, seed=1), keep)
    assert written == [2] * 11


def test_sizes_beyond_the_texts_stand_for_their_largest_tree(files, tmp_path, monkeypatch):
    """No size is left out, so a tree is timed wherever the texts have one."""
    directory, _ = files
    model = medusa_jax.load(str(directory), str(directory / "heads"), tree="none")
    asked = []

    def time_sizes(model, order, tokens, prompt, rows, **how):
        asked.append((list(tokens), len(order.growth) + 1))
        return [(n, 1 / n, 1.0) for n in tokens]

    monkeypatch.setattr(tree_fit, "time_sizes", time_sizes)
    for sizes in ((), (2, 128), (128,)):
        fit = tree_fit.fit_tree(
            model, PROMPTS, Options(max_new_tokens=30), sizes, keep=tmp_path / "ranks"
        )
        ladder = fit["evidence"]["ladder"]
        assert {row["step_latency_ratio"] for row in ladder} == {1}  # none is faster
    (usual, largest), (two, _), (one, _) = asked
    assert 2 < largest < 128  # few texts
    assert two == [1, 2, largest] and one == [1, largest]
    assert usual[:2] == [1, 2] and usual[-1] <= largest


def test_sizes_grow_until_they_are_clearly_slower(files, monkeypatch, capsys):
    directory, _ = files
    model = medusa_jax.load(str(directory), str(directory / "heads"), tree="none")
    cost, timed = {1: 1.0, 2: 1.1, 3: 1.2, 4: 2.0, 5: 3.0, 6: 4.0}, []

    class Clock:
        def __init__(self, engines, variables, prompt, **how):
            pass

        def seconds(self, engine):
            timed.append(engine.tree.n_nodes)
            return cost[engine.tree.n_nodes]

    monkeypatch.setattr(tree_fit, "StepClock", Clock)
    for name in ("LINES", "SHARE"):
        monkeypatch.setattr(progress, name, -1.0)
    order = Order([[0], [1], [0, 0], [2], [1, 0]])
    tokens = {1: 1.0, 2: 1.6, 3: 2.2, 4: 2.3, 5: 2.4, 6: 2.5}
    rounds = tree_fit.time_sizes(model, order, tokens, [1], 1, rounds=3)
    assert sorted(set(timed)) == [1, 2, 3, 4, 5]  # two slower ones end it
    said = capsys.readouterr().err
    assert "4 of 6 sizes" in said and "-" not in said  # never more done than there are
    rows = tree_fit.figures_of(rounds, tokens)
    assert [row["nodes"] for row in rows] == [2, 3, 4, 5] and tree_fit.fastest(rows) == 3
    # Where plain steps were timed while the machine was busy.
    [row] = tree_fit.figures_of([(2, 1.1, 2.6)] * 3, tokens)
    assert row["step_latency_ratio"] == 1 and row["speedup"] == 1.6
    for speedups, fastest in (({2: 2.0, 4: 2.03}, 2), ({2: 1.01}, 1), ({}, 1)):
        rows = [{"nodes": n, "speedup": speedup} for n, speedup in speedups.items()]
        assert tree_fit.fastest(rows) == fastest


def test_the_demos_heads_go_out_and_come_back(tmp_path, capfd):
    ours, out = find_heads(None, "medusa").heads, tmp_path / "tgi"
    flags = f"--drafter medusa --to tgi --out {out} --dtype float16 --base_name owner/name"
    assert convert.main(flags.split()) == 0
    assert "native, 4 heads" in capfd.readouterr().err
    config = json.loads((out / "config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/name"
    assert config["torch_dtype"] == "float16" and (out / "tokenizer.json").exists()
    there = open_heads(str(out / "medusa_lm_head.safetensors")).heads
    assert (there.n_heads, there.n_layers) == (ours.n_heads, ours.n_layers)
    # In a byte a weight, with the tree next to them, and back to a type that holds all values.
    small, wide = tmp_path / "small", tmp_path / "wide"
    flags = ["--drafter=medusa", "--dtype=int8"]
    assert convert.main([*flags, "--to=tgi", f"--out={small}"]) == 2
    assert "int8 is for --to native" in capfd.readouterr().err
    assert convert.main([*flags, "--to=native", f"--out={small}"]) == 0
    assert convert.main([f"--drafter={small}", "--to=native", f"--out={wide}"]) == 0
    read, again = (load_file(d / "heads.safetensors") for d in (small, wide))
    kernel = "heads_0/layers_0/kernel"
    found = read[f"{kernel}/codes"].astype(np.float32) / 127 * read[f"{kernel}/scales"]
    np.testing.assert_array_equal(again[kernel], found)
    card = (small / "README.md").read_text()
    assert "base_model" not in card and find_model(None) not in card
    assert (small / "tree.json").exists()


@pytest.mark.parametrize(
    ("nodes", "choices", "spares", "said"),
    [
        (3, [[-1], [-1, -1]], [], "no guess of the heads is worth its time"),
        (3, [[-1], [-1, -1]], [[0], [1]],
         "on this machine: 3 nodes give 1.80 tokens a step, which takes 1.20 plain ones: 1.50x"),
        (1, [], [], "plain decoding is fastest on this machine: 3 nodes give"),
    ],
)  # fmt: skip
def test_the_verdict_of_a_fit(nodes, choices, spares, said):
    """The speed-up that its own figures give, and whose guesses it verifies."""
    row = {"nodes": 3, "tokens_per_step": 1.8, "step_latency_ratio": 1.2, "speedup": 1.5}
    line = calibrate.verdict({
        "choices": choices, "spares": spares, "evidence": {"head_accuracies": [[0.46, 0.1]]},
        "batches": [{"batch": 1, "nodes": nodes, "rows": [row]}],
    })  # fmt: skip
    assert said in line and "head by head: 46%" in line
    assert ("only copies" in line) == (nodes > 1 and not spares)
    assert "heads that give 2.30 a step would reach 1.92x" in line  # 2.3 / 1.2


def test_the_next_command_repeats_the_flags_that_it_has(capsys):
    line = "--drafter=h --tokenizer=t --tree=chain:3 --mesh=1,2,1 --dtype=float32 --chat --top_k=3 --prompt=a"
    print_next("serve", **to_repeat(decode.main.parse(line.split()), serve.Flags))
    named = serve.main.parse(shlex.split(capsys.readouterr().err)[3:])
    assert named == serve.Flags(
        drafter="h", tokenizer="t", tree="chain:3", mesh=(1, 2, 1), dtype="float32", chat=""
    )


@pytest.mark.parametrize(
    ("to", "drafter", "method"),
    [("vllm", "medusa", "medusa"), ("sglang", "eagle", ""), ("tgi", "medusa", ""), ("native", "medusa", "")],
)  # fmt: skip
def test_converted_heads_say_how_they_are_served(to, drafter, method, tmp_path, capsys):
    """In 16 bits where another engine reads them, with the size first and how to load them, to be pasted, last."""
    out = tmp_path / 'it\'s "my" heads'
    wide = tmp_path / "wide"  # as a CPU trains them
    flags = ["--to=native", "--dtype=float32", f"--out={wide}"]
    assert convert.main([f"--drafter={drafter}", *flags]) == 0
    assert convert.main([f"--drafter={wide}", f"--to={to}", f"--out={out}"]) == 0
    said = capsys.readouterr().err
    command = said.splitlines()[-1].split("`")[1]
    assert method or str(out) in shlex.split(command)
    [file] = out.glob("*.safetensors")
    kinds = {str(x.dtype) for x in load_file(file).values()}
    assert kinds == ({"float32"} if to == "native" else {"bfloat16"})
    if to != "native":
        size = sum(x.nbytes for x in load_file(file).values())
        assert f"writing {file.name}: {byte_size(size)} in bfloat16" in said
    if method:
        assert command.startswith("vllm serve ")
        name, value = shlex.split(command)[-2:]
        assert name == "--speculative-config"
        found = json.loads(value)  # vLLM's flag takes this JSON
        assert found == {"method": method, "model": str(out), "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("a/demo@v1", "a/demo"),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (".", ""),
    ],
)
def test_files_for_others_have_the_models_public_name(model, name, tmp_path, monkeypatch):
    demo, out = find_model(None), tmp_path / "tgi"
    heads = find_heads(None, "medusa").directory
    monkeypatch.setattr("medusa_jax.api.find_model", lambda _: demo)
    monkeypatch.setattr(convert, "certify", lambda *_: None)
    monkeypatch.chdir(demo)
    flags = [f"--model={model}", f"--drafter={heads}", "--to=tgi", f"--out={out}"]
    assert convert.main(flags) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["base_model_name_or_path"] == (name or demo)  # from any directory
    card = (out / "README.md").read_text()
    assert (f"base_model: {name}\n" in card) == bool(name) and demo not in card


def test_a_converted_directory_is_complete_or_absent(tmp_path, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device")

    out = tmp_path / "made" / "tgi"
    monkeypatch.setattr(conversion, "write_text", full)
    assert convert.main(["--drafter", "medusa", "--to", "tgi", "--out", str(out)]) == 2
    assert f"{out} could not be written" in capfd.readouterr().err
    assert not any(out.parent.iterdir())
