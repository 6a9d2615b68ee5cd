"""Perplexity against bytes for every method of the depth axis, on SmolLM2-135M-Instruct.

Convention: WikiText-2 `test.txt`, the whole file as one string, no special tokens, the first 8
non-overlapping windows of 512 tokens, each window's first token not scored; everything fitted on
the first 58,000 tokens of `valid.txt`. Each distinct method is fitted once (all of them in one
pass) and measured under several windows and anchors.

    python benchmarks/depth_table.py --data DATA      # DATA/wikitext-2/{valid,test}.txt

Leaves `depth.json`, `depth.md` and `depth.png` in `results/depth`. A row that is in `depth.json`
already is not measured again, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfold.anatomy import Anatomy, anatomy
from kvfold.evaluation.candidates import with_plan
from kvfold.evaluation.memory import history_bytes_per_token
from kvfold.evaluation.perplexity import CONVENTION
from kvfold.evaluation.plot import Point, quality_plot
from kvfold.evaluation.recovery import history_recovery, without_history
from kvfold.evaluation.report import write_atomically
from kvfold.evaluation.rows import Rows
from kvfold.evaluation.runner import PLAIN, History, Quality, Scorer
from kvfold.fitting.corpus import load_text, token_windows
from kvfold.fitting.together import fit_together
from kvfold.models import DEFAULT_MODEL, load
from kvfold.plan import Plan
from kvfold.runtime.attach import AddOnLike
from kvfold.runtime.logits import plain_hidden_states

GROUPS = (2, 3, 5, 10, 30)
TIMES_SMALLER = (4, 8, 16)
UPPER_RANKS = (1152, 576, 384, 192)
WIDEST_SHARE = 6
"""Codes of all layers at once start at this many times smaller: a bigger one takes gigabytes."""

TARGETS: Mapping[str, float] = {
    "upper ced A=4 W=128 folded": 28.5,
    "upper ced A=4 W=32 folded": 30.6,
    "upper csa2 joint 5 A=0 W=0 folded": 35.5,
    "upper csa2 joint 5 A=4 W=32 folded": 31.4,
    "upper csa2 joint 5 A=4 W=128 folded": 28.7,
    "upper latent 1152 A=4 W=0 exact": 27.8,
    "upper latent 576 A=4 W=0 exact": 28.5,
    "upper latent 384 A=4 W=32 folded": 28.8,
}


@dataclass(frozen=True)
class Row:
    """One measurement: which fit, under which anchors and window, with which history."""

    fit: str
    anchors: int
    window: int
    history: History

    @property
    def name(self) -> str:
        """What the row is called in every file."""
        fit = self.fit.removesuffix(" (no anchors)")
        return f"{fit} A={self.anchors} W={self.window} {self.history}"


def fits(shape: Anatomy) -> dict[str, Plan]:
    """Every distinct fit by name; one without anchors counts the first tokens in."""
    layers = list(range(shape.num_layers))
    half = shape.num_layers // 2
    upper = layers[half:]
    made: dict[str, list[dict[str, Any]]] = {}
    made["upper dropped"] = [{"method": "drop", "layers": upper}]
    ced: list[dict[str, Any]] = [{"method": "ced", "split": half, "layers": upper}]
    made["upper ced"] = made["upper ced (no anchors)"] = ced
    for size in (5, 3, 2):
        for form in ("joint", "separate"):
            entries: list[dict[str, Any]] = [
                {"method": "csa2", "source": group[0], "readers": group[1:], "form": form}
                for group in chunks(upper, size)
                if len(group) > 1
            ]
            name = f"upper csa2 {form} {size}"
            made[name] = entries
            if size == 5:
                made[f"{name} (no anchors)"] = entries
    for rank in UPPER_RANKS:
        made[f"upper latent {rank}"] = [{"method": "latent", "layers": upper, "rank": rank}]
    for size in (size for size in GROUPS if size <= len(layers)):
        for smaller in TIMES_SMALLER:
            if size == len(layers) and smaller < WIDEST_SHARE:
                continue
            made[f"all latent groups of {size}, {smaller}x"] = [
                {"method": "latent", "layers": group, "rank": rank_of(shape, group, smaller)}
                for group in chunks(layers, size)
            ]
    return {
        name: Plan.from_dict({"depth": depth, "anchors": 0 if "(no anchors)" in name else 4})
        for name, depth in made.items()
    }


def chunks(layers: list[int], size: int) -> list[list[int]]:
    """Consecutive groups of a size; the last may be shorter."""
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def rank_of(shape: Anatomy, group: list[int], times_smaller: int) -> int:
    """The rank that makes a group's history so many times smaller."""
    return 2 * sum(shape.layers[layer].kv_width for layer in group) // times_smaller


