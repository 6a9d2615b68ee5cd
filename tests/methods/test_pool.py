"""Pooling gates on plain tensors."""

from __future__ import annotations

import pytest
import torch

from kvfold.methods import CodePart, PoolGate
from kvfold.methods.base import kv_parts

HIDDEN, KV_HEADS, HEAD_DIM = 12, 2, 4
KV_WIDTH = KV_HEADS * HEAD_DIM
PARTS = kv_parts(KV_HEADS, HEAD_DIM)
GATES = ("mean", "token", "head", "channel")


def pool(gate, *, group=4, overlap=False, mass_bias=True, dtype=torch.float64, trained=True):
    made = PoolGate(
        PARTS,
        HIDDEN,
        {3: 4, 7: 6},
        group,
        gate=gate,
        gate_rank=5,
        overlap=overlap,
        mass_bias=mass_bias,
    ).to(dtype)
    if trained:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(drawn(*parameter.shape, seed=parameter.numel()))
    return made


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def groups(gate, *, slots=3, seed=1):
    """Codes and scores of whole groups, and the hidden states that they came from."""
    hidden = drawn(2, slots, gate.group, HIDDEN, seed=seed)
    codes = drawn(2, slots, gate.group, 2 * KV_WIDTH, seed=seed + 1)
    return codes, gate.scores(hidden).detach(), hidden


def average(gate, codes, scores, before=None, has_before=None):
    if gate.overlap and before is None:
        other, other_scores, _ = groups(gate, slots=codes.shape[1], seed=9)
        before = other, other_scores
    with torch.no_grad():
        return gate.average(codes, scores, before, has_before)


def card_compressor(hidden, weight, ape):
    """The second card's module, written out: (batch, 4, D) to (batch, D).

    weight: (D,), of its `wgate`; ape: (4,).
    """
    slots = []
    for row in hidden:
        scores = [float(row[i] @ weight + ape[i]) for i in range(len(ape))]
        shares = torch.tensor(scores, dtype=hidden.dtype).softmax(dim=0)
        slots.append(sum(share * token for share, token in zip(shares, row, strict=True)))
    return torch.stack(slots)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_untrained_slots_are_the_plain_mean(gate, overlap, group):
    made = pool(gate, group=group, overlap=overlap, trained=False)
    codes, scores, _ = groups(made)
    torch.testing.assert_close(average(made, codes, scores), codes.mean(dim=2))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_sum_to_one(gate, overlap):
    """Tokens that are all alike give a slot like them, whatever their scores."""
    made = pool(gate, overlap=overlap)
    _, scores, _ = groups(made)
    token = drawn(2, 3, 1, 2 * KV_WIDTH)
    alike = token.expand(-1, -1, 4, -1)
    _, other_scores, _ = groups(made, seed=5)
    slots = average(made, alike, scores, (alike, other_scores))
    torch.testing.assert_close(slots, token[:, :, 0])


@pytest.mark.parametrize("gate", GATES)
def test_weights_are_not_negative(gate):
    """A slot lies between its tokens in every value."""
    made = pool(gate)
    codes, scores, _ = groups(made)
    slots = average(made, codes, scores)
    assert (slots <= codes.amax(dim=2) + 1e-12).all()
    assert (slots >= codes.amin(dim=2) - 1e-12).all()
    if gate != "mean":
        assert not torch.allclose(slots, codes.mean(dim=2), atol=1e-2)


def test_pooling_keys_equals_pooling_hidden_states_before_the_projection():
    """The second card pools what k_proj and v_proj read; here their outputs are pooled."""
    made = pool("token")
    hidden = drawn(6, 4, HIDDEN, seed=3)
    k_proj = torch.nn.Linear(HIDDEN, KV_WIDTH, dtype=torch.float64)
    v_proj = torch.nn.Linear(HIDDEN, KV_WIDTH, dtype=torch.float64)
    with torch.no_grad():
        pooled = card_compressor(hidden, made.score.weight[0], made.ape[:, 0])
        expected = torch.cat([k_proj(pooled), v_proj(pooled)], dim=-1)
        codes = torch.cat([k_proj(hidden), v_proj(hidden)], dim=-1)
    slots = average(made, codes[None], made.scores(hidden[None]).detach())
    torch.testing.assert_close(slots[0], expected)


def test_the_cards_gate_has_its_parameter_count():
    made = PoolGate(PARTS, 2560, {3: 16}, 4, mass_bias=False)
    assert sum(parameter.numel() for parameter in made.parameters()) == 2560 + 4


def test_a_head_gate_weighs_each_head_of_keys_and_of_values_by_itself():
    made = pool("head")
    codes, scores, _ = groups(made)
    assert scores.shape[-1] == 2 * KV_HEADS
    before = average(made, codes, scores)
    for head in range(2 * KV_HEADS):
        other = scores.clone()
        other[:, :, 0, head] += 1
        changed = (average(made, codes, other) != before).all(dim=(0, 1))
        expected = torch.zeros(2 * KV_WIDTH, dtype=torch.bool)
        expected[head * HEAD_DIM : (head + 1) * HEAD_DIM] = True
        assert torch.equal(changed, expected)


def test_a_head_gate_takes_the_heads_of_any_parts():
    parts = (CodePart("keys", 1, 5), CodePart("values", 3, 2))
    made = PoolGate(parts, HIDDEN, {}, 2, gate="head").double()
    codes = drawn(1, 1, 2, 11)
    scores = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    scores[0, 0, 0] = torch.tensor([100.0, -100, 100, -100])
    picked = torch.tensor([0] * 5 + [1] * 2 + [0] * 2 + [1] * 2)
    expected = codes[0, 0].gather(0, picked[None])[0]
    torch.testing.assert_close(average(made, codes, scores)[0, 0], expected)


