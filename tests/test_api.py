"""The Python interface, from files to text."""

import copy
import dataclasses
import json
import shutil
from functools import partial

import jax
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from pieces import drop_first_space
from refusals import refused
from tiny import CONTEXT, forward_logits, set_template, write_model, write_tokenizer

import medusa_jax
from medusa_jax import Options, Tree, UserError
from medusa_jax.api.load import open_model
from medusa_jax.api.prompts import prompt_ids
from medusa_jax.decoding import generation
from medusa_jax.evaluate.compare import compare
from medusa_jax.serving.job import make_job
from medusa_jax.serving.request import Handle, Request

pytestmark = pytest.mark.usefixtures("x64")

TREE = Tree.from_choices([[0], [1], [2], [0, 0], [1, 0], [0, 0, 0]])
PROMPTS = ["the cat and", "in", "abcab, a hat.\n"]
NEW = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return path, *write_model(path)


@pytest.fixture(scope="module")
def model(directory):
    """In float64, where identity is exact."""
    jax.config.update("jax_enable_x64", True)
    path = directory[0]
    return medusa_jax.load(path, path / "heads", tree=TREE, dtype="float64")


def check_result(model, result, limit=NEW):
    steps = sum(result.acceptance_histogram)
    appended = sum((i + 1) * n for i, n in enumerate(result.acceptance_histogram))
    assert result.steps == steps and appended == result.new_tokens - 1
    assert result.new_tokens == len(result.token_ids) == len(result.draft_depths) <= limit
    lengths = result.accepted_lengths
    histogram = [lengths.count(n + 1) for n in range(len(result.acceptance_histogram))]
    assert len(lengths) == steps and histogram == result.acceptance_histogram
    if steps:
        assert result.mean_accepted_length == appended / steps
        assert result.tokens_per_second == (result.new_tokens - 1) / result.decode_seconds
    assert result.prefill_seconds > 0 and result.decode_seconds > 0


def test_greedy_text_is_the_argmax_of_the_model_on_disk(model, directory):
    _, config, params = directory
    results = model.generate(PROMPTS, Options(max_new_tokens=NEW))
    for prompt, result in zip(PROMPTS, results):
        ids = model.encode(prompt)
        assert ids[0] == model.tokenizer.bos_id and result.prompt_tokens == len(ids)
        logits = forward_logits(config, params, ids + result.token_ids)
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == result.token_ids
        assert result.text == model.tokenizer.decode(result.token_ids)
        assert result.finish_reason == "length" and result.new_tokens == NEW
        check_result(model, result)
    assert sum(r.steps for r in results) < 3 * (NEW - 1)  # drafts were accepted


def test_streamed_pieces_join_to_the_text(model):
    kinds = (24, 0), (9, 1), (17, 1)
    rows = [Options(n, temperature, seed=3) for n, temperature in kinds]
    expected = model.generate(PROMPTS, rows)
    shown, final = ["", "", ""], None
    depths = set()
    for pieces, results in model.stream(PROMPTS, rows):
        assert final is None
        for piece in pieces:
            assert piece.text == "".join(text for text, _ in piece.parts)
            shown[piece.row] += piece.text
            depths |= {depth for _, depth in piece.parts}
        final = results
    assert shown == [r.text for r in expected] == [r.text for r in final]
    assert [r.token_ids for r in final] == [r.token_ids for r in expected]
    assert {0, 1} <= depths


def test_a_stream_of_one_prompt_is_an_iterator_of_text(model):
    """Text alone comes; depths and the result are there for who asks, also before the end."""
    options = Options(max_new_tokens=NEW)
    [expected] = model.generate(["in"], options)
    stream = model.stream("in", options)
    texts = list(stream)
    assert len(texts) > 1 and "".join(texts) == expected.text
    assert {type(text) for text in texts} == {str} and all(texts)
    assert stream.result.token_ids == expected.token_ids
    assert "".join(t for piece in stream.pieces for t, _ in piece.parts) == expected.text
    early = model.stream("in", options)
    assert expected.text.startswith(next(early))
    assert early.result.text == expected.text and list(early) == []
    with pytest.raises(UserError, match="outside the vocabulary"):
        next(model.stream([[99999]]))


