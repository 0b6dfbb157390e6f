"""`python -m research ties`: the tie report of one precision.

In bfloat16 (and float32) drafted text may leave plain text where two scores are tied within
rounding. For every prompt: the first divergence, the gap between the two best scores there, the
noise band measured at that position, and whether the one explains the other. A divergence that
rounding does not explain would be a defect; the exit status is then 1.
"""

import dataclasses

from medusa_jax.commands.flags import Program, at_least, file_to_write, flag
from medusa_jax.commands.model_flags import (
    GenerationFlags,
    ModelFlags,
    generation_options,
    load_model,
)
from medusa_jax.console import inform
from medusa_jax.evaluate.tables import Cell, table_of
from medusa_jax.whole_files import Json, write_json
from research.asking import PromptFlags, first_prompts, prompt_room, questions_of

EXAMPLES = """examples:
  python -m research ties
  python -m research ties --dtype float32 --tree 64 --temperature 0.7 --top_p 0.9
  python -m research ties --model path/to/model --drafter path/to/heads --prompts q.jsonl
  python -m research ties --model smollm2 --questions mt_bench.jsonl --limit 0 --batch_size 8 \\
      --dtype float32 --tree auto --max_new_tokens 512
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(PromptFlags, GenerationFlags, ModelFlags):
    """Where drafted text leaves plain text in low precision, and whether it is a tie."""

    dtype: str | None = "bfloat16"
    tree: str = flag("as for decode.py", "64")
    top_p: float = flag("keep the likeliest tokens up to this mass", 1.0)
    batch_size: int = flag("prompts decoded at a time", 1, type=at_least(1))
    out: str = flag("file for all figures", "work/ties.json")


COLUMNS: dict[str, Cell] = {
    "prompt": "{prompt}",
    "token": "{position}",
    "gap of the two best scores": "{gap:.3g}",
    "noise band": "{noise_band:.3g}",
    "explained": lambda r: (
        "at a filter's cut" if r["at_cut"] else "tie" if r["is_tie"] else "NO"
    ),
}


def summary(facts: Json) -> str:
    """One line that sums up the table."""
    return (
        f"{facts['dtype']}, {facts['tree_nodes']} nodes, T {facts['temperature']:g}: "
        f"{len(facts['divergences'])} of {facts['prompts']} texts diverge, "
        f"{facts['divergences_per_token']:.1e} per token over {facts['tokens_compared']} tokens; "
        f"{facts['not_explained']} not explained by rounding"
    )


def run(flags: Flags) -> int:
    """The report; exit status 1 if rounding does not explain every divergence."""
    from medusa_jax.api.asking import ending_turns
    from medusa_jax.console import use_compilation_cache
    from research.asking import find_template
    from research.tie_report import Judged, compare_batches, tie_report
    from research.turns import all_turns

    use_compilation_cache()
    options = generation_options(flags, top_p=flags.top_p)
    questions = questions_of(flags)
    out = file_to_write(flags.out, "--out")
    batch = min(flags.batch_size, len(questions))
    model = load_model(flags, needs_heads=True, tree=flags.tree, batch=batch)
    if flags.questions:
        template = find_template(model, flags.chat_template)
        options = ending_turns(model.tokenizer, model.eos_ids, options, template)
        room = prompt_room(flags, model.config.max_position, flags.max_new_tokens)

        def ask(prompts: list[list[int]]) -> list[tuple[Judged, str]]:
            found = compare_batches(model, prompts, options, flags.batch_size)
            return [(one, one[0].autoregressive.text) for one in found]

        turns = all_turns(model, questions, template, room, ask)
        found = [
            (f"{questions[t.number]['question_id']}, turn {t.turn + 1}", t.outcome)
            for t in turns
        ]
    else:
        prompts = first_prompts(flags, model, questions, flags.max_new_tokens)
        compared = compare_batches(model, prompts, options, flags.batch_size)
        found = [(str(i), one) for i, one in enumerate(compared)]
    facts = tie_report(model, options, found)
    write_json(out, facts)
    print(f"{table_of(facts['divergences'], COLUMNS)}\n\n{summary(facts)}")
    inform(f"wrote {out}")
    return 1 if facts["not_explained"] else 0


main = Program("python -m research ties", Flags, run, EXAMPLES)
