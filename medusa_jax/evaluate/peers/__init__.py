"""Other engines on the same weights and prompts, timed in runs interleaved with this one."""
