"""The full report: the plain model, kvfold's presets and its peers, on every task, in one command.

Add-ons are fitted first where they are not there yet, on text that no task is made of: WikiText-2's
validation text for SmolLM2, and documents of its own language for the tiny hybrid. Then
`kvfold evaluate --tasks` runs for both models, and `kvfold report` makes one page of the two.

    python benchmarks/full_report.py --data DATA [--fraction 0.05] [--peers-env DIR]

Leaves `report.html`, `report.md` and both run folders in `docs/report`. Started again it goes on.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

SMOLLM2 = ("ced-csa2", "qwen-compress", "4x", "8x", "16x")
TINY_HYBRID = ("4x", "8x")
SHIPPED = "tiny-hybrid-card"

TASKS = "perplexity,lambada,gsm8k,ifeval,needle,ruler,turns,fidelity"
TINY_TASKS = "perplexity,recall,turns,fidelity"
LIMITS = "lambada=300,gsm8k=16,ifeval=10"
"""SmolLM2 answers 5 items of GSM8K a minute on one core, and 2 of IFEval."""

PEERS = "snapkv@4x,expected-attention@4x,kvzip@4x,streaming-llm@4x,quantized-4bit"
KVFOLD = (sys.executable, "-m", "kvfold")


def run(*command: str | Path) -> None:
    """Run a command that shows what it does; ends this program with its status if it fails."""
    words = [str(word) for word in command]
    print(f"\n$ kvfold {shlex.join(words[len(KVFOLD) :])}", flush=True)
    started = time.monotonic()
    done = subprocess.run(words, check=False)
    print(f"{(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    if done.returncode:
        raise SystemExit(done.returncode)


def fitted(model: str, preset: str, corpus: Path, folder: Path) -> Path:
    """The folder of an add-on, fitted if it is not there."""
    addon = folder / model / preset
    if not (addon / "addon.json").exists():
        addon.parent.mkdir(parents=True, exist_ok=True)
        run(*KVFOLD, "fit", model, "--preset", preset, "--corpus", corpus, "--out", addon)
    return addon


def tales(folder: Path) -> Path:
    """Documents of the tiny hybrid's language."""
    made = folder / "tales.jsonl"
    if not made.exists():
        script = Path(__file__).parents[1] / "training" / "tales.py"
        subprocess.run([sys.executable, script, "--out", folder, "--documents", "200"], check=True)
    return made


def main() -> None:
    """Fit, evaluate, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--peers", default=PEERS, help="'' for none")
    parser.add_argument("--peers-env", type=Path)
    parser.add_argument("--addons", type=Path, default=Path("results/report/addons"))
    parser.add_argument("--out", type=Path, default=Path("docs/report"))
    chosen = parser.parse_args()
    chosen.addons.mkdir(parents=True, exist_ok=True)

    def evaluate(model: str, addons: list[str | Path], *more: str | Path) -> Path:
        folder = chosen.out / model
        named = [word for addon in addons for word in ("--addon", addon)]
        part = ("--fraction", str(chosen.fraction), "--out", folder)
        run(*KVFOLD, "evaluate", model, *named, *more, *part)
        return folder

    valid = chosen.data / "wikitext-2" / "valid.txt"
    dense = [fitted("smollm2-135m", name, valid, chosen.addons) for name in SMOLLM2]
    own = tales(chosen.addons)
    hybrid = [fitted("tiny-hybrid", name, own, chosen.addons) for name in TINY_HYBRID]
    peers: list[str | Path] = ["--peers", chosen.peers] if chosen.peers else []
    if chosen.peers_env is not None:
        peers += ["--peers-env", chosen.peers_env]
    runs = [
        evaluate(
            "smollm2-135m",
            list(dense),
            *("--tasks", TASKS, "--limit", LIMITS, "--data", chosen.data),
            *peers,
        ),
        evaluate("tiny-hybrid", [SHIPPED, *hybrid], "--tasks", TINY_TASKS),
    ]
    page = chosen.out / "report.html"
    run(*KVFOLD, "report", *runs, "--out", page, "--markdown", page.with_suffix(".md"))


if __name__ == "__main__":
    main()
