"""What prefill skipping promises beside the dense reference's logits (test_reference).

Upper layers run on anchors and the last `replay` tokens of a prompt, and nothing about rows,
chunks, turns, bytes or detaching changes for that.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvfold.anatomy import text_decoder
from kvfold.errors import AttachError, CacheError, PlanError
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.runtime.ledger import predict_bytes

REPLAY = 12
HYBRIDS = ("qwen3_5", "qwen3_5_moe")


def _case(case: Any, arch: str, method: str, **keys: Any) -> Any:
    projector = keys.pop("projector", True) and arch in HYBRIDS
    return case(arch, method, prefill="skip", replay=REPLAY, state_projector=projector, **keys)


@pytest.mark.skipping
def test_prompts_not_longer_than_the_replay_give_the_full_result(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """Bit for bit at the replay's length; up to rounding where anchors run beside it."""
    made = _case(case, arch, method)
    for length in (3, REPLAY, REPLAY + 4):
        ids = helpers.tokens(length, rows=2)
        with made.attach() as attachment:
            skipped = helpers.last(made.model, ids, attachment.new_cache())
        with made.attach(prefill="full") as attachment:
            full = helpers.last(made.model, ids, attachment.new_cache())
        if length <= REPLAY:
            assert torch.equal(skipped, full)
        helpers.assert_same(skipped, full)


