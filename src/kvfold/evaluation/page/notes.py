"""What a reader must know before two figures of a run are compared, made of the run itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvfold.evaluation.metrics import is_share
from kvfold.evaluation.peers.peer import NOTES
from kvfold.evaluation.tasks.registry import shown_name
from kvfold.evaluation.tasks.ruler import FILE_ITEMS

if TYPE_CHECKING:
    from kvfold.evaluation.page.runs import Run

FLOOR = 0.05
"""A share of right answers so small that a subject has nothing to lose."""


def notes_of(run: Run) -> tuple[str, ...]:
    """All that there is to say, in whole sentences."""
    kinds = (_part, _cut, _template, _floor, _same, _exact, _code, _peers, _cost)
    return tuple(note for told in kinds for note in told(run))


def _part(run: Run) -> Iterator[str]:
    config = run.about.get("config", {})
    fraction, limit = config.get("fraction", 1), config.get("limit")
    if fraction < 1:
        yield (
            f"Only {fraction:.1%} of the items were asked (--fraction), and of each task at least "
            "one: differences that more items would show are within noise here, or of too few "
            "items."
        )
    if limit is not None:
        yield (
            f"No more items were asked than --limit {limit} lets each task have: differences that "
            "more items would show are within noise here, or of too few items."
        )
    for task, about in run.metrics["tasks"].items():
        lines = about.get("settings", {}).get("of_lines", 0)
        if about.get("items", 0) < lines:
            yield (
                f"{shown_name(task)}: {about['items']} of the file's {lines:,} prompts were asked, "
                f"spread evenly; of any file it asks at most {FILE_ITEMS}, whatever --limit says."
            )


def _cut(run: Run) -> Iterator[str]:
    for task, about in run.metrics["tasks"].items():
        tokens = about.get("settings", {}).get("answers_cut_at")
        if tokens is not None:
            yield (
                f"{shown_name(task)}: every subject's answers end after {tokens} tokens at the "
                "latest, by choice of this run; figures made with the harness's own number are not "
                "comparable."
            )


def _template(run: Run) -> Iterator[str]:
    tasks = run.metrics["tasks"].items()
    wrapped = [shown_name(t) for t, a in tasks if a.get("settings", {}).get("chat_template")]
    if wrapped:
        yield (
            f"{', '.join(wrapped)}: prompts are put into the tokenizer's chat template, as lm-eval "
            "does with --apply_chat_template; figures made without it are not comparable."
        )


def _floor(run: Run) -> Iterator[str]:
    """Where the plain model itself is wrong nearly always, so that no loss would show."""
    for task in run.metrics["tasks"]:
        told: list[str] = []
        for metric, figure in run.metrics["results"][run.plain].get(task, {}).items():
            share = figure["kind"] == "accuracy" or is_share(metric)
            inside = any(metric.startswith(f"{other}/") for other in told)
            if share and figure["value"] <= FLOOR and not inside:
                told.append(metric)
        if told:
            figures = run.metrics["results"][run.plain][task]
            named = ", ".join(f"{m} ({100 * figures[m]['value']:.1f}%)" for m in told)
            yield (
                f"{shown_name(task)}: the plain model itself is at the floor in {named}; on these "
                "items there is nothing to lose, so a figure that is no lower says nothing."
            )


def _same(run: Run) -> Iterator[str]:
    """Add-ons that scored as the plain model on every item, maybe since nothing was folded."""
    plans = _plans(run)
    for task in run.metrics["tasks"]:
        same: dict[int, list[str]] = {}
        for name, plan in plans.items():
            differing = [told["differing"] for told in run.differences(name, task)]
            if differing and not any(differing):
                same.setdefault(plan["anchors"] + plan["window"], []).append(name)
        for kept, names in same.items():
            told = f"{shown_name(task)}: every score of {', '.join(names)} is the plain model's."
            lengths = run.lengths.get(task)
            if lengths is None:
                told += (
                    f" Nothing is folded in texts of up to {kept} tokens (anchors and window); how "
                    "long these are is not known here."
                )
            elif max(lengths) <= kept:
                told += (
                    f" Texts of up to {kept} tokens (anchors and window) are not folded at all; "
                    "longer ones tell more."
                )
            yield told


def _exact(run: Run) -> Iterator[str]:
    plans = _plans(run)
    exact = [name for name, plan in plans.items() if plan.get("prefill_attention") == "exact"]
    if exact:
        yield (
            f"{', '.join(exact)}: prompts are read exactly (prefill_attention: exact), so the "
            "first token after a prompt is told by an unfolded cache, and is the plain model's "
            "own. Folding is felt from the second on; answers of one token say nothing of it."
        )


def _plans(run: Run) -> dict[str, Mapping[str, Any]]:
    """The plan of each add-on, by its name."""
    found: dict[str, Mapping[str, Any]] = {}
    for (name, _), described in run.described.items():
        addon = described["configuration"].get("addon")
        if addon is not None:
            found[name] = addon["plan"]
    return found


def _code(run: Run) -> Iterator[str]:
    """Pairs whose answers were made by another commit than the run's, or by other code than most.

    The run's commit is that of its last start, which may have found answers of earlier ones.
    """
    by_code: dict[str, list[str]] = {}
    earlier: dict[str, list[str]] = {}
    ours = run.about.get("commit")
    for (subject, task), described in run.described.items():
        for code in described.get("code", ()):
            words = f"{code['commit'] or 'no commit'}, sources {code['sources'][:12]}"
            here = by_code if ours is None or code["commit"] == ours else earlier
            here.setdefault(words, []).append(f"{shown_name(task)} of {subject}")
    for words, pairs in earlier.items():
        yield (
            f"Answered by commit {words}, and not by {ours}, the run's last start: "
            f"{'all answers' if len(pairs) == len(run.described) else _listed(pairs)}."
        )
    if len(by_code) < 2:
        return
    most = max(by_code, key=lambda words: len(by_code[words]))
    for words, pairs in by_code.items():
        if words != most:
            yield f"Answered by other code ({words}; the others by {most}): {_listed(pairs)}."


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _peers(run: Run) -> Iterator[str]:
    """What can't be compared, where other projects' methods are among the subjects."""
    if not run.metrics.get("peers"):
        return
    yield from NOTES
    unasked: dict[tuple[str, str], list[str]] = {}
    for name, tasks in run.metrics["unanswered"].items():
        for task, reason in tasks.items():
            unasked.setdefault((task, reason), []).append(name)
    for (task, reason), names in unasked.items():
        yield f"{', '.join(names)}: not asked {shown_name(task)}: {reason}."


def _cost(run: Run) -> Iterator[str]:
    if run.other_cost:
        yield (
            "What the subjects cost was measured of another configuration, in the same folder, and "
            "is left out; the same command again measures it anew."
        )
    if not run.cost:
        return
    code, ours = run.cost.get("code"), run.about.get("commit")
    if code is None:
        yield (
            "Bytes and times were measured by a kvfold that kept no commit beside them, and may be "
            "of other code than the answers; the same command again measures them anew."
        )
    elif ours is not None and code["commit"] != ours:
        yield (
            f"Bytes and times were measured by commit {code['commit'] or 'unknown'}, and not by "
            f"{ours}, the run's last start."
        )
