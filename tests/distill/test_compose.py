"""Questions out of tasks and subjects: always the same ones, all different, no gap left open."""

import re

from medusa_jax.distill.compose import FOLLOW_UPS, TASKS, WORDS, compose, composed_seeds


def test_questions_are_those_of_their_numbers():
    seeds = composed_seeds(3000)
    assert [seed.number for seed in seeds] == list(range(3000))
    texts = [seed.turns[0] for seed in seeds]
    assert len(set(texts)) == 3000
    assert [seed.turns for seed in seeds[:200]] == [s.turns for s in composed_seeds(200)]
    assert seeds[0].turns == compose(0)
    assert all(text[0] == text[0].upper() for seed in seeds for text in seed.turns)


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
