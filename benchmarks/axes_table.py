"""What each axis of folding costs and saves, alone and composed, on SmolLM2-135M-Instruct.

Four tables from one run. `axes`: none, depth, sequence, bits, each pair and all three. `pooling`:
what gate form, overlap, logit bias, position and group size bring, over all layers. `card`: the
second model card's rule, every fourth layer. `bits`: quantisation alone, on 4,096-token windows.

Convention: WikiText-2 `test.txt`, the whole file as one string, no special tokens, the first
non-overlapping windows, each window's first token not scored, folded prefill; everything fitted on
`valid.txt`.

    python benchmarks/axes_table.py --data DATA      # DATA/wikitext-2/{valid,test}.txt

Leaves `axes.json`, `axes.md` and `axes.png` in `results/axes`. A row that is in `axes.json` already
is not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from kvfold.anatomy import Anatomy, anatomy
from kvfold.evaluation.candidates import with_plan
from kvfold.evaluation.memory import memory_at
from kvfold.evaluation.perplexity import CONVENTION
from kvfold.evaluation.plot import Point, quality_plot
from kvfold.evaluation.recovery import history_recovery, without_history
from kvfold.evaluation.report import write_atomically
from kvfold.evaluation.rows import Rows
from kvfold.evaluation.runner import PLAIN, Quality, Scorer
from kvfold.evaluation.speed import SpeedSettings, measure_speed
from kvfold.fitting.corpus import load_text, token_windows
from kvfold.fitting.gates import GateSettings
from kvfold.fitting.together import fit_together
from kvfold.models import DEFAULT_MODEL, load
from kvfold.plan import Plan
from kvfold.presets import preset
from kvfold.runtime.attach import AddOnLike
from kvfold.runtime.logits import plain_hidden_states
from kvfold.store.addon import AddOn

LENGTHS = (1024, 4096, 16384)
SPEED_HISTORY = 4096
PRESETS = ("4x", "8x", "16x")
GATES: Mapping[str, dict[str, Any]] = {
    "mean": {"gate": "mean", "mass_bias": False},
    "token": {"gate": "token", "mass_bias": False},
    "head": {"gate": "head", "mass_bias": False},
    "channel": {"gate": "channel", "mass_bias": False},
    "channel, bias": {"gate": "channel"},
    "channel, bias, overlap": {"gate": "channel", "overlap": True},
    "channel, bias, first": {"gate": "channel", "position": "first"},
    "channel, bias, last": {"gate": "channel", "position": "last"},
    "channel, bias, 2 to 1": {"gate": "channel", "group": 2},
    "channel, bias, 8 to 1": {"gate": "channel", "group": 8},
}
BEST_GATE = "channel, bias"
CARD_GATES = ("mean", BEST_GATE)
AXES = ("depth", "sequence", "bits")
TIMED = (*AXES, *(f"{a} + {b}" for a, b in combinations(AXES, 2)), " + ".join(AXES))
BITS = ("k8v8", "k8v4", "k4v4", "k4v2")


@dataclass(frozen=True)
class Row:
    """One measurement: a table, which fit, under which window, on windows of how many tokens."""

    table: str
    fit: str
    window: int
    seq: int = 1024

    @property
    def name(self) -> str:
        """What the row is called in the file."""
        return f"{self.table}: {self.fit} W={self.window}"


def fits(shape: Anatomy) -> dict[str, Plan]:
    """Every distinct fit by name."""
    layers = list(shape.foldable_layers)
    card = [layer for layer in layers if layer % 4 == 3]
    depth = preset("balanced", shape).to_dict()["depth"]
    pool = [{"method": "pool", "layers": layers, **GATES[BEST_GATE]}]
    bits = [{"method": "turboquant", "layers": layers}]
    made: dict[str, dict[str, Any]] = {
        "depth": {"depth": depth},
        "sequence": {"sequence": pool},
        "bits": {"bits": bits},
        "depth + sequence": {"depth": depth, "sequence": pool},
        "depth + bits": {"depth": depth, "bits": bits},
        "sequence + bits": {"sequence": pool, "bits": bits},
        "depth + sequence + bits": {"depth": depth, "sequence": pool, "bits": bits},
    }
    for name, keys in GATES.items():
        made[f"pool {name}"] = {"sequence": [{"method": "pool", "layers": layers, **keys}]}
        if name in CARD_GATES:
            made[f"card {name}"] = {"sequence": [{"method": "pool", "layers": card, **keys}]}
    plans = {name: Plan.from_dict(keys) for name, keys in made.items()}
    plans |= {f"preset {name}": preset(name, shape) for name in (*PRESETS, *BITS)}
    plans["preset qwen-compress"] = preset("qwen-compress", shape)
    return plans


def rows(plans: Mapping[str, Plan]) -> Iterator[Row]:
    """Every measurement, in the order of the tables."""
    for name in plans:
        kind, _, rest = name.partition(" ")
        if kind == "pool":
            yield from (Row("pooling", rest, window) for window in (32, 128))
        elif kind == "card" or rest == "qwen-compress":
            yield from (Row("card", rest, window) for window in (32, 128))
        elif rest in BITS:
            yield Row("bits", rest, 128, seq=4096)
        else:
            yield Row("axes", name, 128)


def plan_name(row: Row) -> str:
    """The name in `fits` of a row's plan."""
    prefix = {"pooling": "pool ", "card": "card ", "bits": "preset "}.get(row.table, "")
    return "preset qwen-compress" if row.fit == "qwen-compress" else prefix + row.fit


