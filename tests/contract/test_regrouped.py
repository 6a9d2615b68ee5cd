"""Gates that were made for one group serve smaller ones too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvfold.fitting.frozen import frozen
from kvfold.plan_overrides import regrouped
from kvfold.runtime.attach import attach
from kvfold.runtime.capture import plain_pass
from kvfold.runtime.student import Student

POOLED = ("pool-mean", "pool-token", "pool-head-overlap", "latent+pool", "ced-csa2+pool")


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("entry", POOLED)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_smaller_group_is_chunk_invariant_and_takes_the_first_places(
    case: Any, helpers: Any, family: str, entry: str, group: int
) -> None:
    made = case(family, entry)
    plan = regrouped(made.plan, group)
    sliced = helpers.random_addon(made.model, plan)
    with torch.no_grad():
        own = dict(made.addon.pipelines.named_parameters())
        for name, parameter in sliced.pipelines.named_parameters():
            before = name.endswith("ape_before")
            whole = own[name]
            if parameter.shape != whole.shape:
                whole = whole[-group:] if before else whole[:group]
            parameter.copy_(whole)
    ids = helpers.tokens(40)
    with attach(made.model, sliced) as attached:
        expected = made.run(ids, attached.new_cache())
    with attach(made.model, made.addon, plan=plan) as attached:
        helpers.assert_same(made.run(ids, attached.new_cache()), expected)
        cache = attached.new_cache()
        parts = [made.run(part, cache) for part in (ids[:, :17], ids[:, 17:18], ids[:, 18:])]
    helpers.assert_same(torch.cat(parts, dim=1), expected)


def test_a_student_of_a_smaller_group_computes_what_is_served(case: Any, helpers: Any) -> None:
    made = case("llama", "pool-head")
    plan = regrouped(made.plan, 2)
    ids = helpers.tokens(40)
    with attach(made.model, made.addon, plan=plan) as attached:
        theirs = attached.hidden_states(ids)
        pipelines = attached.pipelines
    student = Student(made.model, made.anatomy, plan, pipelines)
    with torch.no_grad(), frozen(made.model):
        found, _ = plain_pass(made.model, made.anatomy, student.sources, ids)
        with student.running():
            helpers.assert_same(student(found), theirs)
