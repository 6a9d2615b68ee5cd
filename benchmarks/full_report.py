"""The full report: the plain model, kvfold's presets and its peers, on every task, in one command.

Add-ons are fitted first where they are not there yet, on text that no task is made of: WikiText-2's
validation text for SmolLM2, and documents of its own language for the tiny hybrid. Then
`kvfold evaluate --tasks` runs for both models, and `kvfold report` makes one page of the two.

    python benchmarks/full_report.py --data DATA [--fraction 0.05] [--peers-env DIR]

Leaves `report.html`, `report.md` and both run folders in `docs/report` (a part of it, which takes
less than ten minutes where the fits are there already: `results/report/part`). Started again it
goes on.
Fits, and then subjects, are worked on side by side, as many as there are cores.

It takes what two cores can do in an hour and a half, so samples are small, and what is left
out is said here and in the report. `4x` to `16x` rebuild keys at every step, which makes a
generated token after 1,000 others cost them some 0.3 seconds a row: so few items of GSM8K and
IFEval are asked, and answers to IFEval end after 384 tokens instead of 1,280, for every subject. Of
prompts as short as IFEval's and LAMBADA's a peer with the bytes of `4x` keeps everything (as `4x`
itself does: anchors and window hold 132 tokens), so peers are not asked these; nor is the quantised
cache, which would pack them, since tasks are left out for all peers at once. With --fraction
SmolLM2 is not asked GSM8K, IFEval and turns.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvfold.evaluation.cost import read_cost
from kvfold.evaluation.environment import code_state

MODELS = ("smollm2-135m", "tiny-hybrid")
SMOLLM2 = ("ced-csa2", "qwen-compress", "4x", "8x", "16x")
TINY_HYBRID = ("4x", "8x")
SHIPPED = "tiny-hybrid-card"

TASKS = ("perplexity", "lambada", "gsm8k", "ifeval", "needle", "ruler", "turns", "fidelity")
SLOW = ("gsm8k", "ifeval", "turns")
"""Left out of a reduced report."""

SHORT = ("lambada", "ifeval")
"""Prompts of which peers would drop nothing."""

TINY_TASKS = ("perplexity", "recall", "turns", "fidelity")
LIMITS = {
    "perplexity": 14,
    "lambada": 100,
    "gsm8k": 6,
    "ifeval": 8,
    "needle": 15,
    "ruler": 10,
    "turns": 6,
    "fidelity": 6,
}
"""Items at most: of needles one a depth and length, of RULER one a kind and length."""

IFEVAL_TOKENS = 384

PEERS = "snapkv=4x,expected-attention=4x,kvzip=4x,streaming-llm=4x,quantized-4bit"
"""As many bytes as the subject `4x` has, but for the quantised cache, whose size is its own."""

KVFOLD = (sys.executable, "-m", "kvfold")


@dataclass(frozen=True)
class Machine:
    """jobs: how many processes work side by side; each gets its share of the cores."""

    jobs: int

    def environment(self) -> dict[str, str]:
        """Of a process that works beside others."""
        share = max(1, (os.cpu_count() or 1) // self.jobs)
        return {**os.environ, "OMP_NUM_THREADS": str(share)}


def run(*command: str | Path) -> None:
    """Run a command that shows what it does; ends this program with its status if it fails."""
    words = [str(word) for word in command]
    print(f"\n$ kvfold {shlex.join(words[len(KVFOLD) :])}", flush=True)
    started = time.monotonic()
    done = subprocess.run(words, check=False)
    print(f"{(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    if done.returncode:
        raise SystemExit(done.returncode)


def fit(model: str, preset: str, corpus: Path, addon: Path, machine: Machine) -> None:
    """Fit an add-on into a folder, with what is said in a file beside it."""
    addon.parent.mkdir(parents=True, exist_ok=True)
    words = [*KVFOLD, "fit", model, "--preset", preset, "--corpus", corpus, "--out", addon]
    started, log = time.monotonic(), addon.with_name(f"{preset}.log")
    with log.open("w") as said:
        done = subprocess.run(
            [str(word) for word in words],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=machine.environment(),
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"fitting {preset} of {model} failed; {log}:\n{log.read_text()[-2000:]}")
    minutes = (time.monotonic() - started) / 60
    print(f"fitted {preset} of {model}: {minutes:.1f} minutes", flush=True)


def fitted(chosen: argparse.Namespace, machine: Machine) -> dict[str, list[Path]]:
    """Folders of add-ons by model, fitted where they are not there."""
    wanted = [
        *(("smollm2-135m", name, chosen.data / "wikitext-2" / "valid.txt") for name in SMOLLM2),
        *(("tiny-hybrid", name, tales(chosen.addons)) for name in TINY_HYBRID),
    ]
    folders: dict[str, list[Path]] = {}
    with ThreadPoolExecutor(machine.jobs) as pool:
        begun = []
        for model, preset, corpus in wanted:
            addon = chosen.addons / model / preset
            folders.setdefault(model, []).append(addon)
            if not (addon / "addon.json").exists():
                begun.append(pool.submit(fit, model, preset, corpus, addon, machine))
        for one in begun:
            one.result()
    return folders


def tales(folder: Path) -> Path:
    """Documents of the tiny hybrid's language."""
    made = folder / "tales.jsonl"
    if not made.exists():
        script = Path(__file__).parents[1] / "training" / "tales.py"
        subprocess.run([sys.executable, script, "--out", folder, "--documents", "200"], check=True)
    return made


