"""Attaching an add-on to a model, and taking it off again.

`attach` replaces forwards on instances only: the decoder's, to open and commit steps and to run
long folded prompts in chunks, and those of the folded attention modules. An add-on's low-rank terms
act on projections in every pass, exact ones included: what is served has one set of weights.
Nothing of a class or of transformers itself is touched, and `detach` leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Protocol, Self, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvfold.anatomy import (
    ATTACHMENT_MARK,
    Anatomy,
    anatomy,
    require_plain,
    rotary,
    supported_attention,
    text_decoder,
)
from kvfold.errors import AttachError, CacheError, PlanError
from kvfold.methods import (
    Activations,
    Lora,
    Pipeline,
    Source,
    StateProjector,
    rebuilt_pipelines,
)
from kvfold.plan import Plan
from kvfold.plan_overrides import check_override
from kvfold.runtime.adapters import check_projections
from kvfold.runtime.cache import FoldedCache, Running
from kvfold.runtime.filling import fill
from kvfold.runtime.layer import Rotation, SlotPlaces, StoredSlots, folded_layers
from kvfold.runtime.linear_states import SkippedStates
from kvfold.runtime.patches import Patches
from kvfold.runtime.reading import choose_readings, free_memory
from kvfold.runtime.schedule import Schedule, Step
from kvfold.runtime.state import RowState, rows_of


class AddOnLike(Protocol):
    """What can be attached: a plan, its fitted methods, and a check of the base model."""

    plan: Plan
    pipelines: nn.ModuleList
    state_projector: StateProjector | None
    lora: Lora | None

    def check_base(self, model: Any) -> None:
        """Raise `AddOnError` unless `model` is the base the add-on was made for."""


PromptLogits = Literal["refuse", "full"]


def attach(
    model: Any,
    addon: AddOnLike,
    *,
    plan: Plan | None = None,
    prompt_logits: PromptLogits = "refuse",
    keep_codes: bool = False,
) -> Attachment:
    """Fold a model's cache with an add-on until `detach`, or until the `with` block ends.

    plan: run the same weights under other anchors, window, bits, prefill_attention, prefill,
    replay, state_projector or resident than the add-on's own plan, or a smaller group of pooling.
    prompt_logits: what to do under `prefill: skip` with a call that asks for more than the last
    token's logits of a prompt, which do not exist there: `refuse` it, or run that call through all
    layers (`full`). keep_codes: hold on to the codes of layers that are read expanded, so that a
    snapshot need not have their keys and values too; without effect where those are no larger, or
    where RoPE's frequencies change with the length.

    Raises `AddOnError` for another base model, `AttachError` if something is attached already or
    dtypes or devices differ, `PlanError` if the window is too short or the reading impossible,
    `UnsupportedModelError` for an attention implementation that can't be folded. The model is only
    changed once all checks have passed.
    """
    given: object = addon
    if isinstance(given, Plan):
        raise AttachError(
            "a plan alone can't be attached, since it has no weights; got a Plan; fit it first: "
            "attach(model, kvfold.fit(model, plan, tokens))"
        )
    if prompt_logits not in get_args(PromptLogits):
        raise AttachError(f"prompt_logits must be 'refuse' or 'full'; got {prompt_logits!r}")
    return Attachment(model, addon, plan or addon.plan, prompt_logits, keep_codes)


def attachment_of(model: Any) -> Attachment | None:
    """What is attached to a model, None for a plain one."""
    found: Attachment | None = getattr(text_decoder(model).forward, ATTACHMENT_MARK, None)
    return found


class Attachment:
    """An add-on on a model. Use as a context manager, or call `detach`."""

    def __init__(
        self,
        model: Any,
        addon: AddOnLike,
        plan: Plan,
        prompt_logits: PromptLogits = "refuse",
        keep_codes: bool = False,
    ) -> None:
        self.model = model
        self.addon = addon
        self.plan = plan
        self.prompt_logits = prompt_logits
        self.split = plan.split if plan.prefill == "skip" else None
        # Set by the model's forward for its decoder, which is never told which logits are wanted.
        self.wants_last_only = False
        self.anatomy: Anatomy = anatomy(model)
        self.keeps_codes = keep_codes and self.anatomy.rope_is_static
        self.decoder: Any = text_decoder(model)
        self._check(addon)
        self.pipelines = rebuilt_pipelines(plan, self.anatomy, addon.pipelines)
        groups = {pipeline.group for pipeline in self.pipelines} or {1}
        self.schedules = {g: Schedule(plan.anchors, plan.window, g) for g in sorted(groups)}
        readings = choose_readings(
            plan,
            self.pipelines,
            self.anatomy,
            free_bytes=free_memory(model.device),
            element_size=model.dtype.itemsize,
        )
        self.resident: dict[int, str] = dict(sorted(readings.items()))
        self.folds = folded_layers(model, self.anatomy, self.pipelines, readings)
        self.lora = addon.lora
        self.skipped_states = None if self.split is None else self._skipped_states(addon)
        self._fed_by: dict[Source, list[Pipeline]] = {}
        for pipeline in self.pipelines:
            for source in pipeline.inputs:
                self._fed_by.setdefault(source, []).append(pipeline)
        self.cache: FoldedCache | None = None
        self.adopted: WeakKeyDictionary[Cache, FoldedCache] = WeakKeyDictionary()
        self.activations: dict[Source, Tensor] = {}
        self._rotations: dict[tuple[Any, ...], Rotation] = {}
        self._patches = Patches(self)

    def _check(self, addon: AddOnLike) -> None:
        require_plain(self.model)
        supported_attention(self.model)
        addon.check_base(self.model)
        self.plan.check(self.anatomy)
        check_override(addon.plan, self.plan)
        if self.plan.state_projector and addon.state_projector is None:
            raise PlanError(
                "a plan with state_projector needs an add-on that was fitted with one; this "
                "add-on has none; fit a plan with state_projector: true, or leave it out"
            )
        if addon.lora is not None:
            check_projections(self.model, addon.lora)
        parts = [addon.pipelines, addon.state_projector, addon.lora]
        weights = (w for part in parts if part is not None for w in part.parameters())
        for parameter in weights:
            if parameter.dtype != self.model.dtype or parameter.device != self.model.device:
                raise AttachError(
                    "add-on and model must have one dtype and device; the add-on is in "
                    f"{parameter.dtype} on {parameter.device}, the model in {self.model.dtype} on "
                    f"{self.model.device}; use addon.to(dtype=model.dtype, device=model.device)"
                )

    def _skipped_states(self, addon: AddOnLike) -> SkippedStates:
        skipped = [
            n.index for n in self.anatomy.layers[self.split :] if n.kind == "linear_attention"
        ]
        projector = addon.state_projector if self.plan.state_projector else None
        return SkippedStates(self.model, skipped, projector, self.plan.replay)

    @property
    def splits(self) -> list[int]:
        """The layers whose input some method encodes."""
        return sorted({source.layer for source in self._fed_by if source.kind == "hidden"})

    def runs(self, layer: int) -> bool:
        """Whether a layer runs in the pass that is open."""
        if self.cache is None or self.cache.running is None:
            raise AttachError(
                "a layer of an attached model was run on its own; call the model, or detach first"
            )
        return layer in self.cache.running.layers

    def is_wanted(self, source: Source) -> bool:
        """Whether some method encodes this activation."""
        return source in self._fed_by

    def publish(self, found: Activations) -> None:
        """Take activations of the current step and encode every code that they complete."""
        assert self.cache is not None
        self.activations.update(found)
        fed = {id(p): p for source in found for p in self._fed_by.get(source, ())}
        for pipeline in fed.values():
            self.cache.publish(self.activations, pipeline)

    def rotary_at(self, slots: SlotPlaces | StoredSlots) -> Rotation:
        """The rotation of some slots, remembered for one step."""
        if slots.key not in self._rotations:
            self._rotations[slots.key] = self.rotation_of(slots)
        return self._rotations[slots.key]

    def rotation_of(self, slots: SlotPlaces | StoredSlots) -> Rotation:
        """The same made anew, without a look at the step that is open."""
        made = rotary(self.model, self.anatomy.family, slots.positions(), self._like())
        return Rotation.of(*made)

    def own_rotation(self, embeddings: tuple[Tensor, Tensor]) -> Rotation:
        """The rotation of the step's own tokens, from what the decoder hands to every layer."""
        key = ("own", id(embeddings[0]))
        if key not in self._rotations:
            self._rotations[key] = Rotation.of(*embeddings)
        return self._rotations[key]

    def _like(self) -> Tensor:
        return torch.empty(0, dtype=self.model.dtype, device=self.model.device)

    def full_pass(
        self, cache: FoldedCache, new: int, counts: list[int], *, folded: bool, record: bool = False
    ) -> Running:
        """A pass of `new` columns through all layers, of which `counts` are a row's tokens.

        record: keep every record of the step in `cache.recorded`, and fold nothing.
        """
        before = cache.rows or [0] * len(counts)
        steps = {
            group: Step(schedule, before, new, counts, folded=folded, device=self.model.device)
            for group, schedule in self.schedules.items()
        }
        by_key = {(group, upper): step for group, step in steps.items() for upper in (False, True)}
        tokens = next(iter(steps.values()))
        return Running(by_key, range(self.anatomy.num_layers), tokens, record)

    def open(self, cache: FoldedCache, running: Running) -> None:
        """Begin a pass (the decoder's forward calls it)."""
        cache.begin(running)
        self.cache = cache
        self.activations = {}
        self._rotations = {}
        if cache.given is not None and not running.record:
            for pipeline in self.pipelines:
                cache.publish({}, pipeline)

    def close(self, *, done: bool) -> None:
        """End the step: commit it if the forward came through."""
        cache, self.cache = self.cache, None
        self.activations = {}
        if done and cache is not None:
            cache.commit(self.rotary_at)
        self._rotations = {}

    def new_cache(self, *, given: dict[int, Tensor] | None = None) -> FoldedCache:
        """An empty cache for the attached model.

        given: records to use instead of computing them (two-pass scoring). Raises `PlanError` for a
        window of 0 where codes exist only after their own layers have run.
        """
        if given is None and self.exits_lag and self.plan.window < 1:
            raise PlanError(
                "this plan needs a window of at least 1: its codes exist only after their own "
                "layers have run, so a token can't see itself through them; got window=0"
            )
        return FoldedCache(
            self.folds,
            self.schedules,
            self.model.config,
            owner=self,
            split=self.split,
            given=given,
            keep_codes=self.keeps_codes,
        )

    def rows_of(
        self, cache: FoldedCache, rows: Sequence[int] | None = None, *, copy: bool = True
    ) -> list[RowState]:
        """Rows of a cache in plain form, apart from the batch that they are in.

        rows: which, all by default. copy=False gives views into the cache, good until its next
        step. Raises `CacheError` for a cache of another attachment, or one that failed half-way.
        """
        if cache.owner is not self or cache.given is not None:
            raise CacheError(
                "rows can be taken only out of a cache that this attachment made by running text; "
                "got one of another attachment, or with given records; use attachment.new_cache()"
            )
        cache.require_whole()
        states = rows_of(self, cache, range(len(cache.rows)) if rows is None else rows)
        return [state.copied() for state in states] if copy else states

    def cache_from(self, states: Sequence[RowState]) -> FoldedCache:
        """A cache that holds rows in plain form, and can go on from them.

        states: from `rows_of` of this attachment, or of one with the same add-on, plan, dtype and
        `resident`. Rows of unequal length end in the same column, as after a left-padded prompt:
        the next call's mask goes on from `cache.attention_mask()`. Raises `CacheError` for a
        state that this attachment's plan can't have left.
        """
        made = self.new_cache()
        fill(self, made, states)
        return made

    @property
    def lower_layers_are_plain(self) -> bool:
        """Whether all layers that a skipped token runs through attend, with nothing folded."""
        lower = self.anatomy.layers[: self.split or 0]
        folded = {fold.index for fold in self.folds}
        return all(n.kind == "full_attention" and n.index not in folded for n in lower)

    @property
    def exits_lag(self) -> bool:
        """Whether folded prompts must run in chunks no longer than the window."""
        return any(p.depth.needs_window and p.depth.code_width for p in self.pipelines)

    def hidden_states(
        self, input_ids: Tensor, *, history: Literal["folded", "exact"] = "folded"
    ) -> Tensor:
        """Final hidden states in which each position sees what a decode step there would see.

        input_ids: (batch, seq), without padding; result: (batch, seq, hidden), after the final
        norm. history="folded" runs one folded prefill. history="exact" first runs the plain model
        and takes the history's records from it, as after an exact prefill, then scores against
        them. Under `prefill: skip` there are none for skipped tokens: raises `AttachError` unless
        prompt_logits is `full`, which runs all layers.
        """
        given = self._records_of_exact_pass(input_ids) if history == "exact" else None
        cache = self.new_cache(given=given)
        with torch.no_grad():
            output = self.decoder(input_ids=input_ids, use_cache=True, kvfold_cache=cache)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _records_of_exact_pass(self, input_ids: Tensor) -> dict[int, Tensor]:
        cache = self.new_cache(given={})
        with torch.no_grad():
            self.decoder(
                input_ids=input_ids, use_cache=True, kvfold_cache=cache, kvfold_record=True
            )
        assert cache.recorded is not None
        return cache.recorded

    def detach(self) -> None:
        """Give the model back as it was. Does nothing if that has happened already."""
        self._patches.undo()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The model as it was, inside the block; attached again after it.

        For measuring the plain model beside the attached one. Caches of this attachment go on
        being good afterwards.
        """
        self.detach()
        try:
            yield
        finally:
            self._patches = Patches(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()
