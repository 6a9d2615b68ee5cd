"""What clients may do: leave early, ask for the prompt's logprobs, fill the context."""

from __future__ import annotations

import random

import pytest
import torch

from kvfold import attach
from kvfold.plan import Plan

from .driving import come_and_go, leave_blocks, scheduler_of

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

PLAN = {
    "anchors": 4,
    "window": 32,
    "depth": [
        {"method": "csa2", "source": 1, "readers": [2]},
        {"method": "latent", "layers": [4, 5], "rank": 48},
    ],
    "sequence": [{"method": "pool", "layers": [6], "group": 4}],
}
"""Without bits: of some hundred tokens one is on the border between two levels."""
CLOSE = 1e-4
LONGEST = 512


@pytest.fixture(scope="module")
def folded(tiny_folder, random_addon):
    """A model, its folder, plan, add-on and its folder."""
    model, folder = tiny_folder("llama")
    plan = Plan.from_dict(PLAN)
    return model, folder, plan, *random_addon(model, plan)


@pytest.fixture
def started(folded, engine):
    """An engine with short steps, which shares prefixes."""
    model, folder, _, _, saved = folded
    settings = {"max_num_batched_tokens": 96, "max_model_len": LONGEST}
    return engine(folder, model.config, saved, enable_prefix_caching=True, **settings)


def test_requests_that_leave_early_and_ids_that_come_again_change_no_answer(
    folded, started, prompts, folded_reference
):
    """One leaves while its prompt is read; its id comes again with another, of the same start."""
    from vllm import SamplingParams

    model, _, plan, addon, _ = folded
    left, stays, other = prompts((480, 60, 150))
    again = left[:200] + other
    expected = folded_reference(model, addon, plan, [stays, again], 12).tokens
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    llm, outputs = started.llm_engine, {}

    def step():
        outputs.update((output.request_id, output) for output in llm.step())

    llm.add_request("stays", {"prompt_token_ids": stays}, sampling)
    llm.add_request("left", {"prompt_token_ids": left}, sampling)
    for _ in range(4):
        step()
    (running,) = [r for r in scheduler_of(started).running if r.num_prompt_tokens == len(left)]
    assert 0 < running.num_computed_tokens < len(left)
    llm.abort_request(["left"])
    llm.add_request("left", {"prompt_token_ids": again}, sampling)
    while llm.has_unfinished_requests():
        step()
    assert [list(outputs[n].outputs[0].token_ids) for n in ("stays", "left")] == expected
    pool = scheduler_of(started).kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_logprobs_of_a_folded_prompt_are_those_of_the_runtime(folded, started, prompts):
    from vllm import SamplingParams

    model, _, plan, addon, _ = folded
    given = prompts((300, 33))
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = started.generate(
        [{"prompt_token_ids": prompt} for prompt in given], sampling, use_tqdm=False
    )
    for prompt, output in zip(given, outputs, strict=True):
        steps = zip(output.prompt_logprobs, prompt, strict=True)
        made = [step[token].logprob for step, token in steps if step]
        with attach(model, addon, plan=plan.replace(resident="shared")), torch.no_grad():
            scores = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert float((torch.tensor(made) - expected).abs().max()) < CLOSE


def test_an_answer_ends_where_the_context_is_full(
    folded, started, prompts, generate, folded_reference
):
    model, _, plan, addon, _ = folded
    given = prompts((LONGEST - 10, 40))
    (full,) = folded_reference(model, addon, plan, given[:1], 10).tokens
    (whole,) = folded_reference(model, addon, plan, given[1:], 20).tokens
    assert generate(started, given, 20).tokens == [full, whole]


def test_requests_that_come_and_go_in_a_small_pool_get_the_runtimes_answers(
    tiny_folder, random_addon, prompts, engine, folded_reference
):
    """They share beginnings of two texts, are preempted, and some leave early."""
    model, folder = tiny_folder("qwen3")
    depth = [{"method": "latent", "layers": [4, 5, 6, 7], "rank": 96}]
    plan = Plan.from_dict({"window": 32, "depth": depth})
    addon, saved = random_addon(model, plan)
    texts, ends, rng = prompts((500, 500)), prompts((40,) * 8), random.Random(5)
    asked = []
    for _ in range(40):
        beginning = rng.choice(texts)[: rng.choice((500, 330, 200, rng.randint(5, 500)))]
        asked.append((beginning + rng.choice(ends)[: rng.choice((1, 3, 40))], rng.randint(1, 20)))
    settings = {"max_num_batched_tokens": 96, "enable_prefix_caching": True}
    started = engine(folder, model.config, saved, **settings)
    managers = scheduler_of(started).kv_cache_manager.coordinator.single_type_managers
    leave_blocks(started, sum(-(-800 // manager.block_size) for manager in managers))
    visits = come_and_go(started, asked, seed=5)
    assert visits.cached > 0 and visits.preempted > 0
    assert len(visits.tokens) > 30
    for number, tokens in visits.tokens.items():
        prompt, count = asked[number]
        assert folded_reference(model, addon, plan, [prompt], count).tokens == [tokens]
