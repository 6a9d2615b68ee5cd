"""Whether rows are long enough for something to be folded in them: else nothing can be learnt.

A row of n tokens with A anchors, a window of W and slots of r tokens has a history once
n >= A + W + r. A training in shorter rows would run, bring nothing, and say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.errors import CorpusError
from kvfold.plan import Plan


def least_seq(plan: Plan, window: int) -> int:
    """Tokens of the shortest row in which every folded layer has a history, with some window.

    1 for a plan that folds nothing.
    """
    groups = [plan.group_of(layer) for layer in plan.folded_layers]
    return plan.anchors + window + max(groups) if groups else 1


def check_plan_window(plan: Plan, seq: int) -> None:
    """Raise `CorpusError` where nothing that is measured in held-out rows reads a history.

    The last token of a row has no next one to be measured on.
    """
    least = least_seq(plan, plan.window) + 1
    if seq < least:
        raise CorpusError(
            f"rows must be longer than what a plan keeps exact, or nothing is folded and nothing "
            f"can be measured; with {plan.anchors} anchors and a window of {plan.window} they need "
            f"at least {least} tokens; got seq {seq}; raise seq, or lower the plan's window"
        )


def check_windows(plan: Plan, windows: Sequence[int], seq: int, stage: str) -> None:
    """Raise `CorpusError` for window sizes of a stage that leave no history in rows of seq tokens.

    stage: what it is called.
    """
    short = sorted({window for window in windows if least_seq(plan, window) > seq})
    if short:
        raise CorpusError(
            f"every window of {stage} must leave a history in its rows, or steps that take it "
            f"train nothing; in rows of {seq} tokens windows of {', '.join(map(str, short))} leave "
            f"none; leave them out, or take rows of at least {least_seq(plan, max(short))} tokens"
        )
