"""Other engines on the same weights and prompts, timed in turn with this one."""