def rows(plans: Mapping[str, Plan]) -> Iterator[Row]:
    """Every measurement, in the order of the table."""
    for name in plans:
        if "dropped" in name:
            yield from (Row(name, 4, window, "folded") for window in (32, 128))
        elif "(no anchors)" in name:
            yield Row(name, 0, 0, "folded")
        elif name.startswith("all"):
            yield from (Row(name, 4, window, "folded") for window in (32, 128))
        elif "latent" in name:
            yield from (Row(name, 4, window, "exact") for window in (0, 32))
            yield from (Row(name, 4, window, "folded") for window in (32, 128))
        else:
            windows = (0, 32, 128) if name.endswith(("ced", "5")) else (0,)
            yield from (Row(name, 4, window, "folded") for window in windows)


class Bench:
    """A model, its windows of text, and the rows measured so far."""

    def __init__(self, model: Any, test: torch.Tensor, table: Rows) -> None:
        batches = [part.to(model.device) for part in torch.split(test, 4)]
        hidden = [plain_hidden_states(model, ids).cpu() for ids in batches]
        self.shape = anatomy(model)
        self.scorer = Scorer(model, batches, hidden)
        self.base = self.scorer.score(PLAIN, hidden)
        self.table = table
        self.dropped: dict[str, Quality] = {}
        table.shared["base"] = {
            "perplexity": self.base.perplexity,
            "loss": self.base.loss,
            "bytes_per_token": self.shape.bytes_per_token(),
        }

    def measure(self, row: Row, fitted: AddOnLike) -> dict[str, Any]:
        """One row's figures."""
        addon = with_plan(fitted, anchors=row.anchors, window=row.window)
        quality, _ = self.scorer.measure(row.name, addon, row.history)
        per_token = history_bytes_per_token(addon.plan, self.shape)
        folded = sum(4 * self.shape.layers[layer].kv_width for layer in addon.plan.folded_layers)
        unfolded = self.shape.bytes_per_token() - folded
        return {
            "name": row.name,
            "fit": row.fit,
            "anchors": row.anchors,
            "window": row.window,
            "history": row.history,
            "bytes_per_token": per_token,
            "kept_fraction": per_token / self.shape.bytes_per_token(),
            "kept_fraction_of_folded_layers": (per_token - unfolded) / folded,
            "perplexity": quality.perplexity,
            "loss": quality.loss,
            "kl": quality.kl,
            "top_1_agreement": quality.top_1_agreement,
            "top_5_agreement": quality.top_5_agreement,
            "recovery": history_recovery(self._dropped_loss(addon), quality.loss, self.base.loss),
            "target": TARGETS.get(row.name),
        }

    def _dropped_loss(self, addon: AddOnLike) -> float:
        dropped = without_history(addon, self.shape)
        key = dropped.plan.to_json()
        if key not in self.dropped:
            self.dropped[key], _ = self.scorer.measure("history dropped", dropped, "folded")
        return self.dropped[key].loss


