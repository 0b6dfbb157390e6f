"""Files of models: Hugging Face directories, safetensors, torch files, GGUF; `layouts/` has those of draft heads.

Nothing here unpickles, runs a repository's code or needs torch.
"""
