"""The borders: Hugging Face checkpoints, tokenizers and chat templates in, draft heads in and out.

Nothing in here unpickles, runs a repository's code or needs torch.
"""
