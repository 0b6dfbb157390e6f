"""A drafter with a tree on a question file, against plain decoding; and a peer engine."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from medusa_jax.api import Model, Options
from medusa_jax.errors import UserError
from medusa_jax.evaluate.compare import Comparison, compare
from medusa_jax.evaluate.questions import prompt_of
from medusa_jax.evaluate.repetition import mean_repeated_ngram_share
from medusa_jax.tree import Tree


def drafting_row(
    model: Model,
    questions: Sequence[dict[str, Any]],
    tree: Tree,
    options: Options,
    repeats: int,
) -> dict[str, Any]:
    """One line of the table: `model` with `tree` on all questions, against plain decoding.

    Times are medians of `repeats` runs of a prompt, both sides in turn; `answers` are those of
    Spec-Bench's answer files.
    """
    compared: list[Comparison] = []
    for question in tqdm(
        questions, desc=f"{tree.n_nodes} nodes", unit="prompt", disable=None
    ):
        compared += compare(
            model, [prompt_of(question)], options, tree=tree, repeats=repeats
        )
    steps = sum(c.drafted.steps for c in compared)
    appended = sum(c.drafted.new_tokens - 1 for c in compared)
    plain_tokens = sum(c.autoregressive.new_tokens - 1 for c in compared)
    seconds = sum(c.decode_seconds for c in compared)
    plain_seconds = sum(c.autoregressive_seconds for c in compared)
    plain_steps = sum(c.autoregressive.steps for c in compared)
    length = appended / max(1, steps)
    ratio = (seconds / max(1, steps)) / (plain_seconds / max(1, plain_steps))
    speedup = (plain_seconds / plain_tokens) / (seconds / appended)
    outputs = [c.drafted.token_ids for c in compared]
    real = [q["continuation_ids"] for q in questions if "continuation_ids" in q]
    pairs = list(zip(outputs, real))
    whole = [sum(r.prefill_seconds + r.decode_seconds for r in side) for side in (
        [c.autoregressive for c in compared], [c.drafted for c in compared]
    )]  # fmt: skip
    end_to_end = (whole[0] / plain_tokens) / (whole[1] / appended)
    histogram = np.sum([c.drafted.acceptance_histogram for c in compared], axis=0)
    return {
        "drafter": model.drafter.heads.drafter if tree.depth else "none",
        "tree_nodes": tree.n_nodes,
        "temperature": options.temperature,
        "prompts": len(compared),
        "tokens": appended,
        "mean_accepted_length": length,
        "acceptance_histogram": histogram.tolist(),
        "step_latency_ratio": ratio,
        "speedup": speedup,
        "speedup_median_prompt": statistics.median(c.speedup for c in compared),
        # With prefill and all host work, single runs; against tokens per step / step latency.
        "end_to_end_speedup": end_to_end,
        "efficiency": end_to_end / (length / ratio),
        "tokens_per_second": appended / seconds,
        "autoregressive_tokens_per_second": plain_tokens / plain_seconds,
        "divergences": sum(not c.identical for c in compared),
        "divergence_gaps": [c.first_divergence for c in compared if c.first_divergence],
        "repeated_4grams": mean_repeated_ngram_share(outputs),
        "repeated_4grams_real": mean_repeated_ngram_share([r[: len(o)] for o, r in pairs])
        if pairs
        else None,
        "answers": [
            spec_bench_answer(question, c, f"{model.drafter.heads.drafter}-{tree.n_nodes}")
            for question, c in zip(questions, compared)
        ],
    }


def spec_bench_answer(
    question: dict[str, Any], compared: Comparison, name: str
) -> dict[str, Any]:
    """One line of Spec-Bench's answer files."""
    result = compared.drafted
    return {
        "question_id": question["question_id"],
        "category": question["category"],
        "model_id": name,
        "choices": [
            {
                "index": 0,
                "turns": [result.text],
                "decoding_steps": [result.steps],
                "new_tokens": [result.new_tokens],
                "wall_time": [compared.decode_seconds],
                "accept_lengths": result.accepted_lengths,
            }
        ],
        "tstamp": time.time(),
    }


def transformers_speed(
    path: str, model: Model, questions: Sequence[dict[str, Any]], max_new_tokens: int
) -> dict[str, float]:
    """tokens/s of transformers' greedy generate and of our autoregressive loop, in turn."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UserError(
            "--transformers needs torch: pip install 'medusa-jax[torch]'"
        ) from error
    theirs_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    options = Options(max_new_tokens=max_new_tokens)
    ratios, ours_speed, theirs_speed = [], [], []
    for question in questions[:16]:
        ids = model.encode(prompt_of(question))
        ours = model.generate([ids], options, tree="none")[0]
        speed = ours.new_tokens / (ours.prefill_seconds + ours.decode_seconds)
        start = time.perf_counter()
        with torch.inference_mode():
            out = theirs_model.generate(
                torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False,
                pad_token_id=0, eos_token_id=list(model.eos_ids) or None,
            )  # fmt: skip
        peer = (out.shape[1] - len(ids)) / (time.perf_counter() - start)
        ratios.append(speed / peer)
        ours_speed.append(speed)
        theirs_speed.append(peer)
    return {
        "transformers_tokens_per_second": statistics.median(theirs_speed),
        "our_autoregressive_tokens_per_second": statistics.median(ours_speed),
        "ratio": statistics.median(ratios[1:] or ratios),
    }
