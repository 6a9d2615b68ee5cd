"""Qwen3.5 hybrids in a vLLM engine against kvfold's own runtime, in float32.

vLLM's own kernels are in `test_hybrid_kernels.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import kvfold
from kvfold import AddOn
from kvfold.evaluation.tiny_language import recall_prompt
from kvfold.models import load, model_folder
from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "full_attention"] * 3,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}

ALL_AXES = {
    "anchors": 4,
    "window": 32,
    "depth": [
        {"method": "csa2", "source": 3, "readers": [5]},
        {"method": "latent", "layers": [7, 9], "rank": 48},
    ],
    "sequence": [
        {"method": "pool", "layers": [7, 9], "group": 4, "gate": "head", "overlap": True},
    ],
    "bits": [{"method": "turboquant", "layers": [11], "key_bits": 8, "value_bits": 4}],
}
"""Layer 1 stays as it is. The latent code comes late, so longer steps run in parts."""


@pytest.mark.parametrize(
    ("family", "eager"), [("qwen3_5", True), ("qwen3_5", False), ("qwen3_5_moe", True)]
)
def test_greedy_tokens_equal_the_runtime_on_every_axis(family, eager, plain_delta, check_folded):
    """The second time in blocks that hold what others have left."""
    check_folded(family, ALL_AXES, (300, 150, 33, 7), times=2, enforce_eager=eager)


REPLAY = 48
SKIP = {
    "depth": [{"method": "ced", "split": 6, "layers": [7, 9, 11]}],
    "prefill": "skip",
    "window": REPLAY,
    "replay": REPLAY,
}


@pytest.mark.parametrize(
    ("projected", "eager"),
    [(False, True), (True, True), (True, False)],
    ids=["cleared", "projected", "compiled"],
)
def test_skipped_prompts_replay_into_recurrent_states_as_in_the_runtime(
    projected,
    eager,
    plain_delta,
    tiny_folder,
    random_addon,
    prompts,
    engine,
    generate,
    grown_reference,
    decoder_of,
):
    model, folder = tiny_folder("qwen3_5")
    plan = Plan.from_dict({**SKIP, "state_projector": projected})
    addon, saved = random_addon(model, plan)
    given = prompts((300, 33, REPLAY + 3, 150))
    expected = grown_reference(model, addon, plan, given, 6)
    started = engine(folder, model.config, saved, enforce_eager=eager)
    skipping = decoder_of(started).kvfold
    left_out = skipping.rows_left_out
    for _ in range(2):  # the second time in blocks that hold what others have left
        generate(started, given, 6).require_close(expected)
    assert skipping.rows_left_out - left_out == 2 * (300 + 150 - 2 * (REPLAY + 4))


def test_a_shared_beginning_of_a_skipped_prompt_gives_what_its_own_chunks_give(
    plain_delta, tiny_folder, random_addon, prompts, engine, generate, decoder_of
):
    """Chunks end where states are kept, so a later prompt goes on as if it had run them."""
    model, folder = tiny_folder("qwen3_5")
    _, saved = random_addon(model, Plan.from_dict({**SKIP, "state_projector": True}))
    first, other = prompts((430, 90))
    second = first[:400] + other
    started = engine(
        folder, model.config, saved, enable_prefix_caching=True, max_num_batched_tokens=128
    )
    skipping = decoder_of(started).kvfold
    alone = generate(started, [second], 6)
    rows = skipping.rows_run + skipping.rows_left_out
    assert started.reset_prefix_cache()
    generate(started, [first], 6)
    before = skipping.rows_run + skipping.rows_left_out
    after = generate(started, [second], 6)
    after.require_close(alone)
    assert skipping.rows_run + skipping.rows_left_out - before < rows - 300


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_half_of_a_checkpoint_that_sees_is_served(
    family,
    plain_delta,
    tiny_config,
    tmp_path,
    random_addon,
    prompts,
    engine,
    generate,
    folded_reference,
):
    """As Qwen's own are: all experts of a layer in one tensor."""
    mixed = family == "qwen3_5_moe"
    name = "Qwen3_5Moe" if mixed else "Qwen3_5"
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    text = tiny_config(family, **SIZES).to_dict()
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config={**vision, "out_hidden_size": text["hidden_size"]}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert any(n.endswith("experts.gate_up_proj") for n in model.state_dict()) == mixed
    plan = Plan.from_dict({"depth": [{"method": "csa2", "source": 3, "readers": [5]}]})
    addon, saved = random_addon(model, plan)
    given = prompts((200, 9))
    expected = folded_reference(model, addon, plan, given, 6)
    generate(engine(tmp_path, model.config, saved), given, 6).require_close(expected)


@pytest.mark.parametrize("prefill", ["full", "skip"])
def test_a_trained_hybrid_recalls_what_it_recalls_in_the_runtime(
    prefill, plain_delta, engine, generate, folded_reference, grown_reference
):
    """tiny-hybrid under its add-on, low-rank terms and all, asked for words early in its prompt."""
    model, tokenizer = load("tiny-hybrid", dtype=torch.float32)
    saved = Path(kvfold.__file__).parent / "addons" / "tiny-hybrid-card"
    addon = AddOn.from_pretrained(saved, dtype=torch.float32)
    plan = addon.plan.replace(prefill=prefill, replay=128)
    asked = [recall_prompt(seed, "value", 500, fact_within=(10, 200)) for seed in range(4)]
    given = [tokenizer.convert_tokens_to_ids(list(one.words)) for one in asked]
    reference = grown_reference if prefill == "skip" else folded_reference
    expected = reference(model, addon, plan, given, 4)
    settings = {"plan": {"prefill": prefill, "replay": 128}, "max_num_batched_tokens": 4096}
    started = engine(Path(model_folder("tiny-hybrid")), model.config, saved, **settings)
    generate(started, given, 4).require_close(expected)
