"""Files of models: Hugging Face directories, safetensors, torch files, GGUF; `layouts/` has those of draft heads.

Pickles of torch are read with a short list of opcodes: nothing here runs a repository's code or needs torch.
"""
