"""What tests of the vLLM plugin share: tiny models on disk, add-ons, engines, references.

Tests that start an engine need vLLM and are skipped without it; `make test-vllm` brings it. Engines
run in this process, so that a test can look inside.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "kvfold",
}.items():
    os.environ.setdefault(name, value)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 12,
    "layer_types": ["linear_attention", "full_attention"] * 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}
"""Of Qwen3.5 models, besides: every second layer attends, so that folds of every kind have room."""
SLOW = -4
"""Logarithm of a decay at which some hundred tokens later something of a state is left."""
CLOSE = 1e-3
"""Of log-probabilities in float32. Sums run in another order, which is 1e-5; a value on the border
between two levels of its quantisation may then be rounded to the other, which is 2e-4.
"""


@dataclass(frozen=True)
class Generated:
    """Greedy tokens of each prompt, and the log-probability of each."""

    tokens: list[list[int]]
    logprobs: list[list[float]]

    def gap(self, other: Generated) -> float:
        """The largest difference of a log-probability."""
        mine = [value for row in self.logprobs for value in row]
        theirs = [value for row in other.logprobs for value in row]
        return max(abs(a - b) for a, b in zip(mine, theirs, strict=True))

    def require_close(self, expected: Generated, close: float = CLOSE) -> None:
        """Fail unless tokens are the same and their log-probabilities about so."""
        assert self.tokens == expected.tokens
        assert self.gap(expected) < close


@pytest.fixture(scope="session")
def tiny_folder(tiny_model: Any, tmp_path_factory: Any) -> Callable[..., tuple[Any, Path]]:
    """`tiny_folder(family, **overrides)`: a tiny model, and the folder that it was saved to."""

    def make(family: str, **overrides: Any) -> tuple[Any, Path]:
        specific = HYBRID if family in ("qwen3_5", "qwen3_5_moe") else {}
        model = tiny_model(family, **{**TINY, **specific, **overrides})
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # slow to forget, so that a wrong state shows
                torch.nn.init.constant_(parameter, SLOW)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        return model, folder

    return make


@pytest.fixture
def plain_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets engines of this process run hybrids in float32; see `plain_delta.py`."""
    pytest.importorskip("torchvision", reason="vLLM's Qwen3.5 needs it: make test-vllm")
    pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
    import importlib

    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    from kvfold.vllm import hybrids

    monkeypatch.syspath_prepend(Path(__file__).parent)
    plain = importlib.import_module("plain_delta")
    monkeypatch.setattr(
        qwen_gdn_linear_attn.QwenGatedDeltaNetAttention, "forward_cpu", plain.forward
    )
    monkeypatch.setattr(hybrids, "check_kernels", lambda model_config: None)


@pytest.fixture(scope="session")
def random_addon(tmp_path_factory: Any) -> Callable[..., tuple[Any, Path]]:
    """`random_addon(model, plan)`: an add-on with random weights, and its folder."""
    from kvfold import AddOn

    def make(model: Any, plan: Any) -> tuple[Any, Path]:
        addon = AddOn.untrained(model, plan)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in addon.parameters():
                fan = weight.shape[-1] if weight.dim() > 1 else 16
                weight.copy_(torch.randn(weight.shape, generator=generator) / fan**0.5)
        folder = tmp_path_factory.mktemp("addon")
        addon.save_pretrained(folder)
        return addon, folder

    return make


@pytest.fixture(scope="session")
def prompts() -> Callable[..., list[list[int]]]:
    """`prompts(lengths, vocabulary)`: random token ids."""

    def make(lengths: tuple[int, ...], vocabulary: int = 97) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        return [
            torch.randint(3, vocabulary, (length,), generator=generator).tolist()
            for length in lengths
        ]

    return make


