"""What distilling wins back: the shipped add-ons, and the preset 8x, on text held back.

Perplexity on WikiText-2's test text, which nothing was fitted to: `smollm2-csa2` and `smollm2-ced`
in windows of 512 without anchors and window, and with both; `smollm2-csa2-w128` and
`smollm2-ced-w128`, trained with both, likewise; `smollm2-pool` in windows of 1,024;
`8x`, fitted here in closed form, in windows of 2,048, with LAMBADA's last words and needles in
2,048 tokens of a book beside it. Closed-form figures of the same rows are those of
`results/depth`. `tiny-hybrid-card` on documents of the tiny hybrid's own language, with recall of
facts from prompts of 512 and 1,024 words; its closed form is that of `results/prefill`.

    python benchmarks/distil_table.py --data DATA --addons FOLDER

Add-ons that do not come with kvfold are looked for in FOLDER, each in a folder of its recipe's name
(`training/recipes`); rows of those that are not there are left out, which is said.
Leaves `distil.json` and `distil.md` in `results/distil`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from card_table import LENGTH, TEST_DOCUMENTS, documents
from kvfold import models
from kvfold.anatomy import anatomy
from kvfold.evaluation.candidates import with_plan
from kvfold.evaluation.lambada import lambada, read_passages
from kvfold.evaluation.lambada import share as lambada_share
from kvfold.evaluation.report import write_atomically
from kvfold.evaluation.rows import Rows
from kvfold.evaluation.runner import Quality, evaluate
from kvfold.evaluation.share import Share
from kvfold.evaluation.tasks.needle import find_needles, needles
from kvfold.evaluation.tasks.recall import recall
from kvfold.evaluation.tiny_language import RECALL_KINDS, recall_prompt
from kvfold.fitting.corpus import load_text, token_windows
from kvfold.fitting.together import fit_together
from kvfold.models import DEFAULT_MODEL, load
from kvfold.presets import preset
from kvfold.runtime.attach import AddOnLike, attach
from kvfold.store.addon import AddOn
from kvfold.store.shipped import shipped

TOKENS = 8192
"""Of test text for rows of 1,024 and more; the rows of 512 have as many as `results/depth`."""
FIT_TOKENS = 57_344
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
EIGHT = "8x"
HYBRID = "tiny-hybrid-card"
HYBRID_CLOSED = "CED + CSA2, kvfold"
RECALL_LENGTHS = (512, 1024)


@dataclass(frozen=True)
class Row:
    """One measurement: an add-on, under which anchors and window, in windows of how many tokens.

    closed_form: the name of the same row in `results/depth` or `results/prefill`.
    """

    addon: str
    anchors: int
    window: int
    seq: int
    closed_form: str = ""

    @property
    def name(self) -> str:
        """What the row is called."""
        return f"{self.addon}, A={self.anchors}, W={self.window}, {self.seq:,} tokens"


ROWS = (
    Row("smollm2-csa2", 0, 0, 512, "upper csa2 joint 5 A=0 W=0 folded"),
    Row("smollm2-csa2", 4, 128, 512, "upper csa2 joint 5 A=4 W=128 folded"),
    Row("smollm2-csa2-w128", 4, 128, 512, "upper csa2 joint 5 A=4 W=128 folded"),
    Row("smollm2-ced", 0, 0, 512, "upper ced A=0 W=0 folded"),
    Row("smollm2-ced", 4, 128, 512, "upper ced A=4 W=128 folded"),
    Row("smollm2-ced-w128", 4, 128, 512, "upper ced A=4 W=128 folded"),
    Row("smollm2-pool", 4, 32, 1024),
    Row("smollm2-pool", 4, 128, 1024),
    Row(EIGHT, 4, 128, 2048),
    Row(HYBRID, 4, 128, LENGTH, HYBRID_CLOSED),
)


def is_at_hand(name: str, folder: Path | None) -> bool:
    """Whether an add-on is made here, comes with kvfold, or is in a folder under its name."""
    own = folder is not None and (folder / name / "addon.json").is_file()
    return name == EIGHT or name in shipped() or own


def addon_of(name: str, chosen: argparse.Namespace) -> AddOn:
    """A shipped add-on, or the folder of that name under --addons."""
    own = None if chosen.addons is None else chosen.addons / name
    found = AddOn.from_pretrained(own if own is not None and own.exists() else name)
    return found.to(dtype=torch.float32)


def compared(row: Row, plain: Quality, folded: Quality, before: float | None) -> dict[str, Any]:
    """A row's figures. before: perplexity of the closed form."""
    figures: dict[str, Any] = {
        "name": row.name,
        "plain": plain.perplexity,
        "perplexity": folded.perplexity,
        "rise": folded.perplexity / plain.perplexity - 1,
        "kl": folded.kl,
        "top_1_agreement": folded.top_1_agreement,
        "recovery": folded.recovery,
        "closed_form": before,
    }
    if before is not None:
        gaps = [math.log(p / plain.perplexity) for p in (folded.perplexity, before)]
        figures["gap_closed"] = 1 - gaps[0] / gaps[1]
    return figures


