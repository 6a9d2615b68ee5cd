"""What an attached model refuses, and how it says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvfold.anatomy import anatomy, text_decoder
from kvfold.errors import AttachError, CacheError, PlanError, UnsupportedModelError
from kvfold.methods import Source, build_pipelines
from kvfold.plan import Plan
from kvfold.runtime.attach import attach, attachment_of
from kvfold.runtime.capture import capture
from kvfold.runtime.logits import plain_hidden_states

UPPER = [2, 3, 4, 5]
CED = [{"method": "ced", "split": 2, "layers": UPPER}]
LATENT = [{"method": "latent", "layers": UPPER, "rank": 8}]


class Bare:
    """A plan with unfitted methods."""

    state_projector = None
    lora = None

    def __init__(self, model: Any, depth: Any, **keys: Any) -> None:
        self.plan = Plan.from_dict({"anchors": 2, "window": 4, **keys, "depth": depth})
        self.pipelines: nn.ModuleList = build_pipelines(self.plan, anatomy(model)).to(model.dtype)

    def check_base(self, model: Any) -> None:
        """Any will do."""


@pytest.fixture
def model(tiny_model: Callable[..., Any]) -> Any:
    """A tiny Llama."""
    return tiny_model("llama")


def ids(count: int, rows: int = 1) -> torch.Tensor:
    """Some tokens."""
    return torch.arange(rows * count).view(rows, count) % 90 + 3


def test_a_cache_goes_on_only_with_its_own_attachment(
    model: Any, cache_argument: Callable[..., Any]
) -> None:
    """Not with another attachment, and not with the plain model."""
    addon = Bare(model, CED)
    with attach(model, addon) as first:
        cache = first.new_cache()
        model(ids(5), **cache_argument(model, cache))
    with attach(model, addon), pytest.raises(AttachError, match="belongs to another attachment"):
        model(ids(1), **cache_argument(model, cache))
    with pytest.raises(CacheError, match="layer 2 of this cache is folded"):
        model(ids(1), **cache_argument(model, cache))


def test_an_empty_cache_of_the_callers_goes_on_from_call_to_call(
    model: Any, cache_argument: Callable[..., Any]
) -> None:
    """The usual decode loop with a DynamicCache keeps its history, folded."""
    from transformers import DynamicCache

    with attach(model, Bare(model, CED)) as attachment:
        own = DynamicCache(config=model.config)
        first = model(ids(12)[:, :9], **cache_argument(model, own)).logits
        rest = model(ids(12)[:, 9:], **cache_argument(model, own)).logits
        whole = model(ids(12), **cache_argument(model, attachment.new_cache())).logits
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole, atol=1e-5, rtol=1e-5)


def test_work_that_needs_the_plain_model_is_refused_while_attached(model: Any) -> None:
    """A fit or a plain measurement through a folded model would be wrong without a word."""
    addon = Bare(model, CED)
    with attach(model, addon):
        with pytest.raises(AttachError, match="detach it first"):
            plain_hidden_states(model, ids(4))
        with pytest.raises(AttachError, match="detach it first"):
            capture(model, anatomy(model), {Source("keys", 2)}, ids(4))


def test_a_suspended_attachment_leaves_the_plain_model_and_goes_on_afterwards(
    model: Any, cache_argument: Callable[..., Any]
) -> None:
    """Caches begun before it are still good, and an error inside changes nothing."""
    whole = ids(30)
    plain = model(whole).logits
    assert attachment_of(model) is None
    with attach(model, Bare(model, CED)) as attachment:
        folded = model(whole).logits
        assert not torch.allclose(folded, plain)
        cache = attachment.new_cache()
        model(whole[:, :20], **cache_argument(model, cache))
        with attachment.suspended():
            assert attachment_of(model) is None
            assert torch.equal(model(whole).logits, plain)
        with pytest.raises(ZeroDivisionError), attachment.suspended():
            _ = 1 / 0
        assert attachment_of(model) is attachment
        assert torch.equal(model(whole).logits, folded)
        on = model(whole[:, 20:], **cache_argument(model, cache)).logits
        torch.testing.assert_close(on, folded[:, 20:], atol=1e-5, rtol=1e-5)
    assert attachment_of(model) is None
    assert torch.equal(model(whole).logits, plain)


def test_an_input_without_tokens_is_refused(model: Any) -> None:
    """There is nothing to predict from."""
    with attach(model, Bare(model, CED)), pytest.raises(AttachError, match="at least one new"):
        model(ids(4)[:, :0])


def test_a_copied_cache_goes_on_by_itself(model: Any, cache_argument: Callable[..., Any]) -> None:
    """A prompt's cache can be copied and continued in several ways; the model is not copied."""
    with attach(model, Bare(model, CED)) as attachment:
        cache = attachment.new_cache()
        model(ids(9), **cache_argument(model, cache))
        copied = copy.deepcopy(cache)
        assert copied.owner is attachment and copied.seen_tokens == [9]
        one = model(ids(3), **cache_argument(model, copied)).logits
        assert cache.seen_tokens == [9]
        other = model(ids(3), **cache_argument(model, cache)).logits
    assert torch.equal(one, other)


