import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from refusals import refused
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from medusa_jax.text.answers import encode_conversation
from medusa_jax.text.chat import (
    PLAIN,
    SPECIALS,
    TEMPLATES,
    encode_prompt,
    encode_turns,
    render,
    shipped_template,
    stop_ids,
    template_source,
)
from medusa_jax.text.jinja import SampleError
from medusa_jax.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "I am fine"},
    {"role": "user", "content": "And  é日?"},
    {"role": "assistant", "content": "Fine 😀!"},
]


@pytest.fixture(scope="module")
def llama2(sentencepiece_dir):
    return load_tokenizer(str(sentencepiece_dir))


@pytest.fixture(scope="module")
def llama3(byte_level_dir):
    return load_tokenizer(str(byte_level_dir))


def with_template(tokenizer, template):
    return Tokenizer(
        tokenizer.backend,
        bos_id=tokenizer.bos_id,
        eos_ids=tokenizer.eos_ids,
        chat_templates={"default": template},
        special_texts=tokenizer.special_texts,
    )


def counted_texts(tokenizer, ids, counted):
    """Texts of the runs of counted tokens."""
    runs, current = [], []
    for i, one in [*zip(ids, counted), (0, 0)]:
        if one:
            current.append(i)
        elif current:
            runs.append(tokenizer.decode(current, skip_special=False))
            current = []
    return runs


TEXT = {
    "vicuna": "<s>Be brief. USER: Hello? ASSISTANT: I am fine</s>"
    "USER: And  é日? ASSISTANT: Fine 😀!</s>",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello? [/INST] I am fine </s>"
    "<s>[INST] And  é日? [/INST] Fine 😀! </s>",
    "mistral": "<s>[INST] Be brief.\n\nHello? [/INST] I am fine</s>"
    "[INST] And  é日? [/INST] Fine 😀!</s>",
    "zephyr": "<s><|system|>\nBe brief.</s>\n<|user|>\nHello?</s>\n<|assistant|>\nI am fine</s>\n"
    "<|user|>\nAnd  é日?</s>\n<|assistant|>\nFine 😀!</s>\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHello?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nI am fine<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd  é日?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nFine 😀!<|eot_id|>",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
    "<|im_start|>assistant\nI am fine<|im_end|>\n<|im_start|>user\nAnd  é日?<|im_end|>\n"
    "<|im_start|>assistant\nFine 😀!<|im_end|>\n",
}
ENDS = {"llama3": "<|eot_id|>", "chatml": "<|im_end|>", "llama2": " </s>"}


@pytest.mark.parametrize("name", TEXT)
def test_shipped_templates(name, llama2, llama3):
    tokenizer = llama3 if name in ("llama3", "chatml") else llama2
    text, spans = render(shipped_template(name), TALK, tokenizer.special_texts)
    assert text == TEXT[name]
    end = ENDS.get(name, "</s>")
    said = [f"I am fine{end}", f"Fine 😀!{end}"]
    assert [text[a:b].lstrip(" ") for a, b in spans] == said
    ids, counted = encode_conversation(tokenizer, TALK, name)
    runs = counted_texts(tokenizer, ids, counted)
    assert [run.lstrip(" ") for run in runs] == said
    if name != "chatml":
        bos = tokenizer.special_texts["bos_token"]
        assert ids.count(tokenizer.bos_id) == text.count(bos)

    # The prompt of each answer is what precedes it in training, token for token.
    for i in (2, 4):
        prompt = encode_prompt(tokenizer, TALK[:i], name)
        assert ids[: len(prompt)] == prompt
        assert (counted[len(prompt) - 1], counted[len(prompt)]) == (0, 1)
    assert encode_conversation(tokenizer, TALK[1:], name)[1].count(1)


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "A:{% generation %}{{ m.content }}{% endgeneration %}<|eot_id|>\n"
    "{% else %}Q:{{ m.content }}\n{% endif %}{% endfor %}"
)
UNMARKED = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n{{ m.content }}<|eot_id|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n{% endif %}"
)
# As APIs return it: a thought in its own field.
THINKING = UNMARKED.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
)
ANSWER = {"role": "assistant", "content": "Yo", "reasoning_content": "Hm. <|eot_id|>"}
EMPTY = ANSWER | {"reasoning_content": "", "content": "<think></think>Yo"}
FINE = ["I am fine<|eot_id|>", "Fine 😀!<|eot_id|>"]


