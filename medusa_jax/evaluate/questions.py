"""Question files: our JSONL of prompts, and Spec-Bench's of turns."""

import json
from pathlib import Path
from typing import Any

from medusa_jax.errors import UserError

DEMO_PROMPTS = Path(__file__).parents[1] / "demo" / "prompts.jsonl"


def read_prompts(path: str, limit: int = 0) -> list[dict[str, Any]]:
    """Records of a JSONL file, each with `prompt` or `prompt_ids`."""
    try:
        with open(path) as file:
            lines = [line for line in file if line.strip()]
        records = [json.loads(line) for line in lines[: limit or None]]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompts in {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSONL: {error}") from error
    if not all(
        isinstance(r, dict) and ("prompt" in r or "prompt_ids" in r) for r in records
    ):
        raise UserError(f"every line of {path} needs 'prompt' or 'prompt_ids'")
    if not records:
        raise UserError(f"{path} holds no prompts")
    return records


def read_questions(path: str, limit: int) -> list[dict[str, Any]]:
    """Questions with `prompt`, an id and a category, from our JSONL or Spec-Bench's."""
    try:
        with open(path) as file:
            first = json.loads(file.readline() or "{}")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read the questions in {path}: {error}") from error
    if "turns" in first:
        with open(path) as file:
            records = [json.loads(line) for line in file if line.strip()][:limit]
        records = [r | {"prompt": r["turns"][0]} for r in records]
    else:
        records = read_prompts(path, limit)
    for i, record in enumerate(records):
        record.setdefault("question_id", i)
        record.setdefault("category", record.get("file", "all"))
    return records


def prompt_of(question: dict[str, Any]) -> str | list[int]:
    """A question's prompt, as ids where they are given."""
    prompt: str | list[int] = question.get("prompt_ids") or question["prompt"]
    return prompt
