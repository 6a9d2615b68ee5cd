"""Clients on a live `kvfold vllm serve` for minutes: errors, answers, memory, what stays behind.

Each prompt is asked alone first; under load its answer must be the same, but for tokens that were
nearly as likely. Clients stream or not and some leave early. Memory is that of all the server's
processes, compared after a warm-up of the same load and after the run. It may grow where something
was reserved before and is first written to, such as blocks of the pool: a mapping that has the same
bounds then and now can't hold more than it was made for, so what it grew by is told apart. What
counts is the rest. For each new number of tokens in a step oneDNN keeps kernels for its products,
whose number `ONEDNN_PRIMITIVE_CACHE_CAPACITY` bounds here, or growth would tell of them.

    $KVFOLD_VLLM_ENV/bin/python benchmarks/vllm_soak.py [MODEL] [--addon DIR] [-- vLLM's arguments]

`--plain` does the same to vLLM's own server without kvfold, to compare with. Needs the environment
of `make test-vllm`. Ends with `PASS` or `FAIL` and the reasons, and status 1 for the latter. Leaves
`soak.json` (`soak-plain.json`) in `results/vllm`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from kvfold.cli.vllm import CHUNK, SERVER
from kvfold.evaluation.environment import environment
from kvfold.evaluation.report import write_json
from kvfold.models import DEFAULT_MODEL, model_folder
from kvfold.vllm.plugin import vllm_version
from serve_soak import DRAIN_SECONDS, load
from serving_clients import Asked, ask, requests_of
from serving_process import MEMORY_GIVEN_BACK, VLLM_GAUGES, Kind, Server

NAME = "served"
COMMAND = ("vllm", "serve")
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_PLUGINS": "kvfold",
    "VLLM_NO_USAGE_STATS": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
}
GROWTH_BYTES = 64 * 2**20
"""What memory may grow by after the warm-up, beside what was reserved by then: three processes,
their pools of threads and caches."""
FAULTS = ("Traceback", "EngineDeadError", " ERROR ")


def server(arguments: Sequence[str], log: Path, names: Sequence[str] = ()) -> Server:
    """`kvfold vllm serve`, whose model is called `served` and by other names."""
    named = (*arguments, "--served-model-name", NAME, *names)
    return Server(
        named, log, {**MEMORY_GIVEN_BACK, **VARIABLES}, command=COMMAND, gauges=VLLM_GAUGES
    )


def plain_server(model: str, arguments: Sequence[str], log: Path) -> Server:
    """vLLM's own for the model as it is, with steps as long as kvfold's, its plugin left out."""
    steps = ("--max-num-batched-tokens", str(CHUNK), "--host", "127.0.0.1")
    named = ("--model", str(model_folder(model)), *steps, *arguments, "--served-model-name", NAME)
    without = {**MEMORY_GIVEN_BACK, **VARIABLES, "VLLM_PLUGINS": ""}
    return Server(named, log, without, command=(), module=SERVER, gauges=VLLM_GAUGES)


def prompts(count: int, longest: int, longest_answer: int) -> list[Asked]:
    """Different ones of up to so many words."""
    return requests_of(Kind((), NAME, NAME, longest), count, (NAME,), longest_answer)


def log_lines(one: Server) -> list[str]:
    """What the server has written, also before it was watched."""
    return one.log.read_text(errors="replace").splitlines()


def watched(one: Server, requests: Sequence[Asked], chosen: argparse.Namespace) -> dict[str, Any]:
    """Each prompt alone, a warm-up, the run, and what was seen of it."""
    logged = len(log_lines(one))
    with httpx.Client(timeout=600) as http:
        alone = {asked.number: ask(http, one.url, asked, stream=False) for asked in requests}
    load([one], requests, chosen, chosen.warm_up, alone)
    one.wait_until_idle(DRAIN_SECONDS)
    before, mapped_before = one.resident_by_process(), one.resident_by_mapping()
    began = time.monotonic()
    tally, watch = load([one], requests, chosen, chosen.seconds, alone)
    ran = time.monotonic() - began
    drained = one.wait_until_idle(DRAIN_SECONDS)
    samples = watch.samples[0]
    after, mapped_after = one.resident_by_process(), one.resident_by_mapping()
    reserved = sum(
        bytes_now - mapped_before[mapping]
        for mapping, bytes_now in mapped_after.items()
        if mapping in mapped_before
    )
    grown = sum(after.values()) - sum(before.values())
    lines = log_lines(one)[logged:]
    return {
        "seconds": ran,
        "clients": dict(tally.counts),
        "problems": tally.problems,
        "drained_after_seconds": drained,
        "pool_used_at_the_end": one.watched()["pool_used"],
        "most_rows": max(sample["rows"] for sample in samples),
        "most_pool_used": max(sample["pool_used"] for sample in samples),
        "resident_bytes_after_warm_up": before,
        "resident_bytes_at_the_end": after,
        "grown_bytes": grown,
        "grown_bytes_of_what_was_reserved": reserved,
        "log_faults": [line for line in lines if any(fault in line for fault in FAULTS)][:10],
        "samples": samples,
    }


def reasons(report: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    counts, found = report["clients"], []
    for name in ("errors", "wrong answers"):
        if counts.get(name):
            found.append(f"{counts[name]} {name}: {'; '.join(report['problems'][:3])}")
    if not counts.get("answers"):
        found.append("no answer came")
    if report["drained_after_seconds"] is None:
        found.append(f"requests were left {DRAIN_SECONDS} s after the last client")
    if report["pool_used_at_the_end"]:
        found.append(f"{report['pool_used_at_the_end']:.1%} of the pool is still held")
    if (more := _grown_beside(report)) > GROWTH_BYTES:
        found.append(f"memory grew by {more / 2**20:.0f} MiB beside what was reserved")
    if report["log_faults"]:
        found.append(f"the log tells of a fault: {report['log_faults'][0]}")
    return found


def _grown_beside(report: dict[str, Any]) -> int:
    """Bytes that memory grew by beside what had been reserved."""
    grown: int = report["grown_bytes"] - report["grown_bytes_of_what_was_reserved"]
    return grown


def soak(arguments: Sequence[str], chosen: argparse.Namespace) -> dict[str, Any]:
    """Run and report; `reasons` says what was wrong."""
    requests = prompts(chosen.prompts, chosen.longest, chosen.longest_answer)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        made = (
            plain_server(chosen.model, arguments, log)
            if chosen.plain
            else server((chosen.model, "--addon", chosen.addon, *arguments), log)
        )
        with made as one:
            report = watched(one, requests, chosen)
    found = reasons(report)
    return {"passed": not found, "reasons": found, **report}


def parser_of() -> argparse.ArgumentParser:
    """What can be chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="as in `kvfold`")
    parser.add_argument("more", nargs="*", help="arguments of vLLM, behind --")
    parser.add_argument("--addon", default="smollm2-csa2-w128")
    parser.add_argument("--plain", action="store_true", help="vLLM without kvfold")
    parser.add_argument("--blocks", type=int, default=400, help="of the pool")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--warm-up", type=float, default=45, help="seconds")
    parser.add_argument("--prompts", type=int, default=24, help="different ones")
    parser.add_argument("--longest", type=int, default=300, help="words of a prompt")
    parser.add_argument("--longest-answer", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("results/vllm"))
    parser.set_defaults(kill=False)
    return parser


def main() -> None:
    """Measure and write."""
    chosen = parser_of().parse_args()
    arguments = [
        "--dtype", "float32", "--max-model-len", "2048",
        "--max-num-seqs", str(chosen.clients), "--num-gpu-blocks-override", str(chosen.blocks),
    ]  # fmt: skip
    report = soak([*arguments, *chosen.more], chosen)
    settings = {name: value for name, value in vars(chosen).items() if name not in ("out", "kill")}
    machine = {**environment(), "vllm": vllm_version()}
    name = "soak-plain.json" if chosen.plain else "soak.json"
    write_json(chosen.out / name, {**machine, "settings": settings, **report})
    for name, count in sorted(report["clients"].items()):
        print(f"{name:32} {count:10,}")
    grown, more = report["grown_bytes"] / 2**20, _grown_beside(report) / 2**20
    print(
        f"rows at most {report['most_rows']:.0f}; memory grew by {grown:.1f} MiB, by {more:.1f} "
        "beside what had been reserved"
    )
    print("PASS" if report["passed"] else f"FAIL: {'; '.join(report['reasons'])}")
    sys.exit(not report["passed"])


if __name__ == "__main__":
    main()
