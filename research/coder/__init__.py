"""Text of Qwen2.5-Coder, to train draft heads on."""
