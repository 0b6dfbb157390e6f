"""`python -m research coder_answer`: the coder's own text for composed prompts, and its token directory.

Prompts are answered in order, many at a time, each as if it were alone: a row that ends gets the next prompt.
The file OUT/answers_00000.jsonl has the first `SHARD` prompts with `token_ids` (the end-of-text token
included), and so on; a file is complete or absent. Killed or stopped, the same command goes on with the first
absent file. At the end, or with --collect at any time, OUT/tokens is a token directory in which only the
model's tokens count: `train.py --config.data.source=OUT/tokens`.

--pack writes the answers without the prompts, which are other people's code, and --packed takes them on another
machine for the prompts that are the same there.
"""

import itertools
import json
import lzma
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medusa_jax.commands.flags import CommandLine, at_least, flag
from medusa_jax.console import inform
from medusa_jax.distill.files import coverage, write_token_directory
from medusa_jax.errors import UserError
from medusa_jax.files.hf import model_shape
from medusa_jax.files.hub import resolve
from medusa_jax.heads.vocabulary import COUNTS
from medusa_jax.kept_programs import use_compilation_cache
from medusa_jax.text.tokenizer import load_tokenizer
from medusa_jax.whole_files import Json, read_text, write_array, write_text
from research.coder.compose import held_out_windows, windows

EXAMPLES = """examples:
  python -m research coder_answer --model qwen.gguf --prompts work/coder/prompts.jsonl --out work/coder
"""

