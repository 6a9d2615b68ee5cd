"""Which split and replay to skip a prompt with: the settings to try, and the cheapest good one.

A split needs weights of its own; replays and whether recurrent states are projected are choices
of the day of use, so one fit is measured under all of them. The add-ons come from the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvfold.anatomy import Anatomy
from kvfold.budget import layer_groups
from kvfold.errors import PlanError
from kvfold.evaluation.candidates import with_plan
from kvfold.evaluation.plot import Point
from kvfold.evaluation.prompt_runner import PromptEvaluation, PromptResult
from kvfold.plan import Plan
from kvfold.presets import GROUP_DENSE, GROUP_HYBRID
from kvfold.runtime.attach import AddOnLike

Method = Literal["ced", "csa2"]
States = Literal["both", "on", "off"]

DEFAULT_PARTS = (1 / 3, 1 / 2, 2 / 3)
"""Where in a model a split is tried, of its layers."""

WITHIN = 0.03
"""The rise of perplexity, as a share of the plain model's, up to which a setting is good."""


@dataclass(frozen=True)
class Setting:
    """One way to read a prompt. replay: None for no skipping at all.

    projected: whether states of skipped linear-attention layers are predicted.
    """

    split: int
    replay: int | None
    projected: bool = False

    @property
    def group(self) -> str:
        """What is the same along one line of the plot."""
        return f"split {self.split}{' + states' if self.projected else ''}"

    @property
    def name(self) -> str:
        """What its row is called."""
        how = "nothing skipped" if self.replay is None else f"replay {self.replay:,}"
        return f"split {self.split}, {how}{' + states' if self.projected else ''}"

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of a plan that it sets."""
        if self.replay is None:
            return {"prefill": "full", "state_projector": False}
        return {"prefill": "skip", "replay": self.replay, "state_projector": self.projected}


def depth_plan(anatomy: Anatomy, method: Method, split: int, **settings: Any) -> Plan:
    """Every attention layer from the split on: each from H_split, or the first of each group.

    method: `ced` for each; `csa2` for the first of each group, from which the others of the group
    then read. settings: other keys of the plan. Raises `PlanError` if no attention layer is left.
    """
    layers = [layer for layer in anatomy.foldable_layers if layer >= split]
    if not layers:
        raise PlanError(
            f"a split must leave full-attention layers to regenerate; the model has none from "
            f"layer {split} on (they are {list(anatomy.foldable_layers)}); choose a lower split"
        )
    size = GROUP_HYBRID if anatomy.is_hybrid else GROUP_DENSE
    groups = [[layer] for layer in layers] if method == "ced" else layer_groups(layers, size)
    depth: list[dict[str, Any]] = [
        {"method": "ced", "split": split, "layers": [group[0] for group in groups]}
    ]
    depth += [
        {"method": "csa2", "source": group[0], "readers": group[1:]}
        for group in groups
        if len(group) > 1
    ]
    return Plan.from_dict({"depth": depth, **settings})


def default_splits(anatomy: Anatomy) -> tuple[int, ...]:
    """The splits nearest to a third, a half and two thirds of the layers that can be skipped from.

    On a hybrid those just below a layer that attends: the state right below such a layer predicts
    its keys and values best, and a lower one does worse for the same work. Raises `PlanError` for a
    model that has none, saying why.
    """
    refusals: list[PlanError] = []
    possible = []
    for split in range(1, anatomy.num_layers):
        try:
            depth_plan(anatomy, "ced", split, window=1, prefill="skip").check(anatomy)
            possible.append(split)
        except PlanError as error:
            refusals.append(error)
    if not possible:
        raise (
            refusals[0]
            if refusals
            else PlanError(
                "a split needs a layer below it and one above; this model has "
                f"{anatomy.num_layers}; take a deeper model"
            )
        )
    attending = [split for split in possible if split in anatomy.foldable_layers]
    if anatomy.is_hybrid and attending:
        possible = attending
    targets = (part * anatomy.num_layers for part in DEFAULT_PARTS)
    return tuple(sorted({min(possible, key=lambda s: abs(s - at)) for at in targets}))


def sweep_settings(
    anatomy: Anatomy, splits: Iterable[int], replays: Sequence[int], states: States | None
) -> list[Setting]:
    """Every setting in order: for each split nothing skipped, then each replay.

    states: whether states of skipped linear-attention layers are projected; None for both ways
    where a split leaves such layers above it, and none elsewhere.
    """
    made = []
    for split in splits:
        is_linear = any(n.kind == "linear_attention" for n in anatomy.layers[split:])
        chosen = states or ("both" if is_linear else "off")
        ways = {"both": (False, True), "on": (True,), "off": (False,)}[chosen]
        made.append(Setting(split, None))
        made += [Setting(split, replay, way) for replay in replays for way in ways]
    return made


def sweep_plans(
    anatomy: Anatomy, method: Method, settings: Iterable[Setting], **keys: Any
) -> dict[int, Plan]:
    """The plan to fit for each split; keys: of every plan, as `window`.

    A plan has the longest of its replays, at which what states forget is measured. Raises
    `PlanError` for a setting that the model can't be read with.
    """
    by_split: dict[int, list[Setting]] = {}
    for setting in settings:
        by_split.setdefault(setting.split, []).append(setting)
    plans: dict[int, Plan] = {}
    for split, own in by_split.items():
        tried = [depth_plan(anatomy, method, split, **keys, **setting.keys) for setting in own]
        for plan in tried:
            plan.check(anatomy)
        plans[split] = max(tried, key=lambda plan: (plan.prefill == "skip", plan.replay)).replace(
            state_projector=any(plan.state_projector for plan in tried)
        )
    return plans


def sweep_candidates(
    addons: Mapping[int, AddOnLike], settings: Iterable[Setting]
) -> dict[str, AddOnLike]:
    """Each setting's add-on by its name. addons: fitted to the plans of `sweep_plans`, by split."""
    return {setting.name: with_plan(addons[setting.split], **setting.keys) for setting in settings}


def cheapest(made: PromptEvaluation, within: float = WITHIN) -> PromptResult | None:
    """The setting with the fewest operations left whose perplexity rises by at most `within`.

    Of equals the one that took the fewest seconds, where they were measured. None if no setting
    that skips anything is that good.
    """
    good = [
        result
        for result in made.results[1:]
        if result.skipped_tokens and result.perplexity_rise <= within
    ]
    return min(
        good,
        key=lambda result: (
            result.operations_left,
            result.prefill_seconds or 0.0,
            result.perplexity,
        ),
        default=None,
    )


def closest(made: PromptEvaluation) -> PromptResult | None:
    """The setting that skips something with the lowest perplexity; None if none skips."""
    skipping = [result for result in made.results[1:] if result.skipped_tokens]
    return min(skipping, key=lambda result: result.perplexity, default=None)


def sweep_points(made: PromptEvaluation, settings: Iterable[Setting]) -> list[Point]:
    """A point for each setting that skips, in one line for each split."""
    results = {result.name: result for result in made.results}
    points: list[Point] = []
    for setting in settings:
        if setting.replay is not None:
            found = results[setting.name]
            is_first = all(point.group != setting.group for point in points)
            label = f"{setting.group}: {setting.replay:,}" if is_first else f"{setting.replay:,}"
            points.append(Point(label, found.operations_left, found.perplexity, setting.group))
    return points