@pytest.fixture(scope="session")
def benchmark() -> Iterator[Callable[[str], Any]]:
    """`benchmark(name)`: a script of `benchmarks/` as a module."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]


@pytest.fixture
def engine() -> Iterator[Callable[..., Any]]:
    """`engine(folder, model, addon_folder, **settings)`: a vLLM engine, ended after the test."""
    vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
    from kvfold.vllm.settings import Settings

    made: list[Any] = []

    def start(folder: Path, config: Any, addon: Path | None, **settings: Any) -> Any:
        plan = settings.pop("plan", {})
        overrides = {} if addon is None else Settings(str(addon), plan).overrides(config)
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
        }
        started = vllm.LLM(str(folder), hf_overrides=overrides, **{**defaults, **settings})
        made.append(started)
        return started

    yield start
    for one in made:
        one.llm_engine.engine_core.shutdown()
    made.clear()
    gc.collect()


@pytest.fixture(scope="session")
def generate() -> Callable[..., Generated]:
    """`generate(engine, prompts, count)`: greedy tokens of an engine."""

    def run(engine: Any, prompts: list[list[int]], count: int = 12) -> Generated:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=count, temperature=0, logprobs=1, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [o.outputs[0] for o in engine.generate(given, sampling, use_tqdm=False)]
        tokens = [list(output.token_ids) for output in outputs]
        logprobs = [
            [step[token].logprob for step, token in zip(o.logprobs, o.token_ids, strict=True)]
            for o in outputs
        ]
        return Generated(tokens, logprobs)

    return run


@pytest.fixture(scope="session")
def folded_reference(cache_argument: Any) -> Callable[..., Generated]:
    """`folded_reference(model, addon, plan, prompts, count)`: the same by kvfold's own runtime."""
    from kvfold import attach

    @torch.no_grad()
    def run(
        model: Any, addon: Any, plan: Any, prompts: list[list[int]], count: int = 12
    ) -> Generated:
        tokens, logprobs = [], []
        with attach(model, addon, plan=plan.replace(resident="shared")) as attachment:
            for prompt in prompts:
                cache, new = attachment.new_cache(), prompt
                rows: tuple[list[int], list[float]] = ([], [])
                for _ in range(count):
                    given = torch.tensor([new])
                    output = model(
                        given, logits_to_keep=1, **cache_argument(model, cache), use_cache=True
                    )
                    scores = output.logits[0, -1].float().log_softmax(-1)
                    new = [int(scores.argmax())]
                    rows[0].append(new[0])
                    rows[1].append(float(scores[new[0]]))
                tokens.append(rows[0])
                logprobs.append(rows[1])
        return Generated(tokens, logprobs)

    return run


@pytest.fixture
def check_folded(
    tiny_folder: Any,
    random_addon: Any,
    prompts: Any,
    engine: Any,
    generate: Any,
    folded_reference: Any,
) -> Callable[..., Any]:
    """`check_folded(family, plan, lengths, **settings)`: a tiny model gives the runtime's tokens.

    shape: of the model. count: tokens after each prompt. times: how often they are asked for.
    settings: of the engine, which is returned.
    """
    from kvfold.plan import Plan

    def check(
        family: str,
        keys: dict[str, Any],
        lengths: tuple[int, ...],
        *,
        shape: dict[str, Any] | None = None,
        count: int = 12,
        times: int = 1,
        **settings: Any,
    ) -> Any:
        model, folder = tiny_folder(family, **(shape or {}))
        plan = Plan.from_dict(keys)
        addon, saved = random_addon(model, plan)
        given = prompts(lengths)
        expected = folded_reference(model, addon, plan, given, count)
        started = engine(folder, model.config, saved, **settings)
        for _ in range(times):
            generate(started, given, count).require_close(expected)
        return started

    return check


@pytest.fixture(scope="session")
def grown_reference() -> Callable[..., Generated]:
    """`grown_reference(model, addon, plan, prompts, count)`: of a plan that skips.

    Each token by a call of its own, whose window and replay hold all that has run by then. That
    is what layers read which keep exact for good what ran through them.
    """
    from kvfold import attach

    @torch.no_grad()
    def run(
        model: Any, addon: Any, plan: Any, prompts: list[list[int]], count: int = 12
    ) -> Generated:
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        for step in range(count):
            replay = plan.replay + step
            with attach(model, addon, plan=plan.replace(window=replay, replay=replay)):
                for row, prompt in enumerate(prompts):
                    given = torch.tensor([prompt + tokens[row]])
                    scores = model(given, logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
                    tokens[row].append(int(scores.argmax()))
                    logprobs[row].append(float(scores.max()))
        return Generated(tokens, logprobs)

    return run


@pytest.fixture(scope="session")
def decoder_of() -> Callable[[Any], Any]:
    """`decoder_of(engine)`: the decoder of an engine in this process."""

    def find(started: Any) -> Any:
        worker = started.llm_engine.model_executor.driver_worker
        return getattr(worker, "worker", worker).model_runner.model.model

    return find
