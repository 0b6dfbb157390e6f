"""The bundled demo: a small Llama that writes Python, its tokenizer, draft heads and trees.

`README.md` next to the weights has the commands that made them (`research/demo/`) and their results.
"""