def test_a_channel_gate_weighs_each_value_by_itself():
    made = pool("channel")
    codes, scores, _ = groups(made)
    assert scores.shape[-1] == 2 * KV_HEADS + 5
    before = average(made, codes, scores)
    for channel in range(0, 2 * KV_WIDTH, 3):
        with torch.no_grad():
            made.expand.weight[channel] += 1
        after = average(made, codes, scores)
        changed = (after != before).any(dim=0).any(dim=0)
        assert changed.nonzero().flatten().tolist() == [channel]
        before = after


def test_a_channel_gate_adds_a_score_of_each_channel_to_its_heads():
    made = pool("channel")
    codes, scores, _ = groups(made)
    heads, own = scores[..., : 2 * KV_HEADS], scores[..., 2 * KV_HEADS :]
    logits = heads.repeat_interleave(HEAD_DIM, dim=-1) + own @ made.expand.weight.T + made.ape
    weights = logits.softmax(dim=2).detach()
    torch.testing.assert_close(average(made, codes, scores), (weights * codes).sum(dim=2))


@pytest.mark.parametrize("gate", GATES)
def test_overlap_mixes_the_group_before_in_by_its_learned_share(gate):
    made, alone = pool(gate, overlap=True), pool(gate)
    codes, scores, _ = groups(made)
    earlier, earlier_scores, _ = groups(made, seed=5)
    with torch.no_grad():
        made.carry.fill_(0.25)
        for name, parameter in alone.named_parameters():
            parameter.copy_(made.get_parameter(name))
        own = average(alone, codes, scores)
        if gate != "mean":
            alone.ape.copy_(made.ape_before)
        before = average(alone, earlier, earlier_scores)
    mixed = average(made, codes, scores, (earlier, earlier_scores))
    torch.testing.assert_close(mixed, 0.75 * own + 0.25 * before)


def test_each_head_has_a_share_of_the_group_before_of_its_own():
    made = pool("head", overlap=True)
    codes, scores, _ = groups(made)
    with torch.no_grad():
        made.carry.copy_(torch.tensor([0.0, 1, 0, 1]))
    own, before = codes, codes + 100
    mixed = average(made, own, scores, (before, scores)).unflatten(-1, (2 * KV_HEADS, HEAD_DIM))
    assert (mixed[..., [0, 2], :] < 50).all()
    assert (mixed[..., [1, 3], :] > 50).all()


@pytest.mark.parametrize("gate", GATES)
def test_the_first_group_has_nothing_before_it(gate):
    """Whatever lies where its group before would be."""
    made = pool(gate, overlap=True)
    codes, scores, _ = groups(made)
    has_before = torch.tensor([[False, True, True], [True, True, False]])
    one, two = groups(made, seed=5)[:2], groups(made, seed=7)[:2]
    first = average(made, codes, scores, one, has_before)
    second = average(made, codes, scores, two, has_before)
    assert torch.equal(first[~has_before], second[~has_before])
    assert not torch.isclose(first[has_before], second[has_before]).any(dim=-1).all()
    with torch.no_grad():
        made.carry.zero_()
    torch.testing.assert_close(first[~has_before], average(made, codes, scores, one)[~has_before])


def test_every_query_head_of_every_layer_has_a_bias_that_starts_at_nothing():
    made = pool("token", trained=False)
    assert made.slot_bias(3).tolist() == [0.0] * 4
    assert made.slot_bias(7).tolist() == [0.0] * 6
    assert made.slot_bias(5) is None
    assert pool("token", mass_bias=False).slot_bias(3) is None


@pytest.mark.parametrize(
    ("gate", "learning"),
    [
        ("token", ("score.weight", "ape")),
        ("head", ("score.weight", "ape")),
        ("channel", ("expand.weight", "ape")),
        ("mean", ()),
    ],
)
def test_training_can_leave_the_plain_mean(gate, learning):
    made = pool(gate, overlap=True, trained=False)
    codes, _, hidden = groups(made)
    earlier, _, earlier_hidden = groups(made, seed=5)
    before = earlier, made.scores(earlier_hidden)
    slots = made.average(codes, made.scores(hidden), before)
    (slots * drawn(*slots.shape, seed=4)).sum().backward()
    for name in (*learning, "carry"):
        assert made.get_parameter(name).grad.all(), name


@pytest.mark.parametrize("gate", ["token", "head", "channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_formed_in_float32_at_least(gate, dtype):
    made, exact = pool(gate, dtype=dtype), pool(gate)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(made.get_parameter(name))
    codes, _, hidden = groups(exact)
    codes, hidden = codes.to(dtype), hidden.to(dtype)
    with torch.no_grad():
        slots = average(made, codes, made.scores(hidden))
        expected = average(exact, codes.double(), made.scores(hidden).double())
    assert slots.dtype == dtype
    torch.testing.assert_close(slots.double(), expected, atol=0.05, rtol=0.02)


def test_a_gate_can_be_built_without_memory():
    with torch.device("meta"):
        made = PoolGate(PARTS, HIDDEN, {3: 4}, 4, gate="channel", overlap=True)
    assert all(parameter.is_meta for parameter in made.parameters())


def test_untrained_channel_gates_are_alike_wherever_they_are_built():
    torch.manual_seed(1)
    first = pool("channel", trained=False)
    torch.manual_seed(2)
    second = pool("channel", trained=False)
    assert torch.equal(first.score.weight, second.score.weight)
    assert first.score.weight.any()