def test_the_first_token_comes_before_the_steps_are_compiled(model, monkeypatch):
    compiled, warm_up = [], generation.warm_up

    def stages(*args):
        steps = warm_up(*args)
        compiled.append("prompts")
        return lambda: compiled.append("steps") or steps()

    [expected] = model.generate(["in"], Options(max_new_tokens=NEW))
    monkeypatch.setattr(generation, "warm_up", stages)
    monkeypatch.setattr(model, "_warm", set())
    chunks = model.stream(["in"], Options(max_new_tokens=NEW))
    [piece], _ = next(chunks)
    assert compiled == ["prompts"] and expected.text.startswith(piece.text)
    *_, (_, [result]) = chunks
    assert compiled == ["prompts", "steps"] and result.token_ids == expected.token_ids
    assert result.compile_seconds > 0


def test_the_first_space_of_a_text(model, monkeypatch):
    """Kept after a prompt, read along or not; neither a text nor a turn begins with it."""
    options = Options(3, logit_bias=drop_first_space(model.tokenizer, monkeypatch))
    for more in ({}, {"ended": lambda row, result: None}):
        results = model.generate(["in", model.encode("the "), "", [1]], options, **more)
        assert [result.text for result in results] == ["   ", "   ", "  ", "  "]
    assert "".join(model.stream("in", options)) == "   "
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ messages[0].content }}")
    assert model.chat("in", options).text == "  "


def test_a_conversation_is_answered_as_its_rendered_text(model, monkeypatch):
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}."
        "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    said = [
        {"role": "user", "content": "in"},
        {"role": "assistant", "content": "the hat"},
        {"role": "user", "content": "a cat"},
    ]
    rendered = model.encode("uin.athe hat.ua cat.a")
    options = Options(max_new_tokens=NEW)
    [whole] = model.generate([rendered], options)
    end = whole.token_ids[9]
    monkeypatch.setattr(model.tokenizer, "eos_ids", frozenset({end}))
    length = whole.token_ids.index(end) + 1
    for got in (model.chat(said, options), model.stream(said, options).result):
        assert got.prompt_tokens == len(rendered) and got.finish_reason == "stop"
        assert got.token_ids == whole.token_ids[:length]
    free = dataclasses.replace(options, eos_ids=())
    assert model.chat(said, free).token_ids == whole.token_ids
    asked = model.chat("a cat", options, tree="none")
    assert asked.token_ids == model.chat(said[2:], options).token_ids
    with pytest.raises(UserError, match="last turn has to be the user's"):
        model.chat(said[:2])
    with pytest.raises(UserError, match="options should be Options"):
        model.chat(said, {"max_new_tokens": 3})


def test_a_model_without_a_template_does_not_chat(model):
    for ask in (model.chat, lambda said: next(model.stream(said))):
        with pytest.raises(UserError, match="no chat template; name a shipped one"):
            ask([{"role": "user", "content": "in"}])
    assert model.chat("in", Options(max_new_tokens=3), template="zephyr").new_tokens == 3


@pytest.mark.parametrize("chunk_steps", [(8, 32), (1, 1)])
def test_stop_strings_cut_the_text_even_across_tokens(model, monkeypatch, chunk_steps):
    """Those that begin inside a token and end in a later one, in another step, in another chunk.

    A row without a stop string goes on.
    """
    monkeypatch.setattr(generation, "CHUNK_STEPS", chunk_steps)
    free = Options(max_new_tokens=NEW, temperature=1.2, seed=2)
    [whole] = model.generate([PROMPTS[2]], free)
    pieces = [model.tokenizer.decode([i]) for i in whole.token_ids]
    assert "".join(pieces) == whole.text
    spans = [(0, 1), (3, 4), (8, 10), (NEW - 2, NEW - 1)]
    stops = ["".join(pieces[first : last + 1]) for first, last in spans]
    for stop in (*stops, whole.text[1:10], whole.text[4:16], whole.text[-9:]):
        rows = [dataclasses.replace(free, stop=("\x00", stop)), free]
        cut, shown, final = whole.text.index(stop), "", None
        for new, results in model.stream([PROMPTS[2], "in"], rows):
            shown += "".join(p.text for p in new if p.row == 0)
            assert whole.text.startswith(shown) and len(shown) <= cut
            final = results or final
        [again] = model.generate([PROMPTS[2]], rows[:1])
        assert final[1].new_tokens == NEW and final[1].finish_reason == "length"
        for result in (final[0], again):
            assert result.text == whole.text[:cut] == shown
            assert result.finish_reason == "stop"
            assert result.token_ids == whole.token_ids[: result.new_tokens]
            end = len("".join(pieces[: result.new_tokens]))
            assert end >= cut + len(stop) > end - len(pieces[result.new_tokens - 1])
            check_result(model, result)