class Bench:
    """A model, its windows of text, and the rows measured so far."""

    def __init__(self, model: Any, text: Mapping[int, torch.Tensor]) -> None:
        self.model = model
        self.shape = anatomy(model)
        self.scorers: dict[int, Scorer] = {}
        self.base: dict[int, Quality] = {}
        self.dropped: dict[tuple[int, str], Quality] = {}
        for seq, windows in text.items():
            batches = [part.to(model.device) for part in torch.split(windows, 2)]
            hidden = [plain_hidden_states(model, ids).cpu() for ids in batches]
            self.scorers[seq] = Scorer(model, batches, hidden)
            self.base[seq] = self.scorers[seq].score(PLAIN, hidden)

    def measure(self, row: Row, fitted: AddOnLike) -> dict[str, Any]:
        """One row's figures."""
        addon = with_plan(fitted, window=row.window)
        quality, resident = self.scorers[row.seq].measure(row.name, addon, "folded")
        base, dropped = self.base[row.seq], self._dropped(row, addon)
        memory = memory_at(addon.plan, self.shape, LENGTHS)
        return {
            "name": row.name,
            "table": row.table,
            "fit": row.fit,
            "window": row.window,
            "tokens_in_a_row": row.seq,
            "perplexity": quality.perplexity,
            "perplexity_rise": quality.perplexity / base.perplexity - 1,
            "loss": quality.loss,
            "kl": quality.kl,
            "top_1_agreement": quality.top_1_agreement,
            "top_5_agreement": quality.top_5_agreement,
            "recovery": history_recovery(dropped.loss, quality.loss, base.loss),
            "dropped_perplexity": dropped.perplexity,
            "resident": resident,
            "stored_bytes": {str(m.tokens): m.stored_bytes for m in memory},
            "times_smaller": {str(m.tokens): m.times_smaller for m in memory},
            "resident_times_smaller": {str(m.tokens): m.resident_times_smaller for m in memory},
        }

    def _dropped(self, row: Row, addon: AddOnLike) -> Quality:
        dropped = without_history(addon, self.shape)
        key = (row.seq, dropped.plan.to_json())
        if key not in self.dropped:
            measured, _ = self.scorers[row.seq].measure("history dropped", dropped, "folded")
            self.dropped[key] = measured
        return self.dropped[key]

    def time(self, plans: Mapping[str, Plan], ids: torch.Tensor, repeats: int) -> dict[str, Any]:
        """Tokens a second of the plain model and of each plan, interleaved.

        Weights do not matter to the time that a step takes, so they are left untrained.
        """
        addons = {name: AddOn.untrained(self.model, plan) for name, plan in plans.items()}
        settings = SpeedSettings(history=SPEED_HISTORY, decode_tokens=24, repeats=repeats)
        speeds = measure_speed(self.model, {PLAIN: None, **addons}, ids, settings)
        plain = speeds[PLAIN]
        return {
            name: {
                **vars(speed),
                "prefill_of_plain": speed.prefill_tokens_per_second
                / plain.prefill_tokens_per_second,
                "decode_of_plain": speed.decode_tokens_per_second / plain.decode_tokens_per_second,
            }
            for name, speed in speeds.items()
        }


