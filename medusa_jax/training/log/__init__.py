"""What a run tells: the progress line, log.jsonl, TensorBoard, curves."""
