"""Questions out of tasks and subjects: always the same ones, all different, no gap left open."""

import re

from medusa_jax.distill.compose import TASKS, WORDS, compose, composed_seeds


def test_questions_are_those_of_their_numbers():
    seeds = composed_seeds(3000)
    assert [seed.number for seed in seeds] == list(range(3000))
    texts = [seed.turns[0] for seed in seeds]
    assert len(set(texts)) == 3000
    assert texts[:200] == [seed.turns[0] for seed in composed_seeds(200)]
    assert texts[0] == compose(0) and all(text[0] == text[0].upper() for text in texts)


def test_no_gap_stays_open_and_none_has_no_words():
    assert not any(re.search(r"[{}|]", compose(i)) for i in range(3000))
    gaps = {
        gap
        for tasks in TASKS.values()
        for task in tasks
        for gap in re.findall(r"{(\w+)}", task)
    }
    assert gaps >= WORDS.keys() and len(gaps - WORDS.keys()) == 4  # four are numbers
    assert all(len(set(words.split("|"))) > 5 for words in WORDS.values())


def test_kinds_of_task_come_in_turn():
    """Fixed words of a kind's tasks tell it; every task of every kind comes up."""
    kinds = list(TASKS)
    patterns = {
        task: re.compile(re.sub(r"\\{\w+\\}", "(.+)", re.escape(task)), re.IGNORECASE)
        for tasks in TASKS.values()
        for task in tasks
    }
    used = set()
    for number in range(1500):
        text = compose(number)
        fits = [t for t in TASKS[kinds[number % len(kinds)]] if patterns[t].fullmatch(text)]
        assert fits, text
        used.update(fits)
    assert used == patterns.keys()