@pytest.mark.parametrize(
    ("template", "talk", "runs"),
    [
        # The end-of-text token right after a marked span counts, the line break does not.
        (MARKED, TALK[1:], FINE),
        # Without marks: spans from rendered prefixes; what comes after the turn's last EOS does not count.
        (UNMARKED, TALK, FINE),
        (THINKING, [*TALK[:2], ANSWER], ["<think>Hm. <|eot_id|></think>Yo<|eot_id|>"]),
        # An empty thought that the model wrote counts.
        (THINKING, [*TALK[:2], EMPTY], ["<think></think>Yo<|eot_id|>"]),
    ],
)
def test_what_counts_by_the_models_own_template(template, talk, runs, llama3):
    ids, counted = encode_conversation(with_template(llama3, template), talk)
    assert counted_texts(llama3, ids, counted) == runs
    assert ids.count(llama3.bos_id) == (template is not MARKED)
    ends = {MARKED: len(runs), UNMARKED: len(talk), THINKING: 3}
    assert ids.count(llama3.token_to_id("<|eot_id|>")) == ends[template]


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_an_answer_of_weight_0_does_not_count(template, llama3):
    tokenizer, talk = with_template(llama3, template), list(TALK[1:])
    whole, _ = encode_conversation(tokenizer, talk)
    talk[1] = talk[1] | {"weight": "0"}
    ids, counted = encode_conversation(tokenizer, talk)
    assert ids == whole and counted_texts(llama3, ids, counted) == FINE[1:]


def test_a_turn_may_end_with_another_token_than_a_text(llama3):
    """As in a fine-tuned base model: ChatML's turns, and the EOS of the base model."""
    tokenizer = with_template(llama3, UNMARKED.replace("<|eot_id|>", "<|im_end|>"))
    ids, counted = encode_conversation(tokenizer, TALK)
    said = ["I am fine<|im_end|>", "Fine 😀!<|im_end|>"]
    assert counted_texts(llama3, ids, counted) == said
    ids, counted = encode_conversation(tokenizer, TALK, cut=True)
    assert counted_texts(llama3, ids, counted) == [said[0], "Fine 😀!"]


