"""GGUF files, llama.cpp's format, as model directories in Hugging Face form."""
