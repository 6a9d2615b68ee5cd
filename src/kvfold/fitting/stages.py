"""Running a recipe: texts, then one stage after the other, each kept only if it helped.

Held-out KL is measured before and after every stage through a real attachment. A stage that made
it worse is not kept: the next one goes on from the weights before it. Everything that is needed to
go on after an interruption is in a work folder: the weights after each stage that is over (as
add-ons), what was measured of it, the checkpoint of the one that runs, and text that the model
wrote. A run that went on ends where an unbroken one does.

Of several workers, all run and measure every stage; the first writes the work folder, which all
must see, and the others go by what it says, so that all keep the same stages.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvfold.anatomy import Anatomy, anatomy
from kvfold.errors import CacheError, EvaluationError, FitError
from kvfold.evaluation.recovery import history_recovery
from kvfold.evaluation.report import write_json
from kvfold.evaluation.runner import Quality
from kvfold.fitting.checkpoint import job_digest
from kvfold.fitting.frozen import frozen
from kvfold.fitting.held_out import HeldOut
from kvfold.fitting.json_lines import Log
from kvfold.fitting.mixture import Mixture
from kvfold.fitting.recipe import Recipe, StageEntry
from kvfold.fitting.report import report_fit
from kvfold.fitting.seeds import derived_seed
from kvfold.fitting.training_text import TrainingText, build_mixture
from kvfold.fitting.wide import wide
from kvfold.fitting.work_folder import STATE_FILE, held
from kvfold.fitting.workers import ALONE, Workers
from kvfold.plan import Plan
from kvfold.store.addon import AddOn

SELF_TEXT_FILE = "self-text.safetensors"
START = "start"
RUN = "run"
"""Where the add-on of a finished stage keeps what its report must say of the stage's run."""

REPORT_TOKENS = 8192
"""Held-out tokens that the per-layer figures are measured on, at most."""


def run_recipe(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    work: Path,
    *,
    data: Path | None = None,
    checkpoint_every: int = 16,
    log: Log | None = None,
    progress: bool = True,
    workers: Workers = ALONE,
) -> AddOn:
    """The add-on of a recipe, all its stages run.

    model, tokenizer: the recipe's own, loaded. work: a folder that an interrupted run of the same
    recipe left, to go on from, or one to be made; it is the caller's to delete. data: what
    `${DATA}` stands for. checkpoint_every: steps between a stage's checkpoints. log: called with
    one mapping of plain data for each line of a log; lines since the last checkpoint come again
    after an interruption. workers: those that make this same call; only the first logs. The
    add-on's report says what each stage brought, and holds the recipe.

    Raises `RecipeError` for a missing data folder, `FitError` for the work folder of another run,
    one that another run is using, or a lost worker, and what plans, texts and stages raise.
    """
    shape = anatomy(model)
    plan = check_recipe(recipe, shape, data)
    with held(work, first=workers.first):
        workers.barrier()
        text = recipe_text(
            recipe, model, tokenizer, work, data=data, progress=progress, workers=workers
        )
        told = log if log is not None and workers.first else (lambda _: None)
        runner = _Runner(recipe, model, shape, plan, text, work, told, workers)
        for number, entry in enumerate(recipe.stages):
            if number >= len(runner.done):
                runner.run(number, entry, checkpoint_every=checkpoint_every, progress=progress)
        return runner.result()


def check_recipe(recipe: Recipe, shape: Anatomy, data: Path | None = None) -> Plan:
    """The plan of a recipe for a model; raises, before any work, what `run_recipe` would.

    Texts are looked at only when they are read.
    """
    plan = recipe.plan_for(shape)
    for entry in recipe.stages:
        entry.kind.require(plan, shape, entry.settings)
    recipe.text_in(data)
    return plan


def recipe_text(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    work: Path,
    *,
    data: Path | None = None,
    progress: bool = True,
    workers: Workers = ALONE,
) -> TrainingText:
    """The mixture and held-out rows of a recipe; see `build_mixture`.

    Parts are called as in the recipe, so that rows do not depend on where the data folder is.
    """
    sampling = recipe.self_text
    mixture, held_out = build_mixture(
        recipe.text_in(data),
        model,
        tokenizer,
        window=recipe.seq,
        seed=recipe.seed,
        held_out_tokens=recipe.held_out_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        prompts=sampling.prompts,
        batch=sampling.batch,
        file=work / SELF_TEXT_FILE,
        progress=progress,
        workers=workers,
    )
    named = zip(recipe.text, mixture.parts, strict=True)
    parts = [made._replace(name=part.name) for part, made in named]
    return TrainingText(Mixture(parts, recipe.seed), held_out)