def test_a_text_ends_where_its_request_says(model):
    """Each row at its own EOS ids, which are kept; () ends at the limit."""
    free = Options(max_new_tokens=NEW, temperature=1.0)
    whole = [r.token_ids for r in model.generate([PROMPTS[0]] * 3, free)]
    first, second = whole[0][9], whole[1][11]
    rows = [
        dataclasses.replace(free, eos_ids=(2, first)),
        dataclasses.replace(free, eos_ids=(second,)),
        dataclasses.replace(free, eos_ids=()),
    ]
    results = model.generate([PROMPTS[0]] * 3, rows)
    ends = [whole[0].index(first) + 1, whole[1].index(second) + 1, NEW]
    assert [r.token_ids for r in results] == [t[:n] for t, n in zip(whole, ends)]
    assert [r.finish_reason for r in results] == ["stop", "stop", "length"]
    for result in results:
        check_result(model, result)


@pytest.mark.parametrize("tree", [TREE, *wide("none")])
def test_log_probabilities_are_the_models_own(model, directory, tree):
    """Of drafts, bonus tokens and prefill's alike, whatever temperature, filters and penalties drew them."""
    _, config, params = directory
    penalties = {"presence_penalty": 0.7, "logit_bias": {3: 2.0, 5: -100.0}}
    drawn = Options(max_new_tokens=NEW, temperature=1.5, top_k=12, **penalties)
    rows = [dataclasses.replace(drawn, logprobs=n) for n in (None, 0, 3)]
    results = model.generate(PROMPTS, rows, tree=tree)
    assert results[0].logprobs is None is results[0].top_logprobs
    assert results[1].top_logprobs == [[]] * NEW
    for prompt, result in zip(PROMPTS[1:], results[1:]):
        ids = model.encode(prompt)
        logits = forward_logits(config, params, ids + result.token_ids)[len(ids) - 1 : -1]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        own = log_p[np.arange(NEW), result.token_ids]
        assert_close(np.array(result.logprobs), own)
    best = np.argsort(-log_p, axis=-1)[:, :3]
    assert [[i for i, _ in place] for place in result.top_logprobs] == best.tolist()
    got = np.array([[p for _, p in place] for place in result.top_logprobs])
    assert_close(got, np.take_along_axis(log_p, best, axis=-1))
    cut = dataclasses.replace(rows[2], stop=(result.text[6:10],))
    short = model.generate(PROMPTS, [*rows[:2], cut], tree=tree)[2]
    assert short.logprobs == result.logprobs[: short.new_tokens] and short.new_tokens < NEW
    assert short.top_logprobs == result.top_logprobs[: short.new_tokens]


