"""Data: text of any source as packed rows of tokens, and hidden states kept on disk."""