def markdown(table: Rows) -> str:
    """The rows as a Markdown table, the plain model first."""
    base = table.shared["base"]
    lines = [
        "| history | anchors | window | made in | bytes per token | kept | PPL | KL | recovery |",
        "|---|---|---|---|---|---|---|---|---|",
        (
            f"| no compression | - | - | - | {base['bytes_per_token']:,} | 100% | "
            f"{base['perplexity']:.2f} | 0 | - |"
        ),
    ]
    for row in table.rows.values():
        recovery = "-" if row["recovery"] is None else f"{row['recovery']:.3f}"
        target = "" if row["target"] is None else f" (at most {row['target']})"
        lines.append(
            f"| {row['fit'].removesuffix(' (no anchors)')} | {row['anchors']} | {row['window']} | "
            f"{row['history']} prefill | {row['bytes_per_token']:,.0f} | "
            f"{100 * row['kept_fraction']:.1f}% | {row['perplexity']:.2f}{target} | "
            f"{row['kl']:.4f} | {recovery} |"
        )
    settings = table.settings
    convention = CONVENTION.format(windows=settings["windows"], window=settings["window"])
    notes = (
        f"{settings['model']}; WikiText-2 test: {convention}. Fitted on the first "
        f"{settings['fit_tokens']:,} tokens of WikiText-2 valid. `upper`: the upper half of the "
        "layers is folded, the lower half is kept and counted; `all`: every layer. Bytes per "
        "token of history in bfloat16, over all layers."
    )
    return "\n".join([*lines, "", notes, ""])


def plot(table: Rows) -> bytes:
    """Perplexity over bytes per token with a window of 128, folded prefill."""
    chosen = [r for r in table.rows.values() if r["window"] == 128 and r["history"] == "folded"]
    points = [
        Point(label, row["bytes_per_token"] / 1000, row["perplexity"], group)
        for row in chosen
        for label, group in [_label(row["fit"])]
        if group
    ]
    return quality_plot(
        points,
        base_size=table.shared["base"]["bytes_per_token"] / 1000,
        base_perplexity=table.shared["base"]["perplexity"],
        title="SmolLM2-135M-Instruct, WikiText-2: 4 anchors and a window of 128 kept exact",
        size_label="kB a token of history, all layers (bfloat16)",
    )


def _label(fit: str) -> tuple[str, str]:
    """A point's label and its group: the first of a latent series carries the series' name."""
    if fit.startswith("all latent"):
        series, smaller = fit.split(", ")
        group = series.removeprefix("all latent ")
        last = smaller == f"{TIMES_SMALLER[-1]}x"
        return (f"latent, {group}: {smaller}" if last else smaller), group
    if fit.startswith("upper latent"):
        rank = fit.removeprefix("upper latent ")
        return (f"latent, upper half: rank {rank}" if rank == "192" else rank), "upper half"
    short = fit.removeprefix("upper ")
    return (short, short) if short in ("dropped", "ced", "csa2 joint 5") else ("", "")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext-2/ in it")
    parser.add_argument("--out", type=Path, default=Path("results/depth"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=58_000, help="tokens to fit on")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--only", default="", help="measure only rows whose name has this in it")
    return parser.parse_args()


def main() -> None:
    """Fit what is missing, measure it row by row, and write table and plot."""
    chosen = arguments()
    model, tokenizer = load(chosen.model, dtype=torch.float32)
    wikitext = chosen.data / "wikitext-2"
    test, valid = (
        token_windows(
            load_text(wikitext / name, part="all"), tokenizer, window=chosen.window, tokens=count
        )
        for name, count in (
            ("test.txt", chosen.windows * chosen.window),
            ("valid.txt", chosen.tokens),
        )
    )
    settings = {
        "model": chosen.model,
        "windows": test.shape[0],
        "window": test.shape[1],
        "fit_tokens": valid.numel(),
    }
    table = Rows(chosen.out / "depth.json", settings)
    plans = fits(anatomy(model))
    missing = [r for r in rows(plans) if r.name not in table and chosen.only in r.name]
    missing.sort(key=lambda row: row.name not in TARGETS)
    bench = Bench(model, test, table)
    print(f"no compression: {bench.base.perplexity:.2f}; {len(missing)} rows to measure")
    needed = {row.fit: plans[row.fit] for row in missing}
    fitted = fit_together(model, needed, valid) if needed else {}
    for row in missing:
        figures = bench.measure(row, fitted[row.fit])
        table.add(figures, [row.name for row in rows(plans)])
        print(f"{row.name}: {figures['perplexity']:.2f}", flush=True)
    write_atomically(chosen.out / "depth.md", markdown(table).encode())
    write_atomically(chosen.out / "depth.png", plot(table))
    print(json.dumps({"base": bench.base.perplexity, "rows": len(table.rows), **settings}))


if __name__ == "__main__":
    main()