def test_the_models_own_eos_outlives_another_tokenizer(directory, tmp_path):
    """Ids from config.json and generation_config.json next to the weights, and the tokenizer's."""
    path = tmp_path / "model"
    shutil.copytree(directory[0], path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    write_tokenizer(tmp_path / "elsewhere")
    elsewhere = str(tmp_path / "elsewhere")
    load = partial(medusa_jax.load, str(path), "none", tokenizer=elsewhere)
    assert load().eos_ids == (2, 7, 9)
    assert load(eos_ids=[5]).eos_ids == (5,)
    for unknown in (-1, 10**6):
        with refused(f"eos_ids: token {unknown} is outside the vocabulary"):
            load(eos_ids=[5, unknown])


def test_heads_of_another_backbone_are_used_when_allowed(directory, tmp_path):
    write_model(tmp_path, seed=1)
    load = partial(medusa_jax.load, str(tmp_path), str(directory[0] / "heads"))
    with pytest.raises(UserError, match=r"trained on the model with.*allow_other_base"):
        load()
    model = load(allow_other_base=True)
    text, plain = (
        model.generate(["in"], Options(max_new_tokens=9), tree=tree)[0].token_ids
        for tree in ("chain:1", "none")
    )
    assert text == plain


def test_the_context_ends_in_mid_generation(model):
    rows = [Options(max_new_tokens=500), Options(max_new_tokens=5)]
    long, short = model.generate(["the " * 20, "in"], rows)
    assert long.prompt_tokens + long.new_tokens == CONTEXT
    assert (long.finish_reason, short.finish_reason) == ("context", "length")
    plain, _ = model.generate(["the " * 20, "in"], rows, tree="none")
    assert long.token_ids == plain.token_ids
    check_result(model, long, CONTEXT)


def test_compiling_is_timed_once(model):
    options = Options(max_new_tokens=11)
    assert model.compile(PROMPTS, options, tree="chain:3") > 0
    assert model.compile(PROMPTS, options, tree="chain:3") == 0
    similar = dataclasses.replace(options, max_new_tokens=12)
    assert model.compile([p[1:] for p in PROMPTS], similar, tree="chain:3") == 0
    assert model.generate(PROMPTS, options, tree="chain:3")[0].compile_seconds == 0


def test_compare_reports_identity(model):
    [one] = compare(model, PROMPTS[:1], Options(max_new_tokens=NEW), repeats=2)
    facts = one.facts()
    assert one.identical and facts["first_divergence"] is None
    assert facts["autoregressive"]["token_ids"] == one.drafted.token_ids
    ratio = one.drafted.decode_seconds / one.autoregressive.decode_seconds
    assert facts["speedup"] == pytest.approx(1 / ratio)
    steps = one.drafted.steps / one.autoregressive.steps
    assert facts["step_latency_ratio"] == pytest.approx(ratio / steps)


@pytest.mark.wide
def test_the_publishers_bar_on_ngrams_is_kept(directory, tmp_path):
    """generation_config.json: no token twice; what is given to `load` goes before it."""
    path = tmp_path / "model"
    shutil.copytree(directory[0], path)
    (path / "generation_config.json").write_text('{"no_repeat_ngram_size": 1}')

    files = str(path), str(path / "heads")
    load = partial(medusa_jax.load, *files, tree=TREE, dtype="float64")
    barred, free = load(), load(no_repeat_ngram_size=0)
    assert (barred.no_repeat_ngram_size, free.no_repeat_ngram_size) == (1, 0)
    assert load(no_repeat_ngram_size=3).no_repeat_ngram_size == 3
    options = Options(max_new_tokens=NEW, logprobs=barred.config.vocab_size)
    found = compare(barred, PROMPTS, options, repeats=1), free.generate(PROMPTS, options)
    for prompt, one, without in zip(PROMPTS, *found):
        tokens = one.drafted.token_ids
        assert one.identical and tokens != without.token_ids
        text = barred.encode(prompt)
        for token, place in zip(tokens, one.drafted.top_logprobs):  # of none that is barred
            assert {i for i, _ in place} == {*range(barred.config.vocab_size)} - {*text}
            text.append(token)
        assert len({*text}) == len({*barred.encode(prompt)}) + len(tokens)


def test_the_publishers_penalty_is_the_default_everywhere(directory, tmp_path):
    """In a text, a conversation and a served text; a request's own goes before it."""
    path = tmp_path / "model"
    shutil.copytree(directory[0], path)
    settings = {"repetition_penalty": 3.0, "do_sample": False, "forced_eos_token_id": 2}
    (path / "generation_config.json").write_text(json.dumps(settings))
    set_template(path, "{{ messages[0].content }}")
    model = medusa_jax.load(path, path / "heads", tree=TREE, dtype="float64")
    assert model.repetition_penalty == 3
    plain = Options(max_new_tokens=NEW)
    ours, free = (dataclasses.replace(plain, repetition_penalty=p) for p in (3.0, 1.0))
    for answer in (lambda o: model.generate(["in"], o)[0], lambda o: model.chat("in", o)):
        first, second, third = (answer(o).token_ids for o in (plain, ours, free))
        assert first == second != third
    for least in (0, 3):
        request = Request("in", plain, min_tokens=least)
        job = make_job(model, request, 99, 99, Handle(print), print)
        assert job.decode.penalties[0].repetition == 3


def test_an_empty_prompt_starts_from_bos_or_is_refused(model, directory, tmp_path):
    [result] = model.generate([""], Options(max_new_tokens=4))
    assert result.prompt_tokens == 1 and result.new_tokens == 4
    write_tokenizer(tmp_path, bos=False)
    path = str(directory[0])
    other = medusa_jax.load(path, "none", tree="none", tokenizer=str(tmp_path))
    with pytest.raises(UserError, match="empty and the tokenizer has no BOS"):
        other.generate([""])


def test_only_the_heads_of_the_tree_are_read_when_asked(directory):
    path = str(directory[0])
    heads = f"{path}/heads"
    few = medusa_jax.load(path, heads, tree="chain:2", dtype="float32", all_heads=False)
    assert sorted(few.variables["heads"]) == ["heads_0", "heads_1"]
    every = medusa_jax.load(path, heads, tree="chain:2", dtype="float32")
    assert len(every.variables["heads"]) == 3 and every.tree == Tree.chain(2)


def test_text_whose_token_has_no_embedding_is_refused():
    """As its id is: the lookup would clip it to another token's row."""

    class OneTokenMore:
        bos_id = 40

        def encode(self, text, add_bos=False):
            return [3, 40] if text else []

    for text in ("a new word", ""):
        with pytest.raises(UserError, match=r"id 40 is outside the vocabulary 0\.\.39"):
            prompt_ids(OneTokenMore(), text, 40)


def test_a_tokenizer_with_more_ids_than_the_model_is_announced(directory, tmp_path, capsys):
    shutil.copytree(directory[0], tmp_path / "model")
    tokens = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    n = len(tokens["model"]["vocab"])
    word = {"id": n, "content": "<new>", "special": True, "single_word": False}
    word |= {"lstrip": False, "rstrip": False, "normalized": False}
    tokens["added_tokens"].append(word)
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokens))
    opened = open_model(str(tmp_path / "model"))
    assert f"has {n + 1} ids, the model {n} embeddings" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"id {n} is outside the vocabulary"):
        prompt_ids(opened.tokenizer, "a<new>", n)


