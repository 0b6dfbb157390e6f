"""Files of one JSON object a line."""

import json

PROMPTS = ["the cat", "a b c", "in the", "abc"]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