THOUGHTS = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nI am fine"},
    {"role": "user", "content": "And you?"},
    {"role": "assistant", "content": "<think>\nAgain.\n</think>\n\n<b>Fine</b>"},
]
HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n"
OPENING = "<|start_header_id|>assistant<|end_header_id|>\n"
SPLIT = (
    "{% for m in messages %}{% set c, t = m.content, '' %}{% if '</think>' in c %}"
    "{% set t = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}" + HEADER
)
ASKED = "{% if m.role != 'assistant' %}{{ c }}<|eot_id|>\n"
PROMPT = "{% endif %}{% endfor %}{% if add_generation_prompt %}" + OPENING
# [[ ... ]] is what the model writes; the rest of a turn is the template's.
REWRITING = {
    # Qwen3: earlier thoughts are left out, a last turn without one gets an empty one.
    "empty": SPLIT + ASKED + "{% elif not loop.last %}[[{{ c }}<|eot_id|>]]\n{% elif t %}"
    "[[<think>\n{{ t }}\n</think>\n\n{{ c }}<|eot_id|>]]\n{% else %}"
    "<think>\n\n</think>\n\n[[{{ c }}<|eot_id|>]]\n" + PROMPT + "{% endif %}",
    # Qwen3-Thinking: the same, and the prompt begins the thought.
    "begun": SPLIT + ASKED + "{% elif not loop.last %}[[{{ c }}<|eot_id|>]]\n{% elif t %}"
    "<think>\n[[{{ t }}\n</think>\n\n{{ c }}<|eot_id|>]]\n{% else %}"
    "<think>\n\n</think>\n\n[[{{ c }}<|eot_id|>]]\n" + PROMPT + "<think>\n{% endif %}",
    # R1 and QwQ: no thought is shown, the prompt begins one.
    "stripped": SPLIT + ASKED + "{% else %}[[{{ c }}<|eot_id|>]]\n" + PROMPT
    + "<think>\n{% endif %}",
    # GLM: earlier turns keep the marks of their thoughts, empty.
    "emptied": SPLIT + ASKED + "{% else %}<think></think>\n[[{{ c }}<|eot_id|>]]\n" + PROMPT
    + "{% endif %}",
    # gpt-oss: the model writes the header of its channel, and the last turn ends in another way.
    "channel": SPLIT + ASKED + "{% else %}[[final: {{ c }}{% if loop.last %}<|eot_id|>"
    "{% endif %}]]{% if not loop.last %}<|im_end|>{% endif %}" + PROMPT + "{% endif %}",
    # Mistral's of 2024: the system text is in the last user turn.
    "moved": SPLIT + "{% if m.role == 'user' %}{% if loop.index0 >= messages|length - 2 %}"
    "Be brief. {% endif %}{{ c }}<|eot_id|>\n{% elif m.role == 'system' %}\n{% else %}"
    "[[{{ c }}<|eot_id|>]]\n" + PROMPT + "{% endif %}",
    # Earlier answers are not shown at all.
    "left out": SPLIT + ASKED + "{% elif loop.last %}[[{{ c }}<|eot_id|>]]\n{% else %}...\n"
    + PROMPT + "{% endif %}",
}  # fmt: skip