SAID = {"role": "user", "content": "in"}
NO_PROMPT = "a prompt is text or a list of token ids, not"
TALK = r"these are messages: call model\.chat\("
SAMPLED = {"temperature": 0.7, "seed": 4, "top_p": 0.9}
RULES = [("auto", TREE, {}), ("auto", "none", {}), ("auto", "none", SAMPLED)]
RULES += [(rule, TREE, SAMPLED) for rule in ("auto", "typical", "rejection")]


@pytest.mark.parametrize(("acceptance", "tree", "fields"), [RULES[0], *wide(*RULES[1:])])
def test_scores_that_are_no_numbers_never_become_a_token(
    model, acceptance, tree, fields, capsys, monkeypatch
):
    """NaN after some token ends its text with an error, that of a prompt, too; others go on."""
    ways = {"tree": tree, "acceptance": acceptance}
    options = Options(max_new_tokens=NEW, **fields)
    whole = model.generate(PROMPTS, options, **ways)
    seen = {i for p in PROMPTS for i in model.encode(p)}
    token = next(i for i in whole[0].token_ids if i not in seen | {*whole[1].token_ids})
    at = whole[0].token_ids.index(token) + 1
    backbone = model.variables["backbone"]
    embedding = {"embedding": backbone["embed_tokens"]["embedding"].at[token].set(np.nan)}
    poisoned = model.variables | {"backbone": backbone | {"embed_tokens": embedding}}
    monkeypatch.setattr(model, "variables", poisoned)
    broken = model.generate(PROMPTS, options, **ways)
    assert broken[0].token_ids == whole[0].token_ids[:at]
    assert broken[0].finish_reason == "error" and "NaN" in capsys.readouterr().err
    assert broken[1].token_ids == whole[1].token_ids
    *_, (_, streamed) = model.stream(PROMPTS, options, **ways)
    assert [r.token_ids for r in streamed] == [r.token_ids for r in broken]
    [first, second] = model.generate([[token], [3]], options, **ways)
    assert first.token_ids == [] and first.finish_reason == "error"
    assert second.finish_reason != "error" or token in second.token_ids


