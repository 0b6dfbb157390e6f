"""How many nodes of the tree a step verifies: the size with the most tokens per time, of a few.

`rates.py` estimates the tokens per step of each size on this text, `costs.py` the time of a step with it on this machine.
`gate.py` is the choice on the device, before each step; a server chooses for a chunk of steps (`serving/ladder.py`).
"""
