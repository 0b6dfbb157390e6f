"""How the bundled demo is made: corpus and tokenizer, the n-gram model to beat, the build itself."""