OUTSIDE = "outside the vocabulary"
HOT = Options(temperature=1.0)


@pytest.mark.parametrize(
    ("prompts", "options", "fields", "words"),
    [
        ([5, 6], None, {}, NO_PROMPT),
        ("the", None, {}, r"\[prompt\]"),
        (5, None, {}, "prompts is a list"),
        (["a"], {"max_new_tokens": 3}, {}, "options should be Options"),
        (["a"], None, {"tree": [[0]]}, "tree should be str | Tree"),
        ([[1.5]], None, {}, NO_PROMPT),
        ([[SAID]], None, {}, TALK),
        (SAID, None, {}, TALK),
        (["a" * CONTEXT], None, {}, f"{CONTEXT + 1} tokens.*context is {CONTEXT}"),
        ([[0, 40]], None, {}, OUTSIDE),
        ([], None, {}, "list of prompts is empty"),
        (["a", "b"], [Options()], {}, "2 prompts but 1 options"),
        (["a"], None, {"tree": "chain:4"}, "4 deep.* at most 3 deep"),
        (["a"], None, {"tree": Tree.from_choices([[99]])}, "rank 99 exceeds"),
        (["a"], None, {"acceptance": "eager"}, "not 'eager'"),
        (["a"], HOT, {"acceptance": "greedy"}, "needs temperature 0"),
        (["a"], Options(logprobs=99), {}, "logprobs 99 exceeds the vocabulary"),
    ],
)
def test_requests_that_cannot_be(model, prompts, options, fields, words):
    with pytest.raises(UserError, match=words):
        model.generate(prompts, options or Options(max_new_tokens=3), **fields)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.lossless("eager"), "not 'eager'"),
        (lambda m: m.engine(logprobs=-1), "logprobs"),
        (lambda m: m.engine(logprobs=99), "logprobs"),
        (lambda m: m.parse_tree(3), "tree should be str | Tree"),
        (lambda m: m.parse_tree([[0]]), "tree should be str | Tree"),
        (lambda m: m.complete("a", "b", {"seed": 1}), "options should be Options"),
        (lambda m: m.chat("in", {"seed": 1}), "options should be Options"),
        (lambda m: m.chat("in", template=["vicuna"]), "template should be str"),
        (lambda m: m.chat(["in"], template="vicuna"), "object with 'role'"),
        (lambda m: m.chat(SAID, template="vicuna"), "object with 'role'"),
    ],
)
def test_other_calls_with_wrong_arguments(model, call, words):
    with pytest.raises(UserError, match=words):
        call(model)


def test_a_stream_that_failed_fails_again(model):
    stream = model.stream("a", Options(3, logit_bias={99: 1.0}))
    for _ in range(2):
        with pytest.raises(UserError, match="token 99 is outside"):
            _ = stream.result


MISPLACED = [
    (
        medusa_jax.load,
        {"drafer": ""},
        "load has no argument 'drafer'; did you mean 'drafter'",
    ),
    (Options, {"max_tokens": 3}, "Options has no .* 'max_tokens'; did you mean 'max_new"),
    ("chat", {"seed": 2}, r"Model.chat has no .*: give Options\(seed=...\)"),
    ("generate", {"temprature": 1}, r"'temprature': give Options\(temperature=...\)"),
    ("stream", {"acceptence": "typical"}, "did you mean 'acceptance'?"),
    ("compile", {"tre": ""}, "Model.compile has no argument 'tre'; did you mean 'tree'?"),
    ("engine", {"nonsense": 1}, "Model.engine has no argument 'nonsense'$"),
]


@pytest.mark.parametrize(("function", "fields", "words"), MISPLACED)
def test_misspelt_and_misplaced_arguments(model, function, fields, words):
    call = getattr(model, function) if isinstance(function, str) else function
    with pytest.raises(UserError, match=words):
        call(*[[] for _ in ("prompt",) if isinstance(function, str)], **fields)