class _Runner:
    """One run: the weights kept so far, and what was measured of them."""

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        shape: Anatomy,
        plan: Plan,
        text: TrainingText,
        work: Path,
        log: Log,
        workers: Workers,
    ) -> None:
        self.recipe, self.model, self.work, self.log = recipe, model, work, log
        self.workers = workers
        self.mixture, self.tokens = text
        self.held_out = HeldOut(model, self.tokens)
        start = _untrained(model, plan, recipe.seed)
        self.digest = job_digest(self.mixture.digest(), tokens=self.tokens)
        self.job = job_digest(
            recipe.to_json(), start.base.to_json(), self.digest, tokens=self.tokens
        )
        self.done: list[dict[str, Any]] = []
        self.kept = START
        saved = self._saved()
        workers.agree("work folder", saved is not None)
        if saved is None:
            self.dropped = self.held_out.dropped(start)
            self.quality = self._measure(START, start)[0]
            self._save_addon(START, start)
            self._save()
            self.log({"event": "begin", "recipe": recipe.name, **self._figures()})
        else:
            self._go_by(saved)
            self.log({"event": "go on", "recipe": recipe.name, "stages_done": len(self.done)})

    def run(self, number: int, entry: StageEntry, *, checkpoint_every: int, progress: bool) -> None:
        """One stage: run it, unless an earlier run has, measure it, and keep it if it helped."""
        name = f"{number + 1}-{entry.name}"
        checkpoint = self.work / f"{name}.checkpoint"
        has_run = (self.work / name).exists()
        self.workers.agree("work folder", has_run, number)
        if not has_run:
            tried = self._load(self.kept)
            started = time.perf_counter()
            report = entry.kind.run(
                self.model,
                tried,
                self.mixture,
                self.tokens,
                entry.settings,
                checkpoint=checkpoint,
                checkpoint_every=checkpoint_every,
                log=lambda line: self.log({"stage": entry.name, "number": number + 1, **line}),
                progress=progress,
                workers=self.workers,
            )
            seconds = round(time.perf_counter() - started, 3)
            tried.report = {RUN: {"seconds": seconds, "report": report}}
            self._save_addon(name, tried)
        if self.workers.first:
            checkpoint.unlink(missing_ok=True)
        self._judge(name, entry, self._load(name))

    def _judge(self, name: str, entry: StageEntry, tried: AddOn) -> None:
        before = self.quality
        after, problem = self._measure(name, tried)
        kept = after is not None and (before is None or after.kl < before.kl)
        same = after is not None and before is not None and after.kl == before.kl
        reason = "it brought nothing" if same else "held-out KL got worse"
        run = tried.report[RUN]
        made = {
            "name": entry.name,
            "settings": {k: v for k, v in entry.to_dict().items() if k != "stage"},
            "seconds": run["seconds"],
            "kl_before": None if before is None else before.kl,
            "kl_after": None if after is None else after.kl,
            "perplexity_after": None if after is None else after.perplexity,
            "kept": kept,
            "why": None if kept else problem or reason,
            "report": run["report"],
        }
        self.done.append(made)
        if kept:
            self.kept, self.quality = name, after
        self._save()
        self.log({"event": "end", **{k: v for k, v in made.items() if k != "report"}})

    def result(self) -> AddOn:
        """The add-on as kept, with its report."""
        addon = self._load(self.kept)
        rows = max(1, REPORT_TOKENS // self.tokens.shape[1])
        with wide(addon, self.model), frozen(self.model):
            layers = report_fit(self.model, addon.plan, addon.pipelines, self.tokens[:rows])
        parts = zip(self.recipe.text, self.mixture.parts, strict=True)
        addon.report = {
            **layers,
            "stages": self.done,
            "held_out": self._figures(),
            "data": {
                "parts": [
                    {"source": part.name, "weight": part.weight, "tokens": made.windows.numel()}
                    for part, made in parts
                ],
                "seq": self.recipe.seq,
                "held_out_tokens": self.tokens.numel(),
                "digest": self.digest,
            },
            "recipe": self.recipe.to_dict(),
        }
        return addon

    def _figures(self) -> dict[str, Any]:
        """Qualities of the plain model, without the history, and of the weights kept."""
        return {
            "base": asdict(self.held_out.base),
            "dropped": asdict(self.dropped),
            "folded": None if self.quality is None else asdict(self.quality),
            "recovery": None if self.quality is None else self._recovery(self.quality),
        }

    def _recovery(self, folded: Quality) -> float | None:
        return history_recovery(self.dropped.loss, folded.loss, self.held_out.base.loss)

    def _measure(self, name: str, addon: AddOn) -> tuple[Quality | None, str | None]:
        """Quality, or why there is none."""
        try:
            return self.held_out.measure(name, addon), None
        except (CacheError, EvaluationError) as error:
            return None, str(error)

    def _load(self, name: str) -> AddOn:
        return AddOn.from_pretrained(
            self.work / name, dtype=self.model.dtype, device=self.model.device
        )

    def _save_addon(self, name: str, addon: AddOn) -> None:
        """Write the first worker's add-on, and wait until it is there."""
        if self.workers.first:
            addon.save_pretrained(self.work / name)
        self.workers.barrier()

    def _go_by(self, saved: dict[str, Any]) -> None:
        self.done, self.kept = saved["done"], saved["kept"]
        self.dropped = Quality(**saved["dropped"])
        self.quality = None if saved["quality"] is None else Quality(**saved["quality"])

    def _saved(self) -> dict[str, Any] | None:
        """What an earlier run of the same recipe left."""
        path = self.work / STATE_FILE
        if not path.exists():
            return None
        remedy = f"name another folder, or delete {self.work} to start anew"
        try:
            saved = json.loads(path.read_bytes())
            job = saved["job"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise FitError(
                f"{path} must be what kvfold wrote of a run; it can't be read "
                f"({type(error).__name__}); {remedy}"
            ) from error
        if job != self.job:
            raise FitError(
                f"the work folder {self.work} must be of this run; it was made with another "
                f"recipe, model or text; {remedy}"
            )
        state: dict[str, Any] = saved
        return state

    def _save(self) -> None:
        """Write where the first worker is; the others then go by that."""
        if self.workers.first:
            write_json(
                self.work / STATE_FILE,
                {
                    "job": self.job,
                    "done": self.done,
                    "kept": self.kept,
                    "dropped": asdict(self.dropped),
                    "quality": None if self.quality is None else asdict(self.quality),
                },
            )
        self.workers.barrier()
        if not self.workers.first:
            saved = self._saved()
            assert saved is not None
            self._go_by(saved)


def _untrained(model: Any, plan: Plan, seed: int) -> AddOn:
    """The plan's methods before any stage; what starts at random does so by the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "weights"))
        return AddOn.untrained(model, plan)