def closed_forms(path: Path) -> dict[str, float]:
    """Perplexity of every row of a published table, by name."""
    if not path.exists():
        return {}
    return {row["name"]: row["perplexity"] for row in json.loads(path.read_text())["rows"]}


class TextBench:
    """SmolLM2, its texts, and add-ons as they are needed."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.model, self.tokenizer = load(DEFAULT_MODEL, dtype=torch.float32)
        wikitext = chosen.data / "wikitext-2"
        self.test = load_text(wikitext / "test.txt", part="all")
        self.valid = load_text(wikitext / "valid.txt", part="all")
        self.closed = closed_forms(chosen.depth)

    def addon(self, name: str) -> AddOnLike:
        """A shipped add-on (or the folder of that name under --addons), or 8x, fitted now."""
        if name == EIGHT:
            plan = preset(EIGHT, anatomy(self.model))
            tokens = token_windows(self.valid, self.tokenizer, window=1024, tokens=FIT_TOKENS)
            return fit_together(self.model, {EIGHT: plan}, tokens)[EIGHT]
        return addon_of(name, self.chosen)

    def measure(self, row: Row) -> dict[str, Any]:
        """One row's figures, the plain model's beside them."""
        addon = with_plan(self.addon(row.addon), anchors=row.anchors, window=row.window)
        count = 4096 if row.seq == 512 else TOKENS
        tokens = token_windows(self.test, self.tokenizer, window=row.seq, tokens=count)
        found = evaluate(self.model, {row.addon: addon}, tokens, speed=False, batch=2)
        plain, folded = (result.quality for result in found.results)
        figures = compared(row, plain, folded, self.closed.get(row.closed_form))
        return {**figures, **(self.tasks(addon, row.seq) if row.addon == EIGHT else {})}

    def tasks(self, addon: AddOnLike, length: int) -> dict[str, Any]:
        """Last words and needles, of the plain model and of the folded one."""
        path = self.chosen.data / "lambada" / "lambada_test.jsonl"
        passages = read_passages(path, self.chosen.passages)
        book = load_text(self.chosen.data / "gutenberg" / "3300-0.txt", part="all")
        prompts = needles(
            book[:400_000], self.tokenizer, length=length, depths=DEPTHS, each=self.chosen.needles
        )

        def both() -> dict[str, Any]:
            words = lambada_share(lambada(self.model, passages, self.tokenizer))
            found = find_needles(self.model, prompts, self.tokenizer)
            return {
                "lambada": words.to_dict(),
                "needles": Share(sum(found), len(found)).to_dict(),
            }

        plain = both()
        with attach(self.model, addon):
            folded = both()
        return {"tasks": folded, "plain_tasks": plain}


class HybridBench:
    """The tiny hybrid, its documents and questions."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.model, self.tokenizer = models.tiny_hybrid()
        self.texts = documents("card test", TEST_DOCUMENTS, self.tokenizer)
        self.closed = closed_forms(chosen.card)

    def measure(self, row: Row) -> dict[str, Any]:
        """One row's figures, the plain model's beside them."""
        addon = with_plan(addon_of(row.addon, self.chosen), anchors=row.anchors, window=row.window)
        found = evaluate(self.model, {row.addon: addon}, self.texts, speed=False, batch=1)
        plain, folded = (result.quality for result in found.results)
        asked = self.recalled()
        with attach(self.model, addon):
            tasks = self.recalled()
        figures = compared(row, plain, folded, self.closed.get(row.closed_form))
        return {**figures, "tasks": tasks, "plain_tasks": asked}

    def recalled(self) -> dict[str, Any]:
        """The share of facts recalled at each length."""
        shares = {}
        for length in RECALL_LENGTHS:
            prompts = [
                recall_prompt(f"card {number}", kind, length)
                for kind in RECALL_KINDS
                for number in range(self.chosen.recall_prompts)
            ]
            share = recall(self.model, prompts, self.tokenizer).share()
            shares[f"recall at {length:,}"] = share.to_dict()
        return shares