def evaluate(
    chosen: argparse.Namespace,
    machine: Machine,
    model: str,
    addons: Sequence[str | Path],
    tasks: Sequence[str],
    *more: str | Path,
) -> Path:
    """A run folder of one model."""
    folder: Path = chosen.out / model
    named = [word for addon in addons for word in ("--addon", addon)]
    run(
        *(*KVFOLD, "evaluate", model, *named, "--tasks", ",".join(tasks), *more),
        *("--fraction", str(chosen.fraction), "--batch", "8", "--jobs", str(machine.jobs)),
        *("--out", folder),
    )
    return folder


def found_before(out: Path, addons: Path) -> list[str]:
    """What an earlier run left that this one need not make again, in words."""
    runs = [out / model for model in MODELS]
    code = code_state()["sources"]
    costs = [cost for folder in runs if (cost := read_cost(folder))]
    found: list[str] = []
    if any(any((folder / "predictions").glob("*/*.jsonl")) for folder in runs):
        found.append("answers")
    if any((cost.get("code") or {}).get("sources") == code for cost in costs):
        found.append("costs")
    if any(addons.glob("*/*/addon.json")):
        found.append("fits")
    return found


def time_taken(seconds: float, found: Sequence[str]) -> str:
    """How long it took, and what of it was there before."""
    cores = os.cpu_count()
    told = f"{seconds / 60:.0f} minutes on {cores} core{'' if cores == 1 else 's'}"
    if found:
        return f"Samples are small: it went on from an earlier run ({', '.join(found)}) for {told}."
    return f"Samples are small: all of it, with its fits, was made in {told}."


def remarks(
    chosen: argparse.Namespace, tasks: Sequence[str], seconds: float, found: Sequence[str]
) -> list[str]:
    """What the page leaves out, for it to say.

    seconds: that all took till here. found: by `found_before`.
    """
    made = [time_taken(seconds, found)]
    short = " and ".join(task for task in SHORT if task in tasks)
    names = chosen.peers.split(",") if chosen.peers else []
    alike = [name for name in names if "=" in name]
    others = [name for name in names if "=" not in name]
    if alike:
        made.append(
            f"{', '.join(alike)}: not asked {short}, since with so few bytes they still keep all "
            "of prompts that short."
        )
    if others:
        made.append(
            f"{', '.join(others)}: not asked {short} either, though prompts that short would be "
            "packed as well: a task is left out for all peers at once."
        )
    if left_out := [task for task in TASKS if task not in tasks]:
        made.append(
            f"A part of the full report: --fraction {chosen.fraction:g}, and without "
            f"{', '.join(left_out)} on SmolLM2."
        )
    return made


def main() -> None:
    """Fit, evaluate, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--peers", default=PEERS, help="'' for none")
    parser.add_argument("--peers-env", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--addons", type=Path, default=Path("results/report/addons"))
    parser.add_argument("--out", type=Path, help="docs/report, of a part results/report/part")
    chosen = parser.parse_args()
    if chosen.jobs < 1:
        parser.error(f"--jobs must be at least 1; got {chosen.jobs}")
    started, machine = time.monotonic(), Machine(chosen.jobs)
    whole = chosen.fraction == 1
    chosen.out = chosen.out or Path("docs/report" if whole else "results/report/part")
    found = found_before(chosen.out, chosen.addons)
    chosen.addons.mkdir(parents=True, exist_ok=True)
    folders = fitted(chosen, machine)
    tasks = [task for task in TASKS if whole or task not in SLOW]
    more: list[str | Path] = ["--data", chosen.data]
    more += ["--limit", ",".join(f"{task}={LIMITS[task]}" for task in tasks)]
    if whole:
        more += ["--answer-tokens", f"ifeval={IFEVAL_TOKENS}", "--chat-template", "ifeval"]
    more += [] if whole else ["--speed-lengths", "256"]
    if chosen.peers:
        skip = ",".join(task for task in SHORT if task in tasks)
        more += ["--peers", chosen.peers, "--peers-skip", skip]
        more += ["--peers-env", chosen.peers_env] if chosen.peers_env is not None else []
    runs = [
        evaluate(chosen, machine, "smollm2-135m", folders["smollm2-135m"], tasks, *more),
        evaluate(chosen, machine, "tiny-hybrid", [SHIPPED, *folders["tiny-hybrid"]], TINY_TASKS),
    ]
    page = chosen.out / "report.html"
    told = remarks(chosen, tasks, time.monotonic() - started, found)
    said = [word for remark in told for word in ("--remark", remark)]
    run(*KVFOLD, "report", *runs, *said, "--out", page, "--markdown", page.with_suffix(".md"))
    print(f"\nAll of it: {(time.monotonic() - started) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
