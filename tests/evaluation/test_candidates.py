"""Candidates: the same weights under another plan."""

from __future__ import annotations

import pytest

from kvfold.errors import PlanError
from kvfold.evaluation.candidates import skipped_tokens, with_plan
from kvfold.plan import Plan

PLAN = Plan.from_dict(
    {"anchors": 2, "window": 4, "depth": [{"method": "csa2", "source": 3, "readers": [4, 5]}]}
)


def test_nothing_changed_is_the_addon_itself(tiny_model, bare_addon):
    addon = bare_addon(tiny_model("llama"), PLAN)
    assert with_plan(addon, window=None, anchors=None, resident=None) is addon


def test_weights_are_shared_and_the_addons_own_plan_stays(tiny_model, bare_addon):
    addon = bare_addon(tiny_model("llama"), PLAN)
    changed = with_plan(addon, window=0, anchors=7, resident="shared")
    assert (changed.plan.window, changed.plan.anchors) == (0, 7)
    assert changed.plan.resident == "shared"
    assert changed.pipelines is addon.pipelines
    assert addon.plan == PLAN


def test_a_value_that_can_not_be_is_a_plan_error(tiny_model, bare_addon):
    addon = bare_addon(tiny_model("llama"), PLAN)
    with pytest.raises(PlanError, match="window"):
        with_plan(addon, window=-1)


@pytest.mark.parametrize(
    ("tokens", "skipped"), [(1, 0), (16, 0), (18, 0), (19, 1), (100, 82), (2048, 2030)]
)
def test_tokens_but_for_anchors_and_replay_are_skipped(tokens, skipped):
    plan = PLAN.replace(
        depth=[{"method": "ced", "split": 3, "layers": [3, 4, 5]}], prefill="skip", replay=16
    )
    assert skipped_tokens(plan, tokens) == skipped
    assert skipped_tokens(plan.replace(prefill="full"), tokens) == 0
