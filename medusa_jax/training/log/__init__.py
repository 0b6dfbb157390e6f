"""Logs of a run: the progress line, log.jsonl, and optional sinks."""
