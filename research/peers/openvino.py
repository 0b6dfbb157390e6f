"""OpenVINO GenAI: a GGUF file as it is, compiled for the CPU in OpenVINO's own precisions, and with drafts."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.evaluate.race import Contender, Run
from medusa_jax.whole_files import Json
from research.peers import DRAFTED, Setting, counted
from research.peers.float32 import block_type, gguf_file

# Tokens that prompt lookup copies at a time, and that it compares to find them: the documentation's.
LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}


def contenders(setting: Setting) -> list[Contender]:
    """The GGUF file, plain and with prompt lookup; or, since heads need it, the model next to them that optimum exported.

    Raises:
      UserError: not a GGUF file; OpenVINO cannot read its blocks.
    """
    setting.refuse_adjusted("OpenVINO")
    folder = setting.heads
    path = os.path.join(folder, "model") if folder else gguf_file(setting.model)
    import openvino
    import openvino_genai

    version = openvino_genai.get_version().split("-")[0]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = (
        False  # every round would read the prompt from the cache
    )
    engines = []
    heads = (", EAGLE-3", {"num_assistant_tokens": DRAFTED})
    kinds: list[tuple[str, Json]] = [
        ("", {}),
        heads if folder else (", prompt lookup", LOOKUP),
    ]
    for drafts, lookup in kinds:
        options: Json = {"INFERENCE_NUM_THREADS": setting.threads}
        options["scheduler_config"] = scheduler
        if drafts and folder:
            draft = os.path.join(folder, "draft")
            options["draft_model"] = openvino_genai.draft_model(draft, "CPU")
        try:
            pipe = openvino_genai.LLMPipeline(
                path, "CPU", prompt_lookup="max_ngram_size" in lookup, **options
            )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(f"OpenVINO cannot read {path}: {reason}") from error
        config = openvino_genai.GenerationConfig(
            max_new_tokens=setting.new_tokens, ignore_eos=True, do_sample=False, **lookup
        )

        def decode(prompt: Sequence[int], pipe: Any = pipe, config: Any = config) -> Run:
            found = pipe.generate(openvino.Tensor(np.array([prompt], np.int64)), config)
            times = found.perf_metrics
            first, whole = times.get_ttft().mean, times.get_generate_duration().mean
            details = found.extended_perf_metrics
            accepted = details.get_num_accepted_tokens() if details else 0
            run = Run([list(found.tokens[0])], first / 1e3, (whole - first) / 1e3)
            return counted(run, accepted)

        facts = {} if drafts or folder else {"bytes": os.path.getsize(path)}
        label = f"OpenVINO GenAI {version}{drafts}"
        weights = "exported" if folder else block_type(path)
        engines.append(Contender(label, decode, weights, facts))
    return engines