SHARD = 32  # prompts of a file
# Tokens; both decide the shapes that are compiled, so they do not follow the prompts.
MOST_PROMPT, MOST_NEW = 768, 256


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Let a model answer composed prompts."""

    model: str = flag("directory or .gguf file")
    prompts: str = flag("file of `coder_compose`", "work/coder/prompts.jsonl")
    out: str = flag("directory to write", "work/coder")
    slots: int = flag("prompts answered at a time", 16, type=at_least(1))
    collect: bool = flag(
        "write the token directory of what is there, answer nothing", False
    )
    pack: str | None = flag(
        "write the answers so far, without prompts, and stop", None, metavar="FILE.jsonl.xz"
    )
    packed: str | None = flag("answers that --pack wrote", None, metavar="FILE.jsonl.xz")
    held_out_files: tuple[str, ...] = flag(
        "for the token directory: leave out answers that share eight words in a row with these files "
        "of JSON lines (commas between)",
        (),
    )


def read_lines(path: Path) -> list[Json]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in read_text(path).splitlines()]


def answered(flags: Flags, prompts: Sequence[Json]) -> Iterator[Json]:
    """The prompts with `token_ids` and `finish`, in order."""
    import medusa_jax
    from medusa_jax.api import Options
    from medusa_jax.serving.request import Request
    from medusa_jax.serving.server import Server

    use_compilation_cache()
    model = medusa_jax.load(flags.model, "none", tree="none", batch=flags.slots)
    queue = iter(prompts)
    handles: deque[tuple[Json, Iterator[object]]] = deque()
    sizes: Json = {
        "max_prompt_tokens": MOST_PROMPT,
        "max_new_tokens": MOST_NEW,
        "queue": 4 * flags.slots,
    }
    with Server(
        model, slots=flags.slots, trees={flags.slots: model.tree}, **sizes
    ) as server:
        while True:
            for prompt in itertools.islice(queue, 3 * flags.slots - len(handles)):
                options = Options(
                    max_new_tokens=prompt["max_new_tokens"],
                    temperature=prompt["temperature"],
                    seed=prompt["id"],
                )
                request = Request(prompt["prompt_ids"], options)
                handles.append((prompt, iter(server.submit(request))))
            if not handles:
                return
            prompt, deltas = handles.popleft()
            *_, last = deltas
            result = last.ending.result  # type: ignore[attr-defined]
            yield prompt | {"token_ids": result.token_ids, "finish": result.finish_reason}


def digest(prompt: Json) -> int:
    """Tells a prompt from another one with its number."""
    return zlib.crc32(np.asarray(prompt["prompt_ids"], "<u4").tobytes())


def pack(out: Path, file: Path) -> None:
    """Write all answers with the digests of their prompts."""
    with lzma.open(file, "wt", preset=9) as packed:
        for path in sorted(out.glob("answers_*.jsonl")):
            for line in read_lines(path):
                kept = {name: line[name] for name in ("id", "token_ids", "finish")}
                packed.write(json.dumps({"prompt": digest(line), **kept}) + "\n")


def unpack(file: Path, shards: Sequence[Sequence[Json]], paths: Sequence[Path]) -> None:
    """Write the absent files whose prompts all have an answer in `file`."""
    with lzma.open(file, "rt") as packed:
        known = {(line["id"], line.pop("prompt")): line for line in map(json.loads, packed)}
    for path, shard in zip(paths, shards):
        lines = [known.get((prompt["id"], digest(prompt))) for prompt in shard]
        if not path.exists() and all(lines):
            whole = (prompt | line for prompt, line in zip(shard, lines) if line)
            write_text(path, "".join(json.dumps(line) + "\n" for line in whole))


def answer(flags: Flags, prompts: Sequence[Json], out: Path) -> None:
    """Write the files that are absent."""
    shards = [prompts[at : at + SHARD] for at in range(0, len(prompts), SHARD)]
    paths = [out / f"answers_{number:05d}.jsonl" for number in range(len(shards))]
    if flags.packed:
        unpack(Path(flags.packed), shards, paths)
    todo = [(path, shard) for path, shard in zip(paths, shards) if not path.exists()]
    inform(f"{len(shards) - len(todo)} of {len(shards)} files are there")
    if not todo:
        return
    lines = answered(flags, list(itertools.chain(*(shard for _, shard in todo))))
    tokens, start = 0, time.perf_counter()
    for path, shard in todo:
        records = list(itertools.islice(lines, len(shard)))
        write_text(path, "".join(json.dumps(line) + "\n" for line in records))
        tokens += sum(len(line["token_ids"]) for line in records)
        speed = tokens / (time.perf_counter() - start)
        inform(
            f"{time.strftime('%F %T')} {path.name}: {tokens} tokens, {speed:.1f} tokens/s"
        )


def collect(flags: Flags, out: Path) -> None:
    """The token directory of all answers so far, with the counts for a draft vocabulary."""
    lines = [
        line for path in sorted(out.glob("answers_*.jsonl")) for line in read_lines(path)
    ]
    lines = [line for line in lines if line["token_ids"]]
    if not lines:
        raise UserError(f"there are no answers in {out}")
    barred = held_out_windows(flags.held_out_files)
    if barred:
        tokenizer = load_tokenizer(flags.model)
        texts = (tokenizer.decode(line["prompt_ids"] + line["token_ids"]) for line in lines)
        lines = [
            line for line, text in zip(lines, texts) if barred.isdisjoint(windows(text))
        ]
    write_token_directory(out / "tokens", lines)
    ids = np.concatenate([line["token_ids"] for line in lines])
    counts_V = np.bincount(
        ids, minlength=model_shape(resolve(flags.model, ["config.json"])).vocab_size
    )
    write_array(out / "tokens" / COUNTS, counts_V)
    inform(
        f"{len(lines)} answers, {len(ids)} tokens in {out / 'tokens'}; {coverage(counts_V)}"
    )


def run(flags: Flags) -> int:
    """Answer what is not answered yet, then collect."""
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    if flags.pack:
        pack(out, Path(flags.pack))
        return 0
    if not flags.collect:
        answer(flags, read_lines(Path(flags.prompts)), out)
    collect(flags, out)
    return 0


main = CommandLine("python -m research coder_answer", Flags, run, EXAMPLES)