def test_a_plain_cache_with_tokens_is_refused(
    model: Any, cache_argument: Callable[..., Any]
) -> None:
    """An empty one is replaced, as generate() brings one along."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with attach(model, Bare(model, CED)):
        model(ids(4), **cache_argument(model, cache))
    model(ids(4), **cache_argument(model, cache))
    with attach(model, Bare(model, CED)), pytest.raises(AttachError, match="must be a FoldedCache"):
        model(ids(1), **cache_argument(model, cache))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(1, 1, 4, 4), "must be \\(batch, columns\\)"),
        (torch.ones(1, 3), "must cover the 0 columns in the cache and the 4 new ones"),
        (torch.tensor([[1, 1, 1, 0]]), "padding_side = 'left'"),
    ],
)
def test_masks_that_mean_something_else_are_refused(
    model: Any, mask: torch.Tensor, message: str
) -> None:
    """Four-dimensional, too short, or padded on the right."""
    with attach(model, Bare(model, CED)), pytest.raises(AttachError, match=message):
        model(ids(4), attention_mask=mask)


def test_positions_of_the_callers_own_are_refused(model: Any) -> None:
    """Right ones pass, others would be ignored silently."""
    with attach(model, Bare(model, CED)):
        model(ids(4), position_ids=torch.arange(4)[None])
        with pytest.raises(AttachError, match="position_ids must count"):
            model(ids(4), position_ids=torch.arange(4)[None] + 7)


def test_training_and_attention_outputs_are_refused(model: Any) -> None:
    """Neither can be had from a folded model."""
    with attach(model, Bare(model, CED)):
        with pytest.raises(AttachError, match="output_attentions"):
            model(ids(4), output_attentions=True)
        model.train()
        with pytest.raises(AttachError, match=r"model\.eval\(\)"):
            model(ids(4))
        model.eval()
        model(ids(4))


def test_another_batch_size_is_refused(model: Any, cache_argument: Callable[..., Any]) -> None:
    """A cache has its rows."""
    with attach(model, Bare(model, CED)) as attachment:
        cache = attachment.new_cache()
        model(ids(4, rows=2), **cache_argument(model, cache))
        with pytest.raises(AttachError, match="holds 2 rows, but the input has 1"):
            model(ids(1), **cache_argument(model, cache))


def test_a_cache_whose_forward_failed_is_not_used_again(
    model: Any, cache_argument: Callable[..., Any]
) -> None:
    """Half a step would be silently wrong."""
    with attach(model, Bare(model, CED)) as attachment:
        cache = attachment.new_cache()
        model(ids(4), **cache_argument(model, cache))
        last = text_decoder(model).layers[-1].mlp
        last.forward = _fail
        with pytest.raises(RuntimeError, match="no mlp today"):
            model(ids(1), **cache_argument(model, cache))
        del last.forward
        with pytest.raises(CacheError, match="failed half-way"):
            model(ids(1), **cache_argument(model, cache))
        model(ids(4), **cache_argument(model, attachment.new_cache()))


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no mlp today")


def test_a_window_of_zero_is_refused_where_codes_come_late(model: Any) -> None:
    """A latent code of the group's own keys exists only after the group has run."""
    with attach(model, Bare(model, LATENT, window=0)) as attachment:
        with pytest.raises(PlanError, match="window of at least 1"):
            model(ids(4))
        scored = attachment.hidden_states(ids(12), history="exact")
    assert torch.isfinite(scored).all()
    with pytest.raises(PlanError, match="window of at least 1"):
        attach(model, Bare(model, [{"method": "drop", "layers": UPPER}], window=0))