def test_what_is_shown(model, directory):
    """Short, with the model's name; and only public names."""
    assert repr(TREE) == "<Tree: 7 nodes, 3 deep>"
    assert repr(Tree.copies(2)) == "<Tree: 3 nodes, 2 deep, 2 copied>"
    name = directory[0].name
    assert repr(model).startswith(
        f"<Model {name}: 1 layers of width 16 in float64, drafts by"
    )
    stream = model.stream("in", Options(max_new_tokens=NEW))
    assert repr(stream) == "<TextStream: 0 characters so far>"
    assert dir(medusa_jax) == sorted([*medusa_jax.__all__, "__version__"])


def test_greedy_rows_take_the_program_of_sampled_ones(model, monkeypatch):
    """If that is compiled already; the text is the same."""
    monkeypatch.setattr(model, "_warm", set())
    greedy, sampled = Options(max_new_tokens=NEW), Options(NEW, 0.7, seed=2)
    mixed = model.generate(PROMPTS[:2], [greedy, sampled])
    again = model.generate(PROMPTS[:2], greedy)
    assert mixed[0].compile_seconds > 0 == again[0].compile_seconds
    assert again[0].token_ids == mixed[0].token_ids
    [_, engine, _] = model.plan(PROMPTS[:2], greedy)
    assert engine.acceptance == "sampled"
    assert model.plan(PROMPTS, greedy)[1].acceptance == "greedy"  # another shape


@pytest.mark.parametrize("n", [10**12, 99999])
def test_ends_outside_the_vocabulary_are_refused(model, n):
    with refused(f"eos_ids: token {n} is outside the vocabulary 0.."):
        model.request(["a"], [Options(3, eos_ids=(5, n))])


def test_a_turn_may_end_with_a_token_that_only_the_tokenizer_has(model):
    """It never comes."""
    last = model.tokenizer.vocab_size - 1
    smaller = copy.copy(model)
    smaller.config = dataclasses.replace(model.config, vocab_size=last)
    assert smaller.request([[5]], [Options(3, eos_ids=(2, last))]).ends == [[2]]


WRONG = {"max_new_tokens": [0, 2.7, True, None], "logprobs": [-1]}
WRONG |= {"temperature": [-0.1, 1e-38, float("nan"), float("inf"), "hot", 10**400]}
WRONG |= {"top_p": [-0.1, 1.5], "min_p": [-1.0], "epsilon": [0.0], "delta": [-1.0]}
WRONG |= {
    "top_k": [-2, 2**31, 2.5, "5"],
    "seed": ["a", 1e3],
    "stop": [5, (5,), None, "\ud83d"],
}
WRONG |= {"eos_ids": [(3, -1), 5, "27"]}
WRONG |= {"logit_bias": [[1], {5: "a"}, {2.5: 1}, {"a": 1}, {5: float("nan")}, {5: 1e300}]}


ARGUMENTS = {
    "model": [5, b"m"],
    "mesh": [1],
    "eos_ids": [5, b"2", [2.5]],
    "batch": ["2", 0],
}
ARGUMENTS |= {"allow_other_base": ["no", 1], "no_repeat_ngram_size": [-1]}


@pytest.mark.parametrize("make, wrong", [(Options, WRONG), (medusa_jax.load, ARGUMENTS)])
def test_values_out_of_range(make, wrong):
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(UserError, match=name):
                make(**{name: value})


def test_options_take_numbers_of_numpy_and_lists():
    got = Options(np.int64(9), np.float32(0.5), seed=jax.numpy.int32(3), stop="the end",
                  eos_ids=np.array([2, 7]), logit_bias={"7": np.float64(1), 3: 2})  # fmt: skip
    ids = {"eos_ids": (2, 7), "logit_bias": {3: 2.0, 7: 1.0}}
    assert got == Options(9, 0.5, seed=3, stop=("the end",), **ids) and hash(got)
    assert type(got.temperature) is float


def test_names_of_the_package():
    """All are there, listed and documented."""
    assert medusa_jax.Tree is Tree
    for name in medusa_jax.__all__:
        assert getattr(medusa_jax, name).__doc__ and name in dir(medusa_jax)
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = medusa_jax.nothing_here
