"""Questions out of tasks and subjects: always the same ones, all different, no gap left open."""

import re

from medusa_jax.distill.seeds import Seed, read_seeds
from research.smollm2.compose import FOLLOW_UPS, TASKS, WORDS, compose, composed, main


def test_questions_are_those_of_their_numbers(tmp_path):
    turns = composed(3000)
    assert len({question for question, _ in turns}) == 3000
    assert turns[:200] == composed(200) and turns[0] == compose(0)
    assert all(text[0] == text[0].upper() for pair in turns for text in pair)
    out = tmp_path / "new" / "questions.jsonl"
    assert main(["--n=3", f"--out={out}"]) == 0
    seeds = [Seed(i, turns=pair) for i, pair in enumerate(turns[:3])]
    assert read_seeds(str(out), "train", 0) == seeds


def test_no_gap_stays_open_and_none_has_no_words():
    assert not any(re.search(r"[{}|]", text) for i in range(3000) for text in compose(i))
    tasks = [task for tasks in TASKS.values() for task in tasks]
    gaps = set(re.findall(r"{(\w+)}", " ".join([*tasks, *FOLLOW_UPS, *WORDS.values()])))
    assert gaps >= WORDS.keys() and len(gaps - WORDS.keys()) == 4  # four are numbers
    assert all(len(set(words.split("|"))) > 5 for words in WORDS.values())


def filled(template: str, text: str) -> bool:
    """Whether the text has the fixed words of the template in their order, with gaps in between."""
    at, text = 0, text.lower()
    for words in re.split(r"{\w+}", template.lower()):
        at = text.find(words, at) + len(words)
        if at < len(words):
            return False
    return True


def test_kinds_of_task_come_in_turn():
    """The fixed words of a kind's tasks identify it; every task and every follow-up comes up."""
    kinds, used = list(TASKS), set()
    for number in range(3000):
        question, follow_up = compose(number)
        tasks = [t for t in TASKS[kinds[number % len(kinds)]] if filled(t, question)]
        after = [text for text in FOLLOW_UPS if filled(text, follow_up)]
        assert tasks and after, (question, follow_up)
        used.update(tasks, after)
    assert used == {*FOLLOW_UPS, *(task for tasks in TASKS.values() for task in tasks)}
