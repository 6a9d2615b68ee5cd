"""Prefill skipping on models that have learnt something: the tiny hybrid and SmolLM2.

The contracts of test_skip, where a fault shows in what the model says; and that it says the right
thing: facts are recalled from skipped and from replayed parts of a prompt.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvfold
from kvfold.anatomy import text_decoder
from kvfold.evaluation.continuation import continuation_loss
from kvfold.evaluation.tasks.recall import recall
from kvfold.evaluation.tiny_language import (
    RECALL_KINDS,
    recall_prompt,
    text_document,
    training_document,
)
from kvfold.fitting.corpus import calibration_windows
from kvfold.plan import Plan
from kvfold.runtime.attach import attach

REPLAY = 32
SAME = 1e-3
"""Allowed difference of logits, relative to the largest: the models compute in float32."""


@pytest.fixture(scope="module")
def hybrid() -> tuple[Any, Any]:
    """The trained tiny hybrid and its tokenizer."""
    return kvfold.models.tiny_hybrid()


@pytest.fixture(scope="module")
def hybrid_words(hybrid: Any) -> Any:
    """Words to ids, (rows, words)."""

    def ids(documents: list[Any]) -> torch.Tensor:
        return torch.tensor([hybrid[1].convert_tokens_to_ids(list(words)) for words in documents])

    return ids


@pytest.fixture(scope="module")
def hybrid_addon(hybrid: Any, hybrid_words: Any) -> Any:
    """CED and CSA2 of the upper attention layers, with a state projector, in closed form."""
    plan = Plan.from_dict(
        {
            "window": 16,
            "depth": [
                {"method": "ced", "split": 7, "layers": [7]},
                {"method": "csa2", "source": 7, "readers": [11]},
            ],
            "prefill": "skip",
            "replay": REPLAY,
            "state_projector": True,
        }
    )
    tokens = hybrid_words([training_document(f"fit {n}", 512)[0] for n in range(16)])
    return kvfold.fit(hybrid[0], plan, tokens, progress=False)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Any:
    """(model, add-on, prompts of 150 tokens) of the model that the test names."""
    if request.param == "tiny hybrid":
        hybrid_addon = request.getfixturevalue("hybrid_addon")
        model, tokenizer = request.getfixturevalue("hybrid")
        texts = [training_document(f"prompt {n}", 150)[0] for n in range(4)]
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(words) for words in texts])
        return model, hybrid_addon, ids
    model, tokenizer = request.getfixturevalue("smollm2")
    plan = Plan.from_dict(
        {
            "window": 16,
            "depth": [{"method": "ced", "split": 20, "layers": list(range(20, 30))}],
            "prefill": "skip",
            "replay": REPLAY,
        }
    )
    text = calibration_windows(None, tokenizer, tokens=1024, window=256)
    addon = kvfold.fit(model, plan, text.train, progress=False)
    return model, addon, text.train[:4, :150]


BOTH = pytest.mark.parametrize("trained", ["tiny hybrid", "smollm2"], indirect=True)


@BOTH
def test_short_prompts_give_the_full_result(trained: Any, helpers: Any) -> None:
    """Nothing is skipped of a prompt that is not longer than the replay."""
    model, addon, ids = trained
    with attach(model, addon):
        skipped = helpers.last(model, ids[:, :REPLAY])
    with attach(model, addon, plan=addon.plan.replace(prefill="full")):
        assert torch.equal(skipped, helpers.last(model, ids[:, :REPLAY]))


@BOTH
def test_rows_chunks_and_turns(trained: Any, helpers: Any, monkeypatch: Any) -> None:
    """A padded batch equals its rows alone, small chunks equal large ones, in two turns."""
    from kvfold.runtime import forward

    model, addon, ids = trained
    short = 90
    mask = torch.ones_like(ids)
    mask[1, : 150 - short] = 0
    with attach(model, addon) as attachment:
        cache = attachment.new_cache()
        first = helpers.last(model, ids[:2], cache, mask[:2])
        mask = torch.cat([mask[:2], torch.ones(2, 60, dtype=torch.long)], dim=1)
        second = helpers.last(model, ids[2:4, :60], cache, mask)
        monkeypatch.setattr(forward, "PREFILL_CHUNK", 17)
        monkeypatch.setattr(forward, "PLAIN_CHUNK", 17)
        for row, begin in ((0, 0), (1, 150 - short)):
            alone = attachment.new_cache()
            one = helpers.last(model, ids[row : row + 1, begin:], alone)
            two = helpers.last(model, ids[2 + row : 3 + row, :60], alone)
            helpers.assert_same(first[row], one[0], SAME)
            helpers.assert_same(second[row], two[0], SAME)


@BOTH
def test_upper_layers_run_on_anchors_and_replay(trained: Any, helpers: Any) -> None:
    """Tokens through each layer: all below the split, 4 and the replay from there on."""
    model, addon, ids = trained
    counted: dict[int, int] = {}
    handles = []
    for index, layer in enumerate(text_decoder(model).layers):

        def count(_: Any, args: Any, index: int = index) -> None:
            counted[index] = counted.get(index, 0) + args[0].shape[1]

        handles.append(layer.mlp.register_forward_pre_hook(count))
    with attach(model, addon):
        helpers.last(model, ids)
    for handle in handles:
        handle.remove()
    split = addon.plan.split
    assert counted == {n: 150 if n < split else 4 + REPLAY for n in range(len(counted))}


def test_facts_are_recalled_from_skipped_and_replayed_parts(hybrid: Any, hybrid_addon: Any) -> None:
    """No more than 3 of 40 answers fewer than the plain model's, at 512 words."""
    model, tokenizer = hybrid
    length, replay = 512, 256
    places = {"skipped": (0, length - replay), "replayed": (length - replay, length)}
    prompts = [
        recall_prompt(f"test {n} {place}", kind, length, fact_within=span)
        for place, span in places.items()
        for kind in RECALL_KINDS
        for n in range(5)
    ]
    plain = recall(model, prompts, tokenizer).share()
    plan = hybrid_addon.plan.replace(replay=replay, window=128)
    with attach(model, hybrid_addon, plan=plan):
        skipped = recall(model, prompts, tokenizer).share()
    assert plain.right >= 0.9 * plain.count
    assert skipped.right >= plain.right - 3


def test_tales_go_on_as_well_after_a_skipped_prompt(
    hybrid: Any, hybrid_addon: Any, hybrid_words: Any
) -> None:
    """Perplexity of 64 words after 448, within 3% of the plain model's."""
    model, _ = hybrid
    tales = hybrid_words([text_document(f"test {n}", 512) for n in range(16)])
    plain = continuation_loss(model, tales, 448, batch=8).mean()
    with attach(model, hybrid_addon, plan=hybrid_addon.plan.replace(replay=256, window=128)):
        skipped = continuation_loss(model, tales, 448, batch=8).mean()
    assert float((skipped - plain).exp()) < 1.03