def markdown(data: Mapping[str, Any]) -> str:
    """One line a row, and the tasks below."""
    lines = [
        "## What distilling wins back",
        "",
        "| add-on | plain | closed form | folded | rise | log gap closed | KL | top-1 | recovery |",
        "|" + "---|" * 9,
    ]
    for row in data["rows"]:
        closed, gap = row["closed_form"], row.get("gap_closed")
        lines.append(
            f"| {row['name']} | {row['plain']:.2f} | {'' if closed is None else f'{closed:.2f}'} "
            f"| {row['perplexity']:.2f} | {100 * row['rise']:+.2f}% "
            f"| {'' if gap is None else f'{100 * gap:.0f}%'} | {row['kl']:.4f} "
            f"| {100 * row['top_1_agreement']:.1f}% | {row['recovery']:.3f} |"
        )
    for row in data["rows"]:
        if "tasks" in row:
            lines += ["", f"Tasks under {row['name']}, shares with 95% intervals:", ""]
            lines += ["| | plain | folded |", "|---|---|---|"]
            for task in row["tasks"]:
                cells = [_share(row[side][task]) for side in ("plain_tasks", "tasks")]
                lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _share(found: Mapping[str, Any]) -> str:
    low, high = found["interval"]
    return f"{found['right']} of {found['count']} ({100 * low:.0f} to {100 * high:.0f}%)"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext-2/ in it")
    parser.add_argument("--out", type=Path, default=Path("results/distil"))
    parser.add_argument("--addons", type=Path, help="folder of add-ons, before the shipped ones")
    parser.add_argument("--depth", type=Path, default=Path("results/depth/depth.json"))
    parser.add_argument("--card", type=Path, default=Path("results/prefill/card.json"))
    parser.add_argument("--passages", type=int, default=100, help="of LAMBADA")
    parser.add_argument("--needles", type=int, default=6, help="at each of five depths")
    parser.add_argument("--recall-prompts", type=int, default=50, help="of each kind and length")
    parser.add_argument("--only", default="", help="measure only rows whose name has this in it")
    return parser.parse_args()


def main() -> None:
    """Measure what is missing, and write the table."""
    chosen = arguments()
    settings = {
        "model": DEFAULT_MODEL,
        "tokens": TOKENS,
        "passages": chosen.passages,
        "needles": chosen.needles * len(DEPTHS),
        "recall_prompts": chosen.recall_prompts,
    }
    table = Rows(chosen.out / "distil.json", settings)
    missing = [row for row in ROWS if row.name not in table and chosen.only in row.name]
    for row in missing:
        if not is_at_hand(row.addon, chosen.addons):
            print(f"left out: {row.name}; there is no {row.addon} under --addons", flush=True)
    missing = [row for row in missing if is_at_hand(row.addon, chosen.addons)]
    benches: dict[bool, TextBench | HybridBench] = {}
    for row in missing:
        hybrid = row.addon == HYBRID
        if hybrid not in benches:
            benches[hybrid] = (HybridBench if hybrid else TextBench)(chosen)
        table.add(benches[hybrid].measure(row), [row.name for row in ROWS])
        print(json.dumps(table.rows[row.name]), flush=True)
    text = markdown(json.loads((chosen.out / "distil.json").read_text()))
    write_atomically(chosen.out / "distil.md", text.encode())


if __name__ == "__main__":
    main()
