"""Build of the bundled demo: corpus and tokenizer, the n-gram baseline, all stages."""
