"""The bundled demo: a small Llama that writes Python, its tokenizer, heads and tree.

`corpus` collects the text they are trained on; `README.md` beside the weights (once they are
there) holds the commands that made them and the numbers they reached.
"""
