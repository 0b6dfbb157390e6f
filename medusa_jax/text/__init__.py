"""Text for a model and from it: tokenizers, chat templates, and the tokens that the assistant produces."""
