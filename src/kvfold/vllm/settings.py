"""What kvfold is told through vLLM's `hf_overrides`, and which of it can run there.

    {"architectures": ["KvfoldLlamaForCausalLM"], "kvfold": {"addon": FOLDER, "plan": {...}}}

`plan` changes keys of the add-on's plan, as command-line options of `kvfold` do; it may be left
out. The base checkpoint stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvfold.anatomy import Anatomy, anatomy
from kvfold.errors import EngineSettingError, UnsupportedModelError
from kvfold.methods import Pipeline, rebuilt_pipelines
from kvfold.plan import Plan
from kvfold.plan_overrides import check_override
from kvfold.store.addon import AddOn
from kvfold.vllm.plugin import ARCHITECTURES

KEY = "kvfold"
"""The key of `hf_overrides` that is ours."""


@dataclass(frozen=True)
class Settings:
    """addon: folder, name of one that comes with kvfold, or hub id. plan: keys to change."""

    addon: str
    plan: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Those that a configuration carries; raises `EngineSettingError` for none or others."""
        given = getattr(config, KEY, None)
        if given is None and hasattr(config, "get_text_config"):
            given = getattr(config.get_text_config(), KEY, None)
        told: dict[str, Any] = given if isinstance(given, dict) else {}
        if not isinstance(told.get("addon"), str) or not set(told) <= {"addon", "plan"}:
            raise EngineSettingError(
                f"kvfold's models need hf_overrides with {KEY}: {{addon: FOLDER}}, and plan beside "
                f"it at most; got {given!r}; start the server with `kvfold vllm serve`"
            )
        return cls(told["addon"], dict(told.get("plan") or {}))

    def load(self, *, dtype: torch.dtype | None = None, device: Any = None) -> Loaded:
        """Read the add-on; raises `AddOnError` and `PlanError` as that does."""
        addon = AddOn.from_pretrained(self.addon, dtype=dtype, device=device)
        plan = addon.plan.replace(**self.plan)
        check_override(addon.plan, plan)
        pipelines = rebuilt_pipelines(plan, addon.base.anatomy, addon.pipelines)
        return Loaded(addon, plan, tuple(pipelines))

    def overrides(self, config: Any) -> dict[str, Any]:
        """`hf_overrides` for the model of a configuration.

        Raises `EngineSettingError` for a family that has no model here.
        """
        family = anatomy(config).family.name
        if family not in ARCHITECTURES:
            raise EngineSettingError(
                f"on vLLM kvfold has models for {', '.join(ARCHITECTURES)}; this one is a {family} "
                "model; serve it with `kvfold serve`"
            )
        told: dict[str, Any] = {"addon": self.addon}
        if self.plan:
            told["plan"] = dict(self.plan)
        return {"architectures": [ARCHITECTURES[family][0]], KEY: told}


@dataclass(frozen=True)
class Loaded:
    """An add-on with the plan that runs, and that plan's pipelines."""

    addon: AddOn
    plan: Plan
    pipelines: tuple[Pipeline, ...]

    @property
    def skips(self) -> bool:
        """Whether prompts skip the upper layers."""
        return self.plan.prefill == "skip"

    @property
    def codes_come_late(self) -> bool:
        """Whether some code of a token exists only after layers that already read others."""
        return any(p.depth.needs_window and p.depth.code_width > 0 for p in self.pipelines)

    def check(self, config: Any, name: str) -> None:
        """Raise `AddOnError` for another base's configuration, `EngineSettingError` for a plan
        that does not run on vLLM."""
        self.addon.base.check_config(config, name)
        if self.plan.state_projector and self.addon.state_projector is None:
            raise EngineSettingError(
                "a plan with state_projector needs an add-on that was fitted with one; this one "
                "has none; change it with plan: {state_projector: false}"
            )
        if self.codes_come_late and self.plan.window < 1:
            raise EngineSettingError(
                "this plan needs a window of at least 1: its codes exist only after their own "
                "layers have run, so a token can't see itself through them; got window=0; change "
                "it with plan: {window: 128}"
            )
        check_runs(self.plan, anatomy(config))


def check_runs(plan: Plan, described: Anatomy) -> None:
    """Raise `EngineSettingError`, saying what to do, for a plan that vLLM can't run."""
    if not described.rope_is_static:
        raise EngineSettingError(
            "on vLLM keys of slots are turned when they are read, so rotary frequencies must not "
            f"depend on the length; this model has rope_type={described.rope_type!r}; serve it "
            "with `kvfold serve`"
        )
    sliding = [n.index for n in described.layers if n.kind == "sliding_attention"]
    if sliding:
        raise UnsupportedModelError(
            "on vLLM kvfold has no sliding-window layers yet; this model's layers "
            f"{sliding} are; serve it with `kvfold serve`"
        )
    if plan.prefill_attention == "exact" and plan.folded_layers and plan.prefill == "full":
        raise EngineSettingError(
            "on vLLM a prompt's own tokens see what a decode step would (prefill_attention: "
            "folded), since blocks behind the window are freed while the prompt is read; the plan "
            "says exact; change it with plan: {prefill_attention: folded}"
        )
    if plan.prefill == "skip":
        _check_skip(plan)


def _check_skip(plan: Plan) -> None:
    """Skipping keeps whole keys and values of all layers: what would save memory can't act."""
    assert plan.split is not None
    below = [layer for layer in plan.folded_layers if layer < plan.split]
    for what, named in (
        ("sequence", plan.sequence),
        ("bits", plan.bits),
        (f"entries for layers below the split {plan.split}", below),
    ):
        if named:
            raise EngineSettingError(
                "on vLLM prefill: skip saves time and not memory: layers keep whole keys and "
                f"values, so a plan with {what} would not do what it says; take it out, or run "
                "with plan: {prefill: full}, which saves memory and not time"
            )
    if any(entry.method == "drop" for entry in plan.depth):
        raise EngineSettingError(
            "on vLLM prefill: skip needs keys and values for every skipped token; the plan drops "
            "some; use prefill: full"
        )
