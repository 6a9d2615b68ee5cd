"""Running a recipe: texts, then one stage after the other, each kept only if it helped.

Held-out KL is measured before and after every stage through a real attachment. A stage that made
it worse, or whose loss was no number any more, is not kept: the next one goes on from the weights
before it. Everything that is needed to
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

from kvfold.anatomy import anatomy
from kvfold.errors import CacheError, DivergedError, EvaluationError, FitError
from kvfold.evaluation.recovery import history_recovery
from kvfold.evaluation.report import write_json
from kvfold.evaluation.runner import Quality
from kvfold.fitting.checkpoint import job_digest, seconds_in
from kvfold.fitting.frozen import frozen
from kvfold.fitting.held_out import HeldOut
from kvfold.fitting.inputs import check_mode, check_text
from kvfold.fitting.json_lines import Log
from kvfold.fitting.mixture import Mixture
from kvfold.fitting.recipe import Recipe, StageEntry
from kvfold.fitting.recipe_checks import check_recipe
from kvfold.fitting.report import report_fit
from kvfold.fitting.run_state import START, RunState, shared_by_stages, stage_keys
from kvfold.fitting.training_text import TrainingText, build_mixture
from kvfold.fitting.wide import wide
from kvfold.fitting.work_folder import STATE_FILE, held
from kvfold.fitting.workers import ALONE, Workers
from kvfold.plan import Plan
from kvfold.store.addon import AddOn

SELF_TEXT_FILE = "self-text.safetensors"
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

    model, tokenizer: the recipe's own, loaded. work: a folder that an interrupted run of the
    recipe left, to go on from, or one to be made; it is the caller's to delete. Of a recipe whose
    stages were changed since, those before the first change are kept. data: what
    `${DATA}` stands for. checkpoint_every: steps between a stage's checkpoints. log: called with
    one mapping of plain data for each line of a log; lines since the last checkpoint come again
    after an interruption. workers: those that make this same call; only the first logs. The
    add-on's report says what each stage brought, and holds the recipe.

    Raises `RecipeError` for a missing data folder, `FitError` for the work folder of another run,
    one that another run is using, a lost worker, or stages none of which left anything that can be
    measured, and what plans, texts and stages raise.
    """
    check_mode()
    plan = check_recipe(recipe, anatomy(model), data)
    with held(work, first=workers.first):
        workers.barrier()
        text = recipe_text(
            recipe, model, tokenizer, work, data=data, progress=progress, workers=workers
        )
        told = log if log is not None and workers.first else (lambda _: None)
        runner = _Runner(recipe, model, plan, text, work, told, workers)
        for number in range(len(runner.state.done), len(recipe.stages)):
            runner.run(number, checkpoint_every=checkpoint_every, progress=progress)
        return runner.result()


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
        plan: Plan,
        text: TrainingText,
        work: Path,
        log: Log,
        workers: Workers,
    ) -> None:
        self.recipe, self.model, self.work, self.log = recipe, model, work, log
        self.workers = workers
        self.mixture, self.tokens = text
        check_text(model, self.mixture, self.tokens)
        self.keys = stage_keys(recipe)
        self.held_out = HeldOut(model, self.tokens)
        start = AddOn.untrained(model, plan)
        self.digest = job_digest(self.mixture.digest(), tokens=self.tokens)
        self.job = job_digest(
            json.dumps(shared_by_stages(recipe), sort_keys=True),
            start.base.to_json(),
            self.digest,
            tokens=self.tokens,
        )
        self.state = self._begin(start)

    def _begin(self, start: AddOn) -> RunState:
        """What an earlier run left, or the measures of the start."""
        state = self._saved()
        self.workers.agree("work folder", state is not None)
        if state is None:
            dropped = self.held_out.dropped(start)
            quality = self._measure(START, start)[0]
            self.state = RunState(self.recipe.to_dict(), dropped, quality)
            self._save_addon(START, start)
            self._save()
            self.log({"event": "begin", "recipe": self.recipe.name, **self._figures()})
            return self.state
        changed = state.go_on_with(self.recipe)
        self.state = state
        if changed:
            self._save()
        done = len(state.done)
        told: dict[str, Any] = {"recipe": self.recipe.name, "stages_done": done}
        told["stages"] = [entry.name for entry in self.recipe.stages]
        self.log({"event": "go on", **told, "changed": changed})
        return self.state

    def run(self, number: int, *, checkpoint_every: int, progress: bool) -> None:
        """One stage: run it, unless an earlier run has, measure it, and keep it if it helped."""
        entry, key = self.recipe.stages[number], self.keys[number]
        checkpoint = self.work / f"{key}.checkpoint"
        has_run = (self.work / key).exists()
        self.workers.agree("work folder", has_run, number)
        if not has_run:
            tried, problem = self._load(self.state.kept), None
            earlier, started = seconds_in(checkpoint), time.perf_counter()
            try:
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
            except DivergedError as error:  # of all workers at once: they share the loss
                tried, report, problem = self._load(self.state.kept), {}, str(error)
            seconds = round(earlier + time.perf_counter() - started, 3)
            tried.report = {RUN: {"seconds": seconds, "report": report, "problem": problem}}
            self._save_addon(key, tried)
        if self.workers.first:
            checkpoint.unlink(missing_ok=True)
        self._judge(key, entry, self._load(key))

    def _judge(self, key: str, entry: StageEntry, tried: AddOn) -> None:
        before, run = self.state.quality, tried.report[RUN]
        after, problem = None, run["problem"]
        if problem is None:
            after, problem = self._measure(key, tried)
        kept = after is not None and (before is None or after.kl < before.kl)
        same = after is not None and before is not None and after.kl == before.kl
        reason = "it brought nothing" if same else "held-out KL got worse"
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
        self.state.add(key, made, after)
        self._save()
        self.log({"event": "end", **{k: v for k, v in made.items() if k != "report"}})

    def result(self) -> AddOn:
        """The add-on as kept, with its report."""
        state = self.state
        if state.quality is None:
            told = "; ".join(f"{made['name']}: {made['why']}" for made in state.done)
            raise FitError(
                "an add-on must have predictions that can be measured, and no stage left such "
                f"weights ({told}); change the stages and go on with --resume"
            )
        addon = self._load(state.kept)
        rows = max(1, REPORT_TOKENS // self.tokens.shape[1])
        with wide(addon, self.model), frozen(self.model):
            layers = report_fit(self.model, addon.plan, addon.pipelines, self.tokens[:rows])
        parts = zip(self.recipe.text, self.mixture.parts, strict=True)
        addon.report = {
            **layers,
            "stages": state.done,
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
        quality, dropped, base = self.state.quality, self.state.dropped, self.held_out.base
        recovery = None
        if quality is not None:
            recovery = history_recovery(dropped.loss, quality.loss, base.loss)
        return {
            "base": asdict(base),
            "dropped": asdict(dropped),
            "folded": None if quality is None else asdict(quality),
            "recovery": recovery,
        }

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

    def _saved(self) -> RunState | None:
        return RunState.read(self.work, self.job, self.recipe)

    def _save(self) -> None:
        """Write where the first worker is; the others then go by that."""
        if self.workers.first:
            write_json(self.work / STATE_FILE, self.state.to_dict(self.job))
        self.workers.barrier()
        if not self.workers.first:
            saved = self._saved()
            assert saved is not None
            self.state = saved
