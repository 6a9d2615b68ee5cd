"""The model card of an add-on: a README.md that says what it is, what it costs and how it was made.

All of it comes from the add-on itself and its report. Names and settings may be anybody's, so
text is escaped, and blocks are fenced by more backticks than they hold. A README.md that kvfold
did not write is never touched.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvfold.budget import history_bytes, plain_history_bytes
from kvfold.describe import describe
from kvfold.models import hub_id_of, own_name
from kvfold.store.addon import AddOn

CARD_FILE = "README.md"
PLOT_FILE = "kvfold-quality.png"
MARKER = "<!-- written by kvfold: a new fit replaces this file -->"
SPECIAL = re.compile(r"([\\`*_\[\]#|~$])")
FINGERPRINT_DIGITS = 12

USE = """\
import kvfold

model, tokenizer = kvfold.load({model})
addon = kvfold.AddOn.from_pretrained({folder}, dtype=model.dtype, device=model.device)
prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids.to(model.device)
with kvfold.attach(model, addon):
    output = model.generate(prompt, max_new_tokens=200, do_sample=False)
print(tokenizer.decode(output[0]))
"""


def save_with_card(
    addon: AddOn,
    folder: str | os.PathLike[str],
    *,
    licence: str | None = None,
    plot: bytes | None = None,
) -> bool:
    """Save an add-on, its card and its plot at once; returns whether there is a card now.

    addon: with the report of a recipe's run. licence: of the base model, if known. plot: a PNG
    file's content. There is no card where the folder has a README.md that kvfold did not write;
    the add-on is saved all the same. Raises as `AddOn.save_pretrained`.
    """
    if not _is_own(Path(folder) / CARD_FILE):
        addon.save_pretrained(folder)
        return False
    name = None if plot is None else PLOT_FILE
    files = {CARD_FILE: card(addon, licence=licence, plot_file=name).encode()}
    if plot is not None:
        files[PLOT_FILE] = plot
    addon.save_pretrained(folder, beside=files)
    return True


def _is_own(path: Path) -> bool:
    """Whether a card may be written there."""
    if not path.exists():
        return True
    try:
        return MARKER in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def card(addon: AddOn, *, licence: str | None = None, plot_file: str | None = None) -> str:
    """The card as Markdown. addon: with the report of a recipe's run."""
    report = addon.report
    recipe = report["recipe"]
    base = str(recipe["model"])
    picture = [f"![Quality against bytes]({plot_file})"] if plot_file else []
    used = USE.format(model=json.dumps(own_name(base) or base), folder=json.dumps("."))
    parts = [
        _front_matter(base, licence),
        MARKER,
        f"# {plain(recipe['name'])}",
        _summary(addon, base),
        "## Quality and bytes",
        _quality(addon),
        *picture,
        "## How it was made",
        _stages(report["stages"]),
        _data(report["data"]),
        "The whole recipe, for `kvfold fit --recipe`:",
        fenced(yaml.safe_dump(recipe, sort_keys=False), "yaml"),
        "## Use",
        "In this folder (or with its path, or its hub id, in place of the dot):",
        fenced(used, "python"),
        "## Licence",
        _licence(licence),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(addon: AddOn, base: str) -> str:
    digest = hashlib.sha256(addon.base.to_json().encode()).hexdigest()[:FINGERPRINT_DIGITS]
    what, plan = describe(addon.plan, addon.base.anatomy), addon.plan
    return (
        "An add-on for kvfold, which makes the KV cache of a frozen language model smaller. It "
        "holds no weights of that model and does not change it.\n\n"
        f"- Base model: {plain(base)} (loaded as {plain(addon.base.name)}), fingerprint {digest}\n"
        f"- What it does: {plain(what)}\n"
        f"- Kept exact: the first {plan.anchors:,} and the last {plan.window:,} tokens"
    )


def plain(text: Any) -> str:
    """Text as one line of Markdown that shows it as it is: no markup, HTML or links of its own."""
    line = " ".join(str(text).split())
    shown = "".join(
        character
        if unicodedata.category(character)[0] != "C"
        else character.encode("unicode_escape").decode()
        for character in line
    )
    escaped = SPECIAL.sub(r"\\\1", html.escape(shown, quote=False))
    return escaped.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")


def fenced(text: str, language: str) -> str:
    """A code block that no line of its text can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _front_matter(base: str, licence: str | None) -> str:
    """What the hub reads: the base only where it came from there, not from a folder."""
    data: dict[str, Any] = {"library_name": "kvfold", "tags": ["kvfold", "kv-cache"]}
    hub_id = hub_id_of(base)
    if hub_id is not None:
        data["base_model"] = hub_id
    if licence is not None:
        data["license"] = licence
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---"


def _quality(addon: AddOn) -> str:
    report, shape = addon.report, addon.base.anatomy
    whole = plain_history_bytes(shape)
    figures = report["held_out"]
    rows = [
        ("no compression", figures["base"], whole, None),
        (
            "history dropped",
            figures["dropped"],
            history_bytes(addon.plan.without_history(), shape),
            0.0 if figures["recovery"] is not None else None,
        ),
        (
            "**this add-on**",
            figures["folded"],
            history_bytes(addon.plan, shape),
            figures["recovery"],
        ),
    ]
    data = report["data"]
    note = (
        f"On {data['held_out_tokens']:,} held-out tokens in rows of {data['seq']:,}, which "
        "weights were not fitted to, but by which stages and steps were chosen. KL (nats a "
        "token) and top-1 agreement are against the plain model. "
        "Recovery: the share of what the history is worth, in loss, that is kept. Bytes: of a "
        f"token of history, over all layers that attend, in 16 bits; the add-on itself has "
        f"{addon.parameter_bytes() / 1e6:.1f} MB of weights."
    )
    heads = ("", "PPL", "KL", "top-1", "recovery", "bytes a token", "times smaller")
    return table(heads, (_quality_row(*row, whole=whole) for row in rows)) + "\n\n" + note


def _quality_row(
    name: str,
    quality: Mapping[str, float] | None,
    size: float,
    recovery: float | None,
    *,
    whole: int,
) -> list[str]:
    if quality is None:
        measured = ["-", "-", "-"]
    else:
        measured = [f"{quality['perplexity']:.2f}", f"{quality['kl']:.4f}"]
        measured.append(f"{100 * quality['top_1_agreement']:.1f}%")
    worth = "-" if recovery is None else f"{recovery:.3f}"
    smaller = f"{whole / size:.1f}x" if size else "-"
    return [name, *measured, worth, f"{size:,.0f}", smaller]


def _stages(stages: Iterable[Mapping[str, Any]]) -> str:
    heads = ("stage", "time", "KL before", "KL after", "PPL after", "kept")
    return table(heads, (_stage_row(stage) for stage in stages))


def _stage_row(stage: Mapping[str, Any]) -> list[str]:
    figures = [stage["kl_before"], stage["kl_after"], stage["perplexity_after"]]
    shown = [
        "-" if value is None else f"{value:.{digits}f}"
        for value, digits in zip(figures, (4, 4, 2), strict=True)
    ]
    kept = "yes" if stage["kept"] else f"no: {plain(stage['why'])}"
    return [plain(stage["name"]), f"{stage['seconds']:,.0f} s", *shown, kept]


def _data(data: Mapping[str, Any]) -> str:
    lines = [
        f"- {plain(part['source'])}: weight {part['weight']:g}, {part['tokens']:,} tokens"
        for part in data["parts"]
    ]
    return "\n".join(["Text:", "", *lines])


def _licence(licence: str | None) -> str:
    said = "see the base model" if licence is None else plain(licence)
    return (
        "The add-on is of use only with the base model, to which it was fitted. That "
        f"model's licence: {said}."
    )


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table of cells that are escaped already."""
    lines = [list(heads), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
