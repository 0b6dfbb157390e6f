"""OpenVINO GenAI: a GGUF file as it is, compiled for the CPU in OpenVINO's own precisions, and with drafts."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.evaluate.race import Contender, Run
from research.peers import NotInstalled, Setting
from research.peers.float32 import block_type, gguf_file

# Tokens that prompt lookup copies at a time, and that it compares to find them: the documentation's.
LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}


def contenders(setting: Setting) -> list[Contender]:
    """The GGUF file, plain and with prompt lookup.

    Raises:
      UserError: not a GGUF file; OpenVINO cannot read its blocks.
      NotInstalled: openvino-genai is not installed.
    """
    setting.refuse_adjusted("OpenVINO")
    path = gguf_file(setting.model)
    try:
        import openvino
        import openvino_genai
    except ImportError as error:
        raise NotInstalled(
            "comparing with OpenVINO needs openvino-genai: pip install openvino-genai"
        ) from error
    version = openvino_genai.get_version().split("-")[0]
    engines = []
    for drafts, lookup in (("", {}), (", prompt lookup", LOOKUP)):
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": setting.threads}
        try:
            pipe = openvino_genai.LLMPipeline(
                path, "CPU", prompt_lookup=bool(lookup), **options
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
            return Run([list(found.tokens[0])], first / 1e3, (whole - first) / 1e3)

        facts = {} if drafts else {"bytes": os.path.getsize(path)}
        label = f"OpenVINO GenAI {version}{drafts}"
        engines.append(Contender(label, decode, block_type(path), facts))
    return engines
