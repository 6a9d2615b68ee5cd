"""History recovery: how much of what the history is worth survives the folding.

`recovery = (L_dropped - L_folded) / (L_dropped - L_base)` with L the mean token loss and "dropped"
the run with anchors and window only. 0 means that the slots are decoration, 1 that nothing was
lost. Where the dropped run loses next to nothing, the text can't tell, and there is no figure.
"""

from __future__ import annotations

from kvfold.anatomy import Anatomy
from kvfold.evaluation.candidates import Candidate
from kvfold.methods import build_pipelines
from kvfold.runtime.attach import AddOnLike

LEAST_WORTH = 1e-3
"""Nats a token that the history must be worth before recovery is reported."""


def without_history(addon: AddOnLike, anatomy: Anatomy) -> Candidate:
    """The yardstick beside an add-on: same anchors, window and layers, history dropped.

    It runs the base's own weights, without the add-on's low-rank terms: what the history is worth
    is a property of the model, and training must not be able to raise it.
    """
    plan = addon.plan.without_history()
    return Candidate(plan, build_pipelines(plan, anatomy), None, None, addon)


def history_recovery(dropped_loss: float, folded_loss: float, base_loss: float) -> float | None:
    """(L_dropped - L_folded) / (L_dropped - L_base), None where the history is worth nothing."""
    worth = dropped_loss - base_loss
    return (dropped_loss - folded_loss) / worth if worth > LEAST_WORTH else None
