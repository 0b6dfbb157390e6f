"""The draft tree, its files, and fitting it to the guesses of draft heads."""
