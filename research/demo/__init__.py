"""Build of the bundled demo: corpus and tokenizer, all stages."""
