"""Errors whose message is meant for the user: one clear sentence, exit status 2."""


class UserError(Exception):
    """Bad input. Entry points print the message alone (no traceback) and exit with 2."""
