"""File formats that are recognised by their content, and layouts that other engines load.

Published layouts of heads, torch files, GGUF, sentencepiece. `interop/seam.py` names the modules here.
"""
