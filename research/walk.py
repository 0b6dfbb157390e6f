"""`python -m research walk`: one decode step with its real numbers, as Markdown.

Prints the parts of a step of `decoding/step.py`: the drafted tree, the mask, the target tokens, the
accepted path, the cache's rows and the appended tokens. `docs/one_step.md` is the output for the demo
in float64; `--pictures` draws the pictures of `docs/concepts.md`.
"""

import dataclasses
from pathlib import Path

from medusa_jax.api import Model
from medusa_jax.commands.flags import CommandLine, flag
from medusa_jax.commands.model_flags import ModelFlags, load_model
from medusa_jax.errors import UserError
from medusa_jax.evaluate.one_step import take_steps, token_labels
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.plots import draw_mask, draw_step, draw_tree
from medusa_jax.whole_files import Json

EXAMPLES = """examples:
  python -m research walk --dtype float64
  python -m research walk --prompt "import os" --tree cartesian:3,2 --step 4 --temperature 0.7 --seed 1
  python -m research walk --dtype float64 --pictures docs/pictures
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ModelFlags):
    """One decode step, part by part."""

    no_repeat_ngram_size: int | None = 0
    prompt: str = flag("text to continue", "def parse(")
    tree: str = flag("as for decode.py", "cartesian:2,2,1")
    step: int = flag("step to show", 2)
    temperature: float = flag("0 is greedy", 0.0)
    seed: int = flag("of the draws", 0)
    pictures: str | None = flag(
        "also draw tree, mask and step to this directory", None, metavar="DIR"
    )


def describe(model: Model, flags: Flags, step: Json) -> str:
    """A step of `take_steps` as Markdown, with its pictures if they are drawn."""
    prompt, n, temperature = flags.prompt, flags.step, flags.temperature
    tree, scores_MV = model.tree, step["scores"]
    M, accepted = tree.n_nodes, int(step["n"])
    length, n_after = (int(x) for x in step["length"])
    path = step["path"][: accepted + 1].tolist()

    def show(token: int) -> str:
        """A token's text, followed by its id."""
        [label] = token_labels(model, [token])
        return f"`{label}` ({int(token)})"

    def named(node: int) -> str:
        return "root" if node == 0 else str(list(tree.choices[node - 1]))

    new = step["text"][: int(step["n_new"])].tolist()
    text = prompt + model.tokenizer.decode_after(model.encode(prompt), new)
    drafted = markdown_table(
        ["node", "path of ranks", "parent", "depth", "position", "token"],
        [
            (v, named(v), tree.parent_M[v] if v else "-", tree.depth_M[v],
             step["positions"][v], show(step["nodes"][v]))
            for v in range(M)
        ],
    )  # fmt: skip
    mask = markdown_table(
        [
            "node sees",
            f"text, slots 0 to {length - 1}",
            *(f"slot {length + v}" for v in range(M)),
        ],
        [(v, "x", *("x" if bit else "" for bit in tree.mask_MM[v])) for v in range(M)],
    )
    verdicts = []
    for v in range(M):
        token, target = step["nodes"][v], step["targets"][v]
        score, verdict = "", "the root, chosen by the previous step"
        if v > 0:
            parent = tree.parent_M[v]
            score = f"{scores_MV[parent, token]:.3f}"
            hit = step["targets"][parent] == token
            verdict = "its parent's target token" if hit else "not its parent's target"
        mark, best = "kept" if v in path else "", f"{scores_MV[v, target]:.3f}"
        verdicts.append((v, show(token), score, show(target), best, verdict, mark))
    verified = markdown_table(
        ["node", "token", "its score", "target token after it", "the target's score", "the draft is",
         "accepted path"],
        verdicts,
    )  # fmt: skip
    rows = markdown_table(
        ["slot", "candidate written to it", "after the commit"],
        [
            (
                length + i,
                f"node {i}",
                f"node {path[i]}"
                if i <= accepted
                else "free, overwritten by the next step",
            )
            for i in range(M)
        ],
    )
    tree_picture = step_picture = ""
    if flags.pictures:
        at = Path(flags.pictures).name
        tree_picture = f"![The draft tree, each node with its rank]({at}/tree.svg)\n\n"
        step_picture = f"\n\n![The accepted path and the bonus token]({at}/step.svg)"
    emitted = ", ".join(show(t) for t in step["emitted"][: accepted + 1])
    rule = f"temperature {temperature}, seed {flags.seed}" if temperature else "greedy"
    score = f"logit / {temperature} + noise of the position" if temperature else "logit"
    return f"""# One decode step

Step {n} after the prompt `{prompt}`, {rule}, {model.drafter.heads.drafter} heads, {M} nodes, {model.dtype}.
In tokens, `·` is a blank and `↵` a line break. The text, with {length} positions in the cache and then the root:

```
{text}
```

## Draft

The root is {show(step["root"][0])}, at position {length}. Every other node is one of its head's best
guesses: path `[0, 1]` is the second guess of head 2 after the first guess of head 1.

{tree_picture}{drafted}

## Verify

One backbone pass over all {M} nodes: node v is written to slot {length} + v and sees the text, its
ancestors and itself.

{mask}

The *target token* of a node is the token that plain decoding would emit after it: the token with the best score, which
is the {score}. A draft's score is the one after its parent.

{verified}

## Accept

The longest path on which every draft is its parent's target token is nodes {", ".join(map(str, path))}: {accepted}
{"draft" if accepted == 1 else "drafts"}. The target token of its last node is the bonus token, {show(step["root"][1])}.{step_picture}

## Commit

The accepted rows move to the front of the range, the length grows from {length} to {n_after}, and the
bonus token is the next root.

{rows}

## Append

{accepted + 1} {"token" if accepted == 0 else "tokens"} in one pass of the backbone: {emitted}.
"""


def draw(model: Model, step: Json, directory: Path) -> None:
    """The step as tree.svg, mask.svg and step.svg."""
    tree, labels = model.tree, token_labels(model, step["nodes"])
    path = step["path"][: int(step["n"]) + 1].tolist()
    [bonus] = token_labels(model, step["root"][1:])
    draw_tree(tree.choices, path=directory / "tree.svg")
    numbered = [f"{i} {label}" for i, label in enumerate(labels)]
    draw_mask(tree.mask_MM, numbered, path=directory / "mask.svg")
    draw_step(tree.choices, labels, path, bonus, path=directory / "step.svg")


def run(flags: Flags) -> int:
    if flags.step < 1:
        raise UserError(f"--step is at least 1, not {flags.step}")
    model = load_model(flags, needs_heads=True, tree=flags.tree)
    step = take_steps(model, flags.prompt, flags.step, flags.temperature, flags.seed)
    print(describe(model, flags, step), end="")
    if flags.pictures:
        draw(model, step, Path(flags.pictures))
    return 0


main = CommandLine("python -m research walk", Flags, run, EXAMPLES)
