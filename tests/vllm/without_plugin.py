"""Greedy tokens of plain models in a process that starts without the plugin.

    VLLM_PLUGINS= python without_plugin.py ASKED.json ANSWERED.json

And whether kvfold's models are known to vLLM: then, after the plugin was called and took vLLM for a
release that was never tested, and after it was called as vLLM does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def is_registered() -> bool:
    from vllm import ModelRegistry

    return any(name.startswith("Kvfold") for name in ModelRegistry.get_supported_archs())


def main(asked: str, answered: str) -> None:
    from vllm import LLM, SamplingParams

    from kvfold.vllm import plugin

    told = json.loads(Path(asked).read_text())
    sampling = SamplingParams(
        max_tokens=told["count"], temperature=0, logprobs=1, ignore_eos=True, detokenize=False
    )
    given = [{"prompt_token_ids": prompt} for prompt in told["prompts"]]
    tokens, logprobs = {}, {}
    for family, folder in told["folders"].items():
        engine = LLM(
            folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
            enable_prefix_caching=False, max_model_len=1024, max_num_seqs=8,
            max_num_batched_tokens=1024,
        )  # fmt: skip
        outputs = [one.outputs[0] for one in engine.generate(given, sampling, use_tqdm=False)]
        tokens[family] = [list(one.token_ids) for one in outputs]
        logprobs[family] = [
            [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
            for one in outputs
        ]
        engine.llm_engine.engine_core.shutdown()
    registered = {"without": is_registered()}
    true_version, plugin.vllm_version = plugin.vllm_version, lambda: "0.99.0"
    plugin.register()
    registered["untested"] = is_registered()
    plugin.vllm_version = true_version
    plugin.register()
    registered["tested"] = is_registered()
    made = {"tokens": tokens, "logprobs": logprobs, "registered": registered}
    Path(answered).write_text(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