def markdown(table: Rows) -> str:
    """All tables as Markdown, the plain model first in each."""
    by_table: dict[str, list[dict[str, Any]]] = {}
    for row in table.rows.values():
        by_table.setdefault(row["table"], []).append(row)
    base, speed = table.shared["base"], table.shared.get("speed", {})
    parts = [_axes_table(by_table.get("axes", []), base["1024"], speed)]
    for name, title in (
        ("pooling", "Pooling, all layers"),
        ("card", "Pooling, every fourth layer (the second card's rule)"),
        ("bits", "Bits alone, windows of 4,096 tokens"),
    ):
        found = by_table.get(name, [])
        if found:
            parts.append(_small_table(title, found, base[str(found[0]["tokens_in_a_row"])]))
    settings = table.settings
    parts.append(
        f"{settings['model']}; WikiText-2 test: "
        f"{CONVENTION.format(windows=settings['windows'], window=1024)} (bits: "
        f"{settings['long_windows']} of 4,096). 4 anchors; fitted on the first "
        f"{settings['fit_tokens']:,} tokens of WikiText-2 valid, gates in {settings['gate_steps']} "
        "steps. Times smaller: bytes stored, bfloat16, against the plain cache. Speeds: of the "
        f"plain model's in the same run, {SPEED_HISTORY:,} tokens of history, float32, "
        "interleaved medians. Axes: window 128."
    )
    return "\n\n".join(parts) + "\n"


