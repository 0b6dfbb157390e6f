"""Mark the tokens of conversations that the assistant has to produce.

The template determines these tokens: the text between `{% generation %}` and `{% endgeneration %}`, if it has such
blocks (all shipped templates do). Few published templates do, so otherwise the template is rendered with a stand-in
for each answer, which shows where the answer is in the text of the whole conversation (`_spans_by_stand_in`). An
end-of-text token directly after an assistant turn counts, so that the model learns to stop.
"""

import re
import secrets

from medusa_jax.text.chat import render, stop_ids, template_source, tokenize
from medusa_jax.text.jinja import SampleError, Span
from medusa_jax.text.literal_text import PRIVATE, Message, literal_text
from medusa_jax.text.tokenizer import Tokenizer, TurnPrompt

MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# An empty thought, or the end of one that the generation prompt begins: "<think>\n\n</think>\n\n".
THOUGHT = re.compile(
    r"\s*(?:[<\[][^<>\[\]]*th(?:ink|ought)[^<>\[\]]*[>\]]\s*)+", re.IGNORECASE
)


def encode_conversation(
    tokenizer: Tokenizer,
    messages: list[Message],
    template_name: str = "",
    cut: bool = False,
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and, for each, 1 if the assistant produces it, else 0.

    The answer of a turn with `weight` "0" has 0 as well.

    Args:
      template_name: a shipped template (`chat.TEMPLATES`); "" = the tokenizer's.
      cut: the last answer is incomplete, so that the end-of-text token after it does not count.

    Raises:
      SampleError: the template refuses the conversation, its turns cannot be separated, or no token would count.
      UserError: an unknown template name, or the tokenizer has no template.
    """
    source = template_source(tokenizer, template_name)
    hidden = literal_text(tokenizer).hide(messages)
    messages = hidden or messages
    text, spans = render(source, messages, tokenizer.special_texts)
    if not MARKED.search(source):
        spans = _spans_by_stand_in(source, messages, tokenizer.special_texts, text)
    counts = [m.get("weight") != "0" for m in messages if m["role"] == "assistant"]
    if not all(counts):
        if len(counts) != len(spans):
            raise SampleError(
                "the chat template does not show each answer once, so the text of weight 0 is unknown"
            )
        spans = [span for span, is_counted in zip(spans, counts) if is_counted]
    ids, offsets = tokenize(tokenizer, text, template_name, hidden is not None)
    mask, ends = [0] * len(ids), stop_ids(tokenizer, template_name)
    for span in spans:
        _mark(mask, ids, offsets, span, ends, tokenizer.eos_ids)
    if cut:
        index = max((i for i, counts in enumerate(mask) if counts), default=0)
        if ids[index] in ends:
            mask[index] = 0
    if not any(mask):
        raise SampleError("no token of the conversation counts as the assistant's")
    return ids, mask


def _spans_by_stand_in(
    source: str, messages: list[Message], special_texts: dict[str, str], full_text: str
) -> list[Span]:
    """Assistant spans of a template without generation blocks, within its text of the whole conversation.

    A stand-in replaces each answer and shows where the template writes it. The text after the stand-in in a
    conversation that ends there is the turn's end. Text between the generation prompt and the answer counts too, since
    the model has to write it, except for an empty thought that the message lacks.

    Example (Qwen3): "...<|im_start|>assistant\n<think>\n\n</think>\n\n[Yo<|im_end|>\n]".
    """
    spans, mark = [], f"{chr(secrets.choice(PRIVATE))}{secrets.token_hex(16)}"
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        upto = [*messages[:i], message | {"content": mark}]
        turn_text = render(source, upto, special_texts)[0]
        turns = messages[i + 1 :]
        text = render(source, [*upto, *turns], special_texts)[0] if turns else turn_text
        head, shown, tail = text.partition(mark)
        if not shown:
            continue  # the template leaves this answer out
        if mark in tail or not full_text.endswith(tail):
            raise SampleError(
                "the chat template has no generation marks and shows an answer several times or changes other text "
                "with it, so the assistant's part cannot be identified; name a shipped template"
            )
        end = len(full_text) - len(tail)
        pairs = enumerate(zip(head, full_text[:end]))
        start = next((at for at, (a, b) in pairs if a != b), min(len(head), end))
        closing = turn_text.partition(mark)[2]
        end += len(closing) if tail.startswith(closing) else 0
        prompt = render(source, messages[:i], special_texts, add_generation_prompt=True)[0]
        lead = full_text[len(prompt) : start] if full_text.startswith(prompt) else ""
        is_added = start == len(head) and THOUGHT.fullmatch(lead)
        if lead and not (is_added and lead.strip() not in message["content"]):
            start = len(prompt)
        spans.append((start, end))
    return spans


def _mark(
    mask: list[int],
    ids: list[int],
    offsets: list[Span],
    span: Span,
    turn_ends: frozenset[int],
    eos_ids: frozenset[int],
) -> None:
    """Mark the tokens that overlap `span`, up to and including the one that ends the turn.

    Text of the template after that token (often a line break) is never generated. An end-of-text token directly
    after the span counts too.
    """
    start, end = span
    tokens = [
        i
        for i, (a, b) in enumerate(offsets)
        # Tokens of zero width represent the space before them (byte-level BPE trims spaces).
        if (a < end and b > start) or (a == b and start < a <= end)
    ]
    if not tokens:
        return
    stop = tokens[-1]
    ends = [i for i in tokens if ids[i] in turn_ends]
    if ends:
        stop = ends[-1]
    elif stop + 1 < len(ids) and ids[stop + 1] in eos_ids:
        stop += 1
    for i in range(tokens[0], stop + 1):
        mask[i] = 1


def encode_user_opening(
    tokenizer: Tokenizer, messages: list[Message], template_name: str = ""
) -> tuple[list[int], str]:
    """Ids of a conversation up to the next user turn, and the string that ends that turn.

    For a model that plays both roles. The string is "" if an end-of-text token ends the turn. It is found by
    rendering another user turn with random content.

    Example (Vicuna): "... ASSISTANT: I am fine</s>USER:" and "ASSISTANT:".
    """
    mark = f"turn{secrets.token_hex(16)}"
    turns = [*messages, {"role": "user", "content": mark}]
    source = template_source(tokenizer, template_name)
    text = render(source, turns, tokenizer.special_texts, add_generation_prompt=True)[0]
    head, _, tail = text.partition(mark)
    # A space before the turn belongs to the first word that the model writes.
    ids = TurnPrompt(tokenize(tokenizer, head.rstrip(" "), template_name)[0])
    ends = [
        tokenizer.decode([i], skip_special=False)
        for i in stop_ids(tokenizer, template_name)
    ]
    tail = tail.strip()
    if any(end and tail.startswith(end) for end in ends):
        return ids, ""
    return ids, tail.split("\n")[0]