@pytest.mark.parametrize("talk", [TALK, THOUGHTS], ids=["plain", "thoughts"])
@pytest.mark.parametrize("name", REWRITING)
def test_templates_that_rewrite_turns(llama3, byte_level_dir, name, talk):
    """The mask that transformers makes where the template marks what the model writes."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(byte_level_dir)
    # A line break after a block would be the block's.
    template = REWRITING[name].replace("]]\n", "]]{{ '\\n' }}")
    marked = template.replace("[[", "{% generation %}")
    out = theirs.apply_chat_template(
        talk,
        chat_template=marked.replace("]]", "{% endgeneration %}"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    plain = template.replace("[[", "").replace("]]", "")
    ids, counted = encode_conversation(with_template(llama3, plain), talk)
    assert (ids, counted) == (out["input_ids"], out["assistant_masks"])
    assert any(counted)


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("start", ["", "bos", "bos blank"])
@pytest.mark.parametrize("blank", ["first", "always", "never", "normalizer"])
def test_a_written_bos_is_read_as_in_transformers(blank, start, added):
    """Also what follows it, which some tokenizers take for the start of a text."""
    transformers = pytest.importorskip("transformers")
    pieces = ["<s>", "</s>", "▁", *"<s>/HiUser: "]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, [])
    )
    if blank == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=blank, split=False)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(backend.to_str()),
        bos_token="<s>",
        eos_token="</s>",
    )
    if added:
        backend.add_special_tokens(["<s>", "</s>"])
    template = {"": "", "bos": "{{ bos_token }}", "bos blank": "{{ bos_token + ' ' }}"}[
        start
    ]
    template += "User: {{ messages[0].content }}</s>{{ messages[0].content }}"
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    templates = {"default": template}
    ours = Tokenizer(backend, bos_id=0, chat_templates=templates, special_texts=specials)
    talk = [{"role": "user", "content": "Hi"}]
    expected = theirs.apply_chat_template(talk, chat_template=template)["input_ids"]
    found = encode_prompt(ours, talk)
    assert found == expected if added else found[0] == 0 or not start


def test_an_answer_shown_twice_is_refused(llama3):
    template = UNMARKED.replace("{{ m.content }}", "{{ m.content }} {{ m.content }}")
    with refused("shows an answer several times", SampleError):
        encode_conversation(with_template(llama3, template), TALK)


def named(**sources):
    return [{"name": name, "template": source} for name, source in sources.items()]


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        (named(default="D", tool_use="T", rag="R"), {}),
        (named(default="D", rag="R"), {}),
        (named(tool_use="T", rag="R"), {}),
        ("S", {}),
        ("S", {"chat_template.jinja": "F"}),
        (
            "S",
            {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "X"},
        ),
        (named(default="D", tool_use="T"), {"additional_chat_templates/rag.jinja": "X"}),
        (named(default="D", tool_use="T"), {"chat_template.jinja": "F"}),
    ],
)
def test_named_templates_are_chosen_as_in_transformers(
    settings, files, byte_level_dir, tmp_path
):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "copy"
    shutil.copytree(byte_level_dir, folder)
    raw = json.loads((folder / "tokenizer_config.json").read_text())
    raw["chat_template"] = settings
    (folder / "tokenizer_config.json").write_text(json.dumps(raw))
    (folder / "additional_chat_templates").mkdir()
    for name, source in files.items():
        (folder / name).write_text(source)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = load_tokenizer(str(folder))
    assert ours.chat_template
    for name, tools in (("", False), ("", True), ("rag", False), ("tool_use", True)):
        try:
            expected = theirs.get_chat_template(name or None, [{}] if tools else None)
        except ValueError:  # no default
            with refused("several by name and no default", SampleError):
                render(template_source(ours, name, tools), TALK, {})
            continue
        if expected == name:  # transformers takes an unknown name for a template
            with refused("chat template is one of"):
                template_source(ours, name, tools)
        else:
            assert template_source(ours, name, tools) == expected


ENDING = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END{% endfor %}"


@pytest.mark.parametrize(
    ("end", "ids"),
    [
        ("<|im_end|>\n", {6}),
        (" \n<|eot_id|>", {2}),
        ("<|end_of_text|>", {1}),
        ("\n", {5}),  # the next turn's token ends the answer
        ("\n\nand so on: <|eot_id|>", set()),
        ("{{ raise_exception('no') if loop.index == 3 }}<|im_end|>", {6}),
        ("{{ raise_exception('no') }}", set()),
    ],
)
def test_a_turn_ends_where_the_template_ends_it(end, ids, llama3):
    """Whatever the files call the EOS: models were published with the end of a text as their only one."""
    tokenizer = with_template(llama3, ENDING.replace("END", end))
    tokenizer.eos_ids = frozenset({9})
    assert stop_ids(tokenizer) == {9} | ids
    assert stop_ids(tokenizer, "llama3") == {9, 2}


@pytest.mark.parametrize("name", ["chatml", "vicuna"])
def test_threads_do_not_mix_their_marks(name):
    """Training's conversations are read by many threads, which share the compiled template."""
    source = shipped_template(name)
    talks = [TALK[1 : 3 + 2 * (i % 2)] * (1 + i % 4) for i in range(200)]
    alone = [render(source, talk, {}) for talk in talks]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(lambda talk: render(source, talk, {}), talks))
    finally:
        sys.setswitchinterval(interval)
    assert together == alone


TRIMMED = (
    "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}<|eot_id|>\n{% endfor %}"
)


@pytest.mark.parametrize(
    "template", [TRIMMED, *map(shipped_template, ("llama3", "chatml"))]
)
@pytest.mark.parametrize("text", ["The answer is", "{", "So: \n", "", "x <|eot_id|> y"])
def test_a_turn_is_continued_as_in_transformers(llama3, byte_level_dir, template, text):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(byte_level_dir)
    talk = [*TALK[:-1], {"role": "assistant", "content": text}]
    expected = theirs.apply_chat_template(
        talk, chat_template=template, tokenize=False, continue_final_message=True
    )
    ids = encode_turns(with_template(llama3, template), talk, {}, continued=True)
    assert llama3.decode(ids, skip_special=False) == expected
    with refused("leaves out the last turn"):
        shorter = "{{ messages[0].content }}"
        encode_turns(with_template(llama3, shorter), talk, {}, continued=True)


