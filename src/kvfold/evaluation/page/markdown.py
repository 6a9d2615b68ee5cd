"""A run as Markdown for a README: one row a subject, and where the figures come from."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvfold.evaluation.page.runs import Run, names_of
from kvfold.evaluation.page.words import bytes_text, difference_text, interval_text, value_text
from kvfold.evaluation.tasks.registry import shown_name


def render_markdown(runs: Sequence[Run], remarks: Sequence[str] = ()) -> str:
    """All runs, one table each. remarks: of whoever makes it, at the top."""
    named = zip(names_of(runs), runs, strict=True)
    return "\n\n".join([*map(_paragraph, remarks), *(_run(*each) for each in named)]) + "\n"


def _run(name: str, run: Run) -> str:
    sizes = run.sizes()
    headings = ["", *(["stored", "smaller"] if sizes else [])]
    headings += [f"{_escaped(shown_name(t))}: {_escaped(m)}" for t, m in run.headlines()]
    rows = [headings, ["---", *["--:"] * (len(headings) - 1)]]
    for subject in run.subjects:
        row = [_escaped(subject)]
        if sizes:
            stored = sizes[1][subject]
            row += [bytes_text(stored), f"{sizes[1][run.plain] / max(1, stored):.2f}x"]
        for task, metric in run.headlines():
            figure = run.figures(task, metric).get(subject)
            if figure is None:
                row.append("–")
                continue
            parts = [value_text(figure), f"[{interval_text(figure)}]", difference_text(figure)]
            row.append("<br>".join(_escaped(part) for part in parts if part not in ("", "[]")))
        rows.append(row)
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    parts = [f"### {_escaped(name)}", table, _source(run, sizes[0] if sizes else None)]
    if run.notes:
        parts.append("\n".join(f"- {_paragraph(note)}" for note in run.notes))
    return "\n\n".join(parts)


def _source(run: Run, tokens: int | None) -> str:
    """How the figures were made, as a paragraph."""
    counts = ", ".join(
        f"{_escaped(shown_name(task))} {about['items']:,}"
        for task, about in run.metrics["tasks"].items()
    )
    machine, commit = run.about.get("machine", {}), run.about.get("commit")
    where = [
        f"Items: {counts}",
        "in brackets: 95% intervals",
        "differences are from the plain model on the same items",
        *([f"stored: bytes of one row at {tokens:,} tokens in bfloat16"] if tokens else []),
        f"seed {run.metrics['seed']}",
        *([] if commit is None else [f"commit `{_code(commit)}`"]),
        f"{_escaped(str(machine.get('gpu') or machine.get('cpu')))}, {machine.get('cores')} cores",
        f"`{_code(run.about.get('command'))}`",
    ]
    return "; ".join(where) + "."


def _paragraph(text: str) -> str:
    """Text that Markdown leaves as it is where it begins a line: `- ` or `1. ` is no list there."""
    return re.sub(r"^([0-9]*)([-+.)])", r"\1\\\2", _escaped(text))


def _escaped(text: str) -> str:
    """Text that Markdown and HTML leave as it is, within a cell."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|#~])", r"\\\1", flat)


def _code(text: object) -> str:
    """Text for a code span in a line."""
    return " ".join(str(text).split()).replace("`", "'")
