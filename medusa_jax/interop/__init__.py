"""Read Hugging Face checkpoints, tokenizers and chat templates; read and write draft heads.

Nothing here unpickles, runs a repository's code or needs torch.
"""