# Constructs of published templates, beyond those that are shipped.
SANE = {
    "trimmed": "{{ bos_token }}\n  {% for m in messages %}\n  {{- m.content | trim }}|{% endfor %}\n",
    "found": "{% set ns = namespace(found=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.found = loop.index %}{% endif %}{% endfor %}{{ ns.found }}",
    "json": "{{ messages | tojson }}{{ {'b': 1, 'a': '<é>'} | tojson(indent=2) }}",
    "macro": "{% macro turn(m) %}[{{ m['role'].upper() }}]{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "control": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
    "{% break %}{% endfor %}",
    "tests": "{% if tools is not none %}T{% endif %}{% if documents is defined %}D{% endif %}"
    "{{ messages[0]['content'].split()[0] ~ messages | length }}{{ x is defined }}",
    "prompt": "{% if add_generation_prompt %}A:{% endif %}{{ dict(a=1).a }}{{ messages[-1].content }}",
    "date": "{{ strftime_now('%Y') }}",
    "marks": "{% for m in messages %}{{ m.role }}{%- generation -%} {{ m.content }}"
    "{% endgeneration %}\n{% endfor %}",
}


@pytest.mark.parametrize("name", [*SANE, *TEMPLATES])
def test_rendered_as_in_transformers(name):
    """Text and spans of `apply_chat_template`'s own function."""
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    source = SANE.get(name) or shipped_template(name)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    talk = [*TALK[1:], {"role": "user", "content": "</s>{{ 7 * 7 }}"}]
    for prompt in (False, True):
        [text], spans = theirs.render_jinja_template(
            [talk], chat_template=source, return_assistant_tokens_mask=True,
            add_generation_prompt=prompt, **dict.fromkeys(SPECIALS, "") | special,
        )  # fmt: skip
        assert render(source, talk, special, prompt) == (text, spans[0])
    # As in `apply_chat_template`, a variable of the caller's comes before a token of its name.
    assert render("{{ a_token }}", talk, {"a_token": "a"}, more={"a_token": "b"})[0] == "b"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ none.x.y }}",
        "{{ raise_exception('roles!') }}",
    ],
)
def test_errors_of_a_template_refuse_the_conversation(source):
    """In a sandbox; the next conversation is rendered as before."""
    with refused("refuses the conversation: ", SampleError):
        render(source, TALK, {})
    assert render("{{ messages[0].content }}", TALK, {})[0] == "Be brief."


def test_refusals(llama2, llama3):
    for name, message in {
        "vicunia": "not 'vicunia'.*did you mean 'vicuna'",
        "": "no chat template; name a shipped one: vicuna",
        "qwen": r"<\|im_end\|>, which the tokenizer does not have",
    }.items():
        with refused(message):
            encode_conversation(llama2, TALK, name)
    for name in ("", "vicuna"):
        with refused("model holds no tokenizer .*: chats cannot be told in tokens"):
            encode_prompt(NoTokenizer("model"), "hi", name)
    with refused("no token of the conversation counts as the assistant's", SampleError):
        encode_conversation(llama2, TALK[:2], "vicuna")
    with refused("template is broken"):
        encode_conversation(with_template(llama3, "{% if %}"), TALK)
    for talk, message in (
        (TALK, "last turn has to be the user's"),
        ([{"role": "tool", "content": "x"}], "unknown role 'tool'"),
        ([], "at least one"),
    ):
        with refused(message):
            encode_prompt(llama2, talk, "mistral")


def test_prompts(llama2):
    # One BOS, and after that of a shipped template the first word as it is at the start of any text.
    ids = llama2.encode("[INST] x [/INST]", add_bos=True)
    assert encode_prompt(llama2, "x", "mistral") == ids
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert encode_prompt(llama2, parts, "mistral") == ids


def test_stop_ids(llama2, llama3):
    assert stop_ids(llama2, "vicuna") == {2}
    assert stop_ids(llama3, "qwen") == {1, 2, llama3.token_to_id("<|im_end|>")}
    assert stop_ids(llama3) == stop_ids(llama3, PLAIN) == {1, 2}
    assert set(TEMPLATES) == {*TEXT, "qwen"}