def test_a_plan_for_other_layers_than_the_add_ons_is_refused(model: Any) -> None:
    """Only what is chosen on the day of use may differ."""
    addon = Bare(model, CED)
    other = addon.plan.replace(depth=[{"method": "ced", "split": 2, "layers": [2, 3]}])
    with pytest.raises(AttachError, match="a plan alone"):
        attach(model, addon.plan)
    dropped = addon.plan.replace(depth=[{"method": "drop", "layers": UPPER}])
    with pytest.raises(PlanError, match="the add-on's own depth entries"):
        attach(model, addon, plan=dropped)
    with pytest.raises(PlanError, match="the add-on's own depth entries"):
        attach(model, addon, plan=other)


def test_an_attention_implementation_that_cant_be_folded_is_refused(model: Any) -> None:
    """Flash attention and the like never build the masks that folding needs."""
    before = model.config._attn_implementation
    model.config._attn_implementation = "flex_attention"
    try:
        with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
            attach(model, Bare(model, CED))
    finally:
        model.config._attn_implementation = before


def test_activations_that_overflow_are_named(model: Any) -> None:
    """The method and its layers are in the message."""
    addon = Bare(model, CED)
    layer = text_decoder(model).layers[1].mlp.down_proj
    weight = layer.weight.data.clone()
    layer.weight.data.fill_(float("inf"))
    try:
        with attach(model, addon), pytest.raises(CacheError, match=r"ced code of layers \[2, 3"):
            model(ids(6))
    finally:
        layer.weight.data.copy_(weight)


def test_absorbed_reading_needs_linear_maps(model: Any) -> None:
    """Else nothing could be absorbed, and nothing is changed behind the user's back."""
    depth = [{"method": "csa2", "source": 2, "readers": [3], "residual_hidden": 4}]
    with pytest.raises(PlanError, match="residual MLP"):
        attach(model, Bare(model, depth, resident="absorbed"))


def test_shared_reading_needs_a_rotation_that_never_changes(tiny_model: Callable[..., Any]) -> None:
    """Keys rotated again must get the angle that they had."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_model("llama", rope_parameters=dynamic)
    with pytest.raises(PlanError, match="frequencies change"):
        attach(model, Bare(model, CED, resident="shared"))
    attach(model, Bare(model, CED, resident="expanded")).detach()


def test_crop_gives_back_what_is_still_exact_and_refuses_the_rest(
    model: Any, cache_argument: Callable[..., Any]
) -> None:
    """Up to A + W tokens nothing is folded, and cropping is as if they had never come."""
    with attach(model, Bare(model, CED)) as attachment:
        cache = attachment.new_cache()
        model(ids(6), **cache_argument(model, cache))
        cache.crop(-3)
        assert cache.get_seq_length() == 3
        again = model(ids(6)[:, 3:], **cache_argument(model, cache)).logits
        whole = model(ids(6), **cache_argument(model, attachment.new_cache())).logits
        torch.testing.assert_close(again, whole[:, 3:], atol=1e-5, rtol=1e-5)
        model(ids(1), **cache_argument(model, cache))
        with pytest.raises(CacheError, match="can't crop 1 tokens"):
            cache.crop(-1)


def test_reset_makes_a_cache_as_good_as_new(model: Any, cache_argument: Callable[..., Any]) -> None:
    """The next prompt sees nothing of the last."""
    with attach(model, Bare(model, CED)) as attachment:
        cache = attachment.new_cache()
        first = model(ids(9), **cache_argument(model, cache)).logits
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(model(ids(9), **cache_argument(model, cache)).logits, first)


POOL = [{"method": "pool", "layers": UPPER, "group": 4, "overlap": True}]
BITS = [{"method": "turboquant", "layers": UPPER}]


def test_crop_inside_an_unfinished_group_is_as_if_the_tokens_had_never_come(
    model: Any, cache_argument: Callable[..., Any]
) -> None:
    """A pooled group can't be taken apart again, so cropping ends where one is full."""
    with attach(model, Bare(model, [], sequence=POOL)) as attachment:
        cache = attachment.new_cache()
        model(ids(9), **cache_argument(model, cache))  # 2 anchors, a group of 4, and 3 of the next
        with pytest.raises(CacheError, match="groups of 4 of them have been pooled"):
            cache.crop(-4)
        cache.crop(-2)
        assert cache.get_seq_length() == 7
        again = model(ids(30)[:, 7:], **cache_argument(model, cache)).logits
        whole = model(ids(30), **cache_argument(model, attachment.new_cache())).logits
        torch.testing.assert_close(again, whole[:, 7:], atol=1e-5, rtol=1e-5)
        with pytest.raises(CacheError, match="which can't be made exact again"):
            cache.crop(-1)


