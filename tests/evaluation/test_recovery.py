"""History recovery and its yardstick."""

from __future__ import annotations

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.evaluation.recovery import history_recovery, without_history
from kvfold.methods import depth_methods
from kvfold.plan import Csa2, Plan
from kvfold.runtime.attach import attach

PLAN = Plan(anchors=2, window=4, depth=(Csa2(source=3, readers=(4, 5)),))


@pytest.mark.parametrize(
    ("folded", "recovery"), [(4.0, 0.0), (3.0, 1.0), (3.25, 0.75), (4.5, -0.5), (2.9, 1.1)]
)
def test_recovery_runs_from_dropped_to_base(folded, recovery):
    assert history_recovery(4.0, folded, 3.0) == pytest.approx(recovery)


def test_there_is_no_figure_where_history_is_worth_nothing():
    assert history_recovery(3.0, 3.0, 3.0) is None
    assert history_recovery(2.9, 3.0, 3.0) is None


def test_the_yardstick_keeps_anchors_window_and_layers(tiny_model, bare_addon):
    model = tiny_model("llama")
    dropped = without_history(bare_addon(model, PLAN), anatomy(model))
    assert (dropped.plan.anchors, dropped.plan.window) == (2, 4)
    assert dropped.plan.folded_layers == (3, 4, 5)
    assert [method.name for method in depth_methods(dropped.pipelines)] == ["drop"]


def test_the_yardstick_forgets_what_only_folded_layers_could_know(tiny_model, windows, bare_addon):
    model = tiny_model("llama", num_hidden_layers=1)
    plan = Plan(anchors=2, window=4, depth=({"method": "identity", "layers": [0]},))
    dropped = without_history(bare_addon(model, plan), anatomy(model))
    changed = windows.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 97
    with attach(model, dropped) as attachment:
        before = attachment.hidden_states(windows)
        after = attachment.hidden_states(changed)
    assert not torch.equal(before[:, 8], after[:, 8])  # position 5 is still in the window of 8
    assert torch.equal(before[:, 9:], after[:, 9:])


def test_the_yardstick_belongs_to_the_same_base(tiny_model, bare_addon):
    model = tiny_model("llama")
    addon = bare_addon(model, PLAN)
    asked = []
    addon.check_base = asked.append
    without_history(addon, anatomy(model)).check_base(model)
    assert asked == [model]
