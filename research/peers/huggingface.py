"""`transformers`' `generate` in float32: plain greedy decoding, and with prompt lookup."""

import time
from collections.abc import Sequence
from typing import Any

from medusa_jax.api import DEMO
from medusa_jax.evaluate.race import Contender, Run
from medusa_jax.files.hub import resolve
from research.peers import Setting

# Drafts per step of prompt lookup: the default of transformers.
LOOKED_UP = 10


class Clock:
    """A streamer for transformers that records arrival times and token counts, the prompt first."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []

    def put(self, tokens: Any) -> None:
        """Called with the prompt, then with the tokens of every step."""
        self.arrivals.append((time.perf_counter(), tokens.numel()))

    def end(self) -> None:
        """Called after the last token."""


def contenders(setting: Setting) -> list[Contender]:
    """Plain decoding and prompt lookup of one model in Hugging Face form."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    directory = resolve(setting.model or str(DEMO / "backbone"))
    torch.set_num_threads(setting.threads)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=False
    ).eval()
    # What a call leaves open is filled from here: nothing, so that no token ends a text.
    model.generation_config = GenerationConfig()

    def contender(engine: str, **drafts: int) -> Contender:
        def decode(prompt: Sequence[int]) -> Run:
            config = GenerationConfig(
                max_new_tokens=setting.new_tokens,
                do_sample=False,
                pad_token_id=0,
                no_repeat_ngram_size=setting.no_repeat_ngram_size,
                repetition_penalty=setting.repetition_penalty,
                **drafts,
            )
            ids, clock, start = torch.tensor([list(prompt)]), Clock(), time.perf_counter()
            mask = torch.ones_like(ids)
            with torch.inference_mode():
                out = model.generate(
                    ids, attention_mask=mask, generation_config=config, streamer=clock
                )
            end = time.perf_counter()
            first_at, first = clock.arrivals[1]
            return Run(
                [out[0, len(prompt) :].tolist()], first_at - start, end - first_at, first
            )

        return Contender(engine, decode, "float32")

    return [
        contender("transformers"),
        contender("transformers, prompt lookup", prompt_lookup_num_tokens=LOOKED_UP),
    ]
