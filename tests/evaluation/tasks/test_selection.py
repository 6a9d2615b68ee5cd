"""Parts of a task are spread over it, and what is asked together is alike."""

from __future__ import annotations

import pytest

from kvfold.errors import EvaluationError
from kvfold.evaluation.tasks.selection import SelectedItems, digest, in_batches, selected
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Answer


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, list(range(12))),
        ({"fraction": 0.25}, [2, 6, 10]),
        ({"fraction": 0.01}, [6]),
        ({"limit": 4}, [1, 4, 7, 10]),
        ({"fraction": 0.5, "limit": 100}, [1, 3, 5, 7, 9, 11]),
        ({"fraction": 0.5, "limit": 4}, [3, 9]),
    ],
)
def test_items_are_spread_evenly(settings, expected):
    assert selected(range(12), TaskSettings(None, **settings)) == expected


def test_only_like_items_are_asked_together_and_answers_keep_their_order():
    items = [{"id": str(n), "length": n % 2} for n in range(7)]
    asked = []

    def answers(part):
        asked.append([item["id"] for item in part])
        return [Answer(item["id"], {}, {}) for item in part]

    found = in_batches(items, 2, lambda item: item["length"], answers)
    assert asked == [["0", "2"], ["4", "6"], ["1", "3"], ["5"]]
    assert [answer.item for answer in found] == [item["id"] for item in items]


@pytest.mark.parametrize(
    "text", [{"length": 9}, {"length": 4, "ids": [1] * 9}, {"length": 3, "turns": [[1] * 3] * 3}]
)
def test_a_text_longer_than_what_the_model_holds_is_refused(text):
    SelectedItems([{"id": "a", **text}], {}, TaskSettings(None, positions=9))
    SelectedItems([{"id": "a", **text}], {}, TaskSettings(None))
    with pytest.raises(EvaluationError, match=r"the 8 positions .* item a has 9 tokens; .*lengths"):
        SelectedItems([{"id": "a", **text}], {}, TaskSettings(None, positions=8))


def test_a_digest_tells_items_apart():
    items = [{"id": "a", "ids": [1, 2]}]
    assert digest(items) == digest([{"ids": [1, 2], "id": "a"}])
    assert digest(items) != digest([{"id": "a", "ids": [1, 3]}])