@pytest.mark.skipping
def test_upper_layers_see_the_anchors_and_the_replay_only(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """Tokens that run through each layer, counted where its own forward runs."""
    made = _case(case, arch, method)
    counted = dict.fromkeys(range(made.anatomy.num_layers), 0)
    handles = []
    for index, layer in enumerate(text_decoder(made.model).layers):

        def count(_: Any, args: Any, kwargs: Any = None, index: int = index) -> None:
            counted[index] += args[0].shape[1] if args else 0

        handles.append(layer.input_layernorm.register_forward_pre_hook(count))
    with made.attach() as attachment:
        cache = attachment.new_cache()
        helpers.last(made.model, helpers.tokens(40), cache)
        first = dict(counted)
        helpers.last(made.model, helpers.tokens(30), cache)
    for handle in handles:
        handle.remove()
    split = made.plan.split
    assert {counted[n] for n in range(split)} == {70}
    assert {first[n] for n in range(split)} == {40}
    uppers = range(split, made.anatomy.num_layers)
    assert {first[n] for n in uppers} == {made.plan.anchors + REPLAY}
    assert {counted[n] for n in uppers} == {made.plan.anchors + 2 * REPLAY}


@pytest.mark.skipping
def test_left_padded_rows_equal_single_rows(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """Rows that skip much, little and nothing; decode steps; a second turn that skips again."""
    _check_padded_rows(_case(case, arch, method, resident="auto"), helpers)


@pytest.mark.skipping
@pytest.mark.parametrize("arch", HYBRIDS)
def test_left_padded_rows_equal_single_rows_without_a_state_projector(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """The same where states of upper linear layers begin with the replay."""
    _check_padded_rows(_case(case, arch, method, projector=False), helpers)


def _check_padded_rows(made: Any, helpers: Any) -> None:
    prompts = [helpers.tokens(n, seed=n) for n in (3, 14, 19, 41)]
    lengths = (25, 25, 25, 25) if made.anatomy.is_hybrid else (6, 13, 20, 25)
    turns = [helpers.tokens(n, seed=50 + n) for n in lengths]
    step = helpers.tokens(1, rows=4, seed=1)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        ids, mask = helpers.padded(prompts)
        together = [helpers.last(made.model, ids, cache, mask)]
        mask = torch.cat([mask, torch.ones(4, 1, dtype=torch.long)], dim=1)
        together.append(helpers.last(made.model, step, cache, mask))
        ids, added = helpers.padded(turns)
        mask = torch.cat([mask, added], dim=1)
        together.append(helpers.last(made.model, ids, cache, mask))
        for row, prompt in enumerate(prompts):
            alone = attachment.new_cache()
            single = [
                helpers.last(made.model, part, alone)
                for part in (prompt, step[row : row + 1], turns[row])
            ]
            flipped = helpers.assert_same_state(helpers.state(cache, row), helpers.state(alone))
            for ours, theirs in zip(together, single, strict=True):
                helpers.assert_same(ours[row], theirs[0], helpers.tolerance(flipped))
            assert cache.seen_tokens[row] == alone.seen_tokens[0]


@pytest.mark.parametrize("method", ["ced", "ced+pool", "ced-csa2+k8v4"])
def test_rows_that_end_alike_but_skip_differently(
    case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Equal tokens seen and equal columns, once in the replay and once in a chunk below it."""
    import kvfold.runtime.forward as forward

    made = _case(case, "llama", method)
    monkeypatch.setattr(forward, "PLAIN_CHUNK", 13)
    for turns in (((5, 20), (13, 12)), ((1, 40), (14, 27)), ((14, 27), (1, 40))):
        rows = [[helpers.tokens(n, seed=7 * n) for n in row] for row in turns]
        with made.attach() as attachment:
            cache = attachment.new_cache()
            mask = torch.zeros(2, 0, dtype=torch.long)
            for turn in range(2):
                ids, added = helpers.padded([row[turn] for row in rows])
                mask = torch.cat([mask, added], dim=1)
                together = helpers.last(made.model, ids, cache, mask)
            for index, row in enumerate(rows):
                alone = attachment.new_cache()
                for part in row:
                    single = helpers.last(made.model, part, alone)
                helpers.assert_same(together[index], single[0])


@pytest.mark.parametrize("projector", [False, True])
@pytest.mark.parametrize("arch", HYBRIDS)
def test_rows_go_on_that_lack_different_numbers_of_anchors(
    case: Any, helpers: Any, arch: str, projector: bool
) -> None:
    """First turns shorter than the anchors: no pad may enter a recurrent state afterwards."""
    made = _case(case, arch, "ced", projector=projector)
    first = [helpers.tokens(n, seed=n) for n in (2, 3, 5, 1)]
    second = [helpers.tokens(30, seed=40 + n) for n in range(4)]
    with made.attach() as attachment:
        cache = attachment.new_cache()
        ids, mask = helpers.padded(first)
        helpers.last(made.model, ids, cache, mask)
        mask = torch.cat([mask, torch.ones(4, 30, dtype=torch.long)], dim=1)
        together = helpers.last(made.model, torch.cat(second), cache, mask)
        for row in range(4):
            alone = attachment.new_cache()
            helpers.last(made.model, first[row], alone)
            single = helpers.last(made.model, second[row], alone)
            helpers.assert_same(together[row], single[0])


@pytest.mark.skipping
def test_the_runtimes_own_chunks_leave_no_trace(
    case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch, arch: str, method: str
) -> None:
    """Chunks of a prompt and of the replay, blocks of queries and slots; padded rows too."""
    import kvfold.runtime.forward as forward
    import kvfold.runtime.masks as masks
    import kvfold.runtime.skipping as skipping
    import kvfold.runtime.streaming as streaming

    made = _case(case, arch, method, resident="auto")
    ids, mask = helpers.padded([helpers.tokens(n, seed=n) for n in (50, 23)])
    with made.attach() as attachment:
        whole = attachment.new_cache()
        expected = helpers.last(made.model, ids, whole, mask)
        for module, name, size in (
            (forward, "PREFILL_CHUNK", 7),
            (forward, "PLAIN_CHUNK", 7),
            (skipping, "PREFILL_CHUNK", 5),
            (masks, "QUERY_BLOCK", 3),
            (streaming, "SLOT_BLOCK", 5),
        ):
            monkeypatch.setattr(module, name, size)
        cache = attachment.new_cache()
        cut = helpers.last(made.model, ids, cache, mask)
    flipped = helpers.assert_same_state(helpers.state(cache), helpers.state(whole))
    helpers.assert_same(cut, expected, helpers.tolerance(flipped))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "smollm3"])
@pytest.mark.skipping
def test_a_split_prompt_equals_a_whole_one_without_recurrent_layers(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """The law, as long as the last part is longer than the replay."""
    made = _case(case, arch, method)
    ids = helpers.tokens(48)
    with made.attach() as attachment:
        whole = attachment.new_cache()
        expected = helpers.last(made.model, ids, whole)
        for split in (1, 5, 11, 12, 13, 20, 30, 48 - REPLAY - 1):
            cache = attachment.new_cache()
            helpers.last(made.model, ids[:, :split], cache)
            rest = helpers.last(made.model, ids[:, split:], cache)
            flipped = helpers.assert_same_state(helpers.state(cache), helpers.state(whole))
            helpers.assert_same(rest, expected, helpers.tolerance(flipped))


@pytest.mark.parametrize("resident", ["expanded", "shared", "absorbed"])
@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
@pytest.mark.skipping
def test_bytes_reported_are_bytes_allocated_and_predicted(
    case: Any, helpers: Any, arch: str, method: str, resident: str
) -> None:
    """A skipped prompt and a few tokens after it hold what the ledger says, to the byte."""
    made = _case(case, arch, method, resident=resident)
    rows = 2
    with made.attach() as attachment:
        cache = attachment.new_cache()
        for count in (45, 1, 30):
            helpers.last(made.model, helpers.tokens(count, rows=rows), cache)
        seen = cache.seen_tokens[0]
        counted = cache.nbytes()
    assert counted.total == helpers.storages(cache)
    size = made.model.dtype.itemsize
    predicted = predict_bytes(
        made.plan.replace(resident=resident), made.anatomy, seen, batch=rows, element_size=size
    )
    assert counted.components == predicted.components


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": False, "num_beams": 3}], ids=["greedy", "beams"]
)
@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
@pytest.mark.skipping
def test_generate_skips_and_goes_on(
    case: Any, helpers: Any, arch: str, method: str, options: dict[str, Any]
) -> None:
    """generate() on padded rows gives the tokens of each row alone, and of stepping by hand."""
    made = _case(case, arch, method)
    ids, mask = helpers.padded([helpers.tokens(n, seed=n) for n in (40, 29)])
    common = {"max_new_tokens": 6, "eos_token_id": None, **options}
    with made.attach() as attachment:
        together = made.model.generate(ids, attention_mask=mask, **common)[:, -6:]
        alone = made.model.generate(helpers.tokens(29, seed=29), **common)[:, -6:]
        assert torch.equal(together[1:], alone)
        if "num_beams" in options:
            return
        cache = attachment.new_cache()
        token, stepped = helpers.tokens(29, seed=29), []
        for _ in range(6):
            token = helpers.last(made.model, token, cache).argmax(-1)
            stepped.append(token)
        assert torch.equal(torch.cat(stepped, dim=1), alone)


def test_a_conversation_goes_on_through_generate(case: Any, helpers: Any) -> None:
    """The second turn's prompt, passed whole with the cache, skips as the first did."""
    made = _case(case, "qwen3_5", "ced")
    first, second = helpers.tokens(40), helpers.tokens(30, seed=3)
    common = {"max_new_tokens": 4, "eos_token_id": None, "do_sample": False}
    with made.attach() as attachment:
        cache = attachment.new_cache()
        text = made.model.generate(first, **helpers.cache_argument(cache), **common)
        text = torch.cat([text, second], dim=1)
        text = made.model.generate(text, **helpers.cache_argument(cache), **common)
        by_hand = attachment.new_cache()
        helpers.last(made.model, first, by_hand)
        for token in text[:, 40:43].split(1, dim=1):
            helpers.last(made.model, token, by_hand)
        expected = helpers.last(made.model, text[:, 43:74], by_hand)
    assert torch.equal(text[:, 74:75], expected.argmax(-1))


def test_a_prompt_that_generate_feeds_in_chunks_skips_chunk_by_chunk(
    case: Any, helpers: Any
) -> None:
    """`prefill_chunk_size` of generate: without recurrent layers the text is the same."""
    made = _case(case, "llama", "ced")
    ids = helpers.tokens(60)
    common = {"max_new_tokens": 5, "eos_token_id": None, "do_sample": False}
    with made.attach():
        whole = made.model.generate(ids, **common)
        cut = made.model.generate(ids, prefill_chunk_size=20, **common)
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_copies_and_reordered_rows_go_on_apart(case: Any, helpers: Any, arch: str) -> None:
    """What beams and branching conversations do to a cache."""
    made = _case(case, arch, "ced-csa2+pool-overlap-3")
    ids, more = helpers.tokens(40, rows=2), helpers.tokens(20, rows=2, seed=5)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        helpers.last(made.model, ids, cache)
        twin = copy.deepcopy(cache)
        expected = helpers.last(made.model, more, cache)
        twin.reorder_cache(torch.tensor([1, 0]))
        swapped = helpers.last(made.model, more.flip(0), twin)
    torch.testing.assert_close(swapped.flip(0), expected, atol=1e-9, rtol=1e-9)


def test_logits_of_a_skipped_prompt_are_refused(case: Any, helpers: Any) -> None:
    """All of them, some of them, a loss, hidden states: each with what to do instead."""
    made = _case(case, "llama", "ced")
    ids = helpers.tokens(40)
    with made.attach() as attachment, torch.no_grad():
        for asked in ({}, {"logits_to_keep": 5}, {"labels": ids, "logits_to_keep": 1}):
            with pytest.raises(AttachError, match=r"last token.*logits_to_keep=1.*prompt_logits"):
                made.model(ids, **asked)
        with pytest.raises(AttachError, match="last token"):
            text_decoder(made.model)(ids)
        with pytest.raises(AttachError, match="last token"):
            attachment.hidden_states(ids)
        with pytest.raises(AttachError, match="output_hidden_states"):
            made.model(ids, logits_to_keep=1, output_hidden_states=True)
        short = made.model(ids[:, :REPLAY]).logits
        assert short.shape[1] == REPLAY
        last = made.model(ids, logits_to_keep=1).logits
        assert last.shape[1] == 1
        named = made.model(ids, logits_to_keep=torch.tensor([ids.shape[1] - 1])).logits
        assert torch.equal(named, last)
        with pytest.raises(AttachError, match="last token"):
            made.model(ids, logits_to_keep=torch.tensor([5]))


def test_prompt_logits_can_be_had_by_running_all_layers(case: Any, helpers: Any) -> None:
    """The fallback that the caller asked for, for the calls that need it and no others."""
    made = _case(case, "qwen3_5", "ced")
    ids = helpers.tokens(40)
    with made.attach(prefill="full") as attachment:
        full = helpers.run(made.model, ids)
        hidden = attachment.hidden_states(ids)
    plan = made.plan
    with attach(made.model, made.addon, plan=plan, prompt_logits="full") as attachment:
        assert torch.equal(helpers.run(made.model, ids), full)
        assert torch.equal(attachment.hidden_states(ids), hidden)
        skipped = helpers.last(made.model, ids)
        states = made.model(ids, logits_to_keep=1, output_hidden_states=True).hidden_states
    assert {state.shape[1] for state in states} == {ids.shape[1]}
    assert not torch.allclose(skipped, full[:, -1:], atol=1e-6)
    with pytest.raises(AttachError, match=r"prompt_logits must be"):
        attach(made.model, made.addon, plan=plan, prompt_logits="some")  # type: ignore[arg-type]


def test_a_failed_prompt_is_not_gone_on_with(case: Any, helpers: Any) -> None:
    """An exception in an upper layer's replay leaves a cache that says so."""
    made = _case(case, "llama", "ced")
    layer = text_decoder(made.model).layers[-1].mlp
    with made.attach() as attachment:
        cache = attachment.new_cache()
        layer.forward = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            helpers.last(made.model, helpers.tokens(40), cache)
        del layer.forward
        with pytest.raises(Exception, match="failed half-way"):
            helpers.last(made.model, helpers.tokens(4), cache)


def test_a_prompt_that_fails_between_passes_is_not_gone_on_with(case: Any, helpers: Any) -> None:
    """Lower layers have seen tokens by then that upper ones have not."""
    made = _case(case, "qwen3_5", "ced")
    with made.attach() as attachment:
        cache, states = attachment.new_cache(), attachment.skipped_states
        states.advance = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            helpers.last(made.model, helpers.tokens(40), cache)
        del states.advance
        with pytest.raises(CacheError, match="failed half-way"):
            helpers.last(made.model, helpers.tokens(4), cache)
        cache.reset()
        assert torch.isfinite(helpers.last(made.model, helpers.tokens(40), cache)).all()


def test_wrong_positions_are_refused_before_anything_has_run(
    case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only a later chunk would come to them."""
    import kvfold.runtime.forward as forward

    monkeypatch.setattr(forward, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(forward, "PLAIN_CHUNK", 16)
    made = _case(case, "llama", "ced")
    ids, positions = helpers.tokens(40), torch.arange(40)[None].clone()
    positions[:, 20:] += 1
    for prefill in ("skip", "full"):
        with made.attach(prefill=prefill) as attachment, torch.no_grad():
            cache = attachment.new_cache()
            named = helpers.cache_argument(cache)
            with pytest.raises(AttachError, match="position_ids"):
                made.model(ids, position_ids=positions, logits_to_keep=1, **named)
            assert cache.seen_tokens == []


def test_states_that_are_not_finite_are_refused(case: Any, helpers: Any) -> None:
    """A damaged state projector shows where it is used."""
    made = _case(case, "qwen3_5", "ced")
    weight = made.addon.state_projector.maps["4"].weight
    weight.data[0, 0] = torch.nan
    with (
        made.attach() as attachment,
        pytest.raises(CacheError, match="state projector predicts"),
    ):
        helpers.last(made.model, helpers.tokens(40), attachment.new_cache())


def test_pads_of_hybrids_are_not_run_in_single_columns(case: Any, helpers: Any) -> None:
    """transformers masks recurrent layers only where more than one column runs."""
    made = case("qwen3_5", "latent", window=1)
    ids, mask = helpers.padded([helpers.tokens(3), helpers.tokens(9)])
    with (
        made.attach() as attachment,
        pytest.raises(AttachError, match="window of at least 2"),
    ):
        helpers.run(made.model, ids, attachment.new_cache(), mask)


@pytest.mark.skipping
@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_detach_leaves_the_model_as_it_was(case: Any, helpers: Any, arch: str, method: str) -> None:
    """Layers, decoder and model have their own forwards again."""
    made = _case(case, arch, method)
    ids = helpers.tokens(40)
    before = helpers.run(made.model, ids)
    owned = {name: sorted(module.__dict__) for name, module in made.model.named_modules()}
    with made.attach() as attachment:
        helpers.last(made.model, ids, attachment.new_cache())
    assert owned == {n: sorted(module.__dict__) for n, module in made.model.named_modules()}
    assert torch.equal(helpers.run(made.model, ids), before)


CED = {"method": "ced", "split": 3, "layers": [3, 4, 5]}


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"depth": [{"method": "latent", "rank": 4, "layers": [3, 4, 5]}]}, "hidden state"),
        ({"depth": [{**CED, "split": 0, "layers": list(range(6))}]}, "split of at least 1"),
        ({"depth": [{**CED, "layers": [3, 4]}]}, r"layers \[5\] have another or none"),
        ({"depth": [CED], "replay": 7}, "replay must be at least the window's 8"),
        (
            {"depth": [CED, {"method": "csa2", "source": 1, "readers": [2]}], "replay": 8},
            None,
        ),
        (
            {
                "depth": [
                    {**CED, "layers": [4, 5]},
                    {"method": "latent", "rank": 4, "layers": [2, 3]},
                ]
            },
            "one side of the split",
        ),
        ({"depth": [CED], "state_projector": True}, "linear-attention layers"),
        (
            {
                "depth": [CED],
                "replay": 10,
                "sequence": [{"method": "pool", "layers": [3, 4, 5], "group": 4}],
            },
            "at least the window's 11",
        ),
    ],
)
def test_plans_that_cannot_skip_are_refused(
    tiny_model: Any, keys: dict[str, Any], match: str | None
) -> None:
    """What must hold, what came, and what to do."""
    from kvfold.anatomy import anatomy

    plan = Plan.from_dict({"window": 8, "prefill": "skip", **keys})
    if match is None:
        plan.check(anatomy(tiny_model("llama")))
        return
    with pytest.raises(PlanError, match=match):
        plan.check(anatomy(tiny_model("llama")))


def test_sliding_layers_cannot_be_skipped(tiny_model: Any) -> None:
    """Gemma 3: their windows would hold tokens that never ran."""
    from kvfold.anatomy import anatomy

    plan = Plan.from_dict({"window": 8, "prefill": "skip", "depth": [{**CED, "layers": [4, 5]}]})
    with pytest.raises(PlanError, match="sliding window"):
        plan.check(anatomy(tiny_model("gemma3")))