def _axes_table(found: list[dict[str, Any]], base: dict[str, Any], speed: dict[str, Any]) -> str:
    sizes = " | ".join(f"smaller at {n // 1024}k" for n in LENGTHS)
    lines = [
        "## The three axes",
        "",
        (
            f"| history | read | PPL | KL | top-1 | top-5 | recovery | {sizes} | in memory at 16k "
            "| prefill | decode |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        f"| none | - | {base['perplexity']:.2f} | 0 | 100% | 100% | - |"
        + " 1.0x |" * (len(LENGTHS) + 1)
        + " 1.00 | 1.00 |",
    ]
    for row in found:
        timed = speed.get(row["fit"], {})
        smaller = " | ".join(f"{row['times_smaller'][str(n)]:.1f}x" for n in LENGTHS)
        lines.append(
            f"| {row['fit']} | {', '.join(row['resident'])} | {_quality(row)} | {smaller} | "
            f"{row['resident_times_smaller'][str(LENGTHS[-1])]:.1f}x | "
            f"{_share(timed, 'prefill_of_plain')} | {_share(timed, 'decode_of_plain')} |"
        )
    return "\n".join(lines)


def _small_table(title: str, found: list[dict[str, Any]], base: dict[str, Any]) -> str:
    lines = [
        f"## {title}",
        "",
        "| history | window | PPL | KL | top-1 | top-5 | recovery | PPL rise | smaller at 16k |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| none | - | {base['perplexity']:.2f} | 0 | 100% | 100% | - | 0 | 1.0x |",
    ]
    windows = sorted({(row["window"], row["dropped_perplexity"]) for row in found})
    lines += [
        f"| dropped | {window} | {dropped:.2f} | | | | 0 | "
        f"{100 * (dropped / base['perplexity'] - 1):.1f}% | |"
        for window, dropped in windows
    ]
    lines += [
        f"| {row['fit']} | {row['window']} | {_quality(row)} | "
        f"{100 * row['perplexity_rise']:.2f}% | {row['times_smaller']['16384']:.1f}x |"
        for row in found
    ]
    return "\n".join(lines)


def _quality(row: dict[str, Any]) -> str:
    recovery = "-" if row["recovery"] is None else f"{row['recovery']:.3f}"
    return (
        f"{row['perplexity']:.2f} | {row['kl']:.4f} | {100 * row['top_1_agreement']:.1f}% | "
        f"{100 * row['top_5_agreement']:.1f}% | {recovery}"
    )


def _share(timed: dict[str, Any], key: str) -> str:
    return f"{timed[key]:.2f}" if key in timed else "-"


def plot(table: Rows) -> bytes:
    """Perplexity over bytes per token at 16k for the axes and their compositions."""
    longest = LENGTHS[-1]
    plain = table.shared["plain_bytes"][str(longest)] / longest / 1000
    points = [
        Point(
            row["fit"],
            row["stored_bytes"][str(longest)] / longest / 1000,
            row["perplexity"],
            "presets" if row["fit"].startswith("preset") else "axes",
        )
        for row in table.rows.values()
        if row["table"] == "axes"
    ]
    return quality_plot(
        points,
        base_size=plain,
        base_perplexity=table.shared["base"]["1024"]["perplexity"],
        title="SmolLM2-135M-Instruct, WikiText-2: 4 anchors and a window of 128 kept exact",
        size_label="kB a token at 16,384 tokens, window and anchors included (bfloat16)",
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext-2/ in it")
    parser.add_argument("--out", type=Path, default=Path("results/axes"))
    parser.add_argument("--tokens", type=int, default=57_344, help="tokens to fit on")
    parser.add_argument("--gate-steps", type=int, default=GateSettings().steps)
    parser.add_argument("--windows", type=int, default=8, help="windows of 1,024 tokens")
    parser.add_argument("--long-windows", type=int, default=2, help="windows of 4,096 tokens")
    parser.add_argument("--only", default="", help="measure only rows whose name has this in it")
    parser.add_argument(
        "--speed-repeats", type=int, default=2, help="of each timing; 0 leaves speeds as they are"
    )
    return parser.parse_args()


def main() -> None:
    """Fit what is missing, measure it row by row, time the axes, and write tables and plot."""
    chosen = arguments()
    model, tokenizer = load(DEFAULT_MODEL, dtype=torch.float32)
    wikitext = chosen.data / "wikitext-2"
    test, valid = (load_text(wikitext / name, part="all") for name in ("test.txt", "valid.txt"))
    train = token_windows(valid, tokenizer, window=1024, tokens=chosen.tokens)
    text = {
        seq: token_windows(test, tokenizer, window=seq, tokens=seq * count)
        for seq, count in ((1024, chosen.windows), (4096, chosen.long_windows))
    }
    settings = {
        "model": DEFAULT_MODEL,
        "windows": len(text[1024]),
        "long_windows": len(text[4096]),
        "fit_tokens": train.numel(),
        "gate_steps": chosen.gate_steps,
    }
    table = Rows(chosen.out / "axes.json", settings)
    bench = Bench(model, text)
    table.shared["base"] = {str(seq): vars(quality) for seq, quality in bench.base.items()}
    plain = memory_at(None, bench.shape, LENGTHS)
    table.shared["plain_bytes"] = {str(m.tokens): m.plain_bytes for m in plain}
    plans = fits(bench.shape)
    wanted = list(rows(plans))
    missing = [row for row in wanted if row.name not in table and chosen.only in row.name]
    print(f"no compression: {bench.base[1024].perplexity:.2f}; {len(missing)} rows to measure")
    names = {plan_name(row) for row in missing}
    gates = GateSettings(steps=chosen.gate_steps, windows=(32,))
    fitted = fit_together(
        model, {name: plans[name] for name in plans if name in names}, train, gates=gates
    )
    for row in missing:
        figures = bench.measure(row, fitted[plan_name(row)])
        table.add(figures, [row.name for row in wanted])
        print(
            f"{row.name}: {figures['perplexity']:.2f}, recovery {figures['recovery']}", flush=True
        )
    if chosen.speed_repeats:
        timed = {row.fit: plans[row.fit] for row in wanted if row.fit in TIMED}
        table.shared["speed"] = bench.time(timed, text[4096], chosen.speed_repeats)
    table.save()
    write_atomically(chosen.out / "axes.md", markdown(table).encode())
    write_atomically(chosen.out / "axes.png", plot(table))
    print(json.dumps({"rows": len(table.rows), "speed": table.shared.get("speed"), **settings}))


if __name__ == "__main__":
    main()