@pytest.mark.parametrize("keys", [{"sequence": POOL}, {"bits": BITS}])
def test_pooled_and_quantised_caches_are_copied_and_reset_whole(
    model: Any, cache_argument: Callable[..., Any], keys: dict[str, Any]
) -> None:
    """Slots, scales and unfinished groups: a copy goes on by itself, a reset one is new."""
    with attach(model, Bare(model, [], **keys)) as attachment:
        cache = attachment.new_cache()
        first = model(ids(21), **cache_argument(model, cache)).logits
        copied = copy.deepcopy(cache)
        one = model(ids(11), **cache_argument(model, copied)).logits
        other = model(ids(11), **cache_argument(model, cache)).logits
        assert torch.equal(one, other)
        cache.reset()
        assert cache.nbytes().total == 0
        assert torch.equal(model(ids(21), **cache_argument(model, cache)).logits, first)


def test_bits_can_be_chosen_on_the_day_of_use(
    model: Any, cache_argument: Callable[..., Any]
) -> None:
    """They have no weights: other ones, fewer layers, or layers that the add-on leaves alone."""
    addon = Bare(model, [], sequence=POOL, bits=BITS)
    fewer = [{"method": "turboquant", "layers": [0, 2], "key_bits": 2, "value_bits": 2}]
    outputs = []
    for bits in (BITS, fewer, []):
        with attach(model, addon, plan=addon.plan.replace(bits=bits)) as attachment:
            assert set(attachment.resident) == set(UPPER) | ({0} if bits is fewer else set())
            cache = attachment.new_cache()
            outputs.append(model(ids(30), **cache_argument(model, cache)).logits)
    assert not any(torch.equal(outputs[a], outputs[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    # Coarse codes are farther from the unquantised logits than fine ones.
    coarse, fine = ((outputs[i] - outputs[2]).abs().mean() for i in (1, 0))
    assert coarse > 2 * fine


def test_a_plan_with_another_sequence_axis_than_the_add_ons_is_refused(model: Any) -> None:
    """Gates are trained up to their group; a window shorter than one is refused as well."""
    addon = Bare(model, [], sequence=POOL)
    for sequence in ([], [{**POOL[0], "gate": "head"}], [{**POOL[0], "position": "last"}]):
        with pytest.raises(PlanError, match="the add-on's own sequence entries"):
            attach(model, addon, plan=addon.plan.replace(sequence=sequence))
    with pytest.raises(PlanError, match=r"group=4 needs a window.*got window=3"):
        attach(model, addon, plan=addon.plan.replace(window=3))


def test_what_cant_be_quantised_is_named_and_ends_the_cache(
    model: Any, cache_argument: Callable[..., Any]
) -> None:
    """Also in a single decode step, which is looked at once."""
    bias = text_decoder(model).layers[3].self_attn.v_proj.bias
    before = bias.data.clone()
    with attach(model, Bare(model, [], bits=BITS)) as attachment:
        cache = attachment.new_cache()
        model(ids(9), **cache_argument(model, cache))
        bias.data[0] = float("nan")
        try:
            with pytest.raises(CacheError, match=r"layers \[3\] has NaN.*at token 9 of row 0"):
                model(ids(1), **cache_argument(model, cache))
        finally:
            bias.data.copy_(before)
        with pytest.raises(CacheError, match="failed half-way"):
            model(ids(1), **cache_argument(model, cache))


@pytest.mark.parametrize("count", [1, 6])
def test_an_add_on_whose_maps_overflow_is_named_where_slots_are_quantised(
    model: Any, cache_argument: Callable[..., Any], count: int
) -> None:
    """Codes are finite and what is made of them is not."""
    addon = Bare(model, LATENT, bits=BITS, resident="expanded")
    addon.pipelines[0].depth.values["4"].bias.data[0] = float("inf")
    with attach(model, addon) as attachment:
        cache = attachment.new_cache()
        model(ids(2), **cache_argument(model, cache))  # anchors only
        with pytest.raises(
            CacheError, match=r"slots must be finite.*layers \[4\] made after token 2"
        ):
            model(ids(count), **cache_argument(model, cache))
