"""When values are summed as codes."""

from __future__ import annotations

import pytest

from kvfold.runtime.absorbing import absorbing_pays


@pytest.mark.parametrize(
    ("queries", "slots", "pays"),
    [(1, 1024, True), (1, 1, False), (512, 1024, False), (1, 0, False)],
)
def test_it_pays_for_few_queries_of_many_slots(queries, slots, pays):
    shape = {"heads": 9, "kv_heads": 3, "head_dim": 64, "code_width": 576}
    assert absorbing_pays(**shape, queries=queries, slots=slots) == pays
