"""Many clients on a live server for minutes: errors, memory, the queue, rows of those who left.

Default: 32 clients of mixed lengths on one server, which streams or not, some leaving early, half
with prompts that begin alike. Memory is compared when all caches are gone, after a warm-up of the
same load and after the run, so that growth is neither caches nor first use.

    python benchmarks/serve_soak.py                                # one server, no store
    python benchmarks/serve_soak.py --store                        # one server and a store
    python benchmarks/serve_soak.py --servers 2 --store            # two servers on one store
    python benchmarks/serve_soak.py --servers 2 --store --kill     # kill -9 of one of them at times

With a store every answer is compared with that of a server without one (greedy), and afterwards
every snapshot is read and its checksum compared. Ends with `PASS` or `FAIL` and the reasons, and
status 1 for the latter. Leaves `soak.json`, `soak-store.json`, `soak-two-servers.json` or
`soak-killed.json` in `results/serving`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvfold.errors import SnapshotError
from kvfold.evaluation.environment import environment
from kvfold.evaluation.report import write_json
from kvfold.store.snapshot import Snapshot
from serving_clients import Answer, Asked, Client, Tally, ask, requests_of
from serving_process import KINDS, MEMORY_GIVEN_BACK, Server

LOOK_SECONDS = 0.5
DRAIN_SECONDS = 120
ROW_SECONDS = 1.0
"""How long the row of a client that left may stay."""
GROWTH_BYTES = 24 * 2**20
"""What resident memory may grow by: prefixes that are remembered by hashes, pools of threads."""
KILLED_AFTER = (4.0, 12.0)
"""Seconds between kills, drawn evenly."""


@dataclass
class Watch:
    """A thread that notes the servers' memory and work. samples: one list a server."""

    servers: Sequence[Server]
    stop: threading.Event
    samples: list[list[dict[str, float]]] = field(default_factory=list)

    def run(self) -> None:
        """Look until stopped."""
        self.samples = [[] for _ in self.servers]
        began = time.monotonic()
        while not self.stop.wait(LOOK_SECONDS):
            for server, own in zip(self.servers, self.samples, strict=True):
                try:
                    now = server.watched()
                except httpx.TransportError:
                    continue
                own.append(
                    {
                        "seconds": round(time.monotonic() - began, 2),
                        "resident_bytes": server.resident_bytes(),
                        **now,
                    }
                )


def load(
    servers: Sequence[Server],
    requests: Sequence[Asked],
    chosen: argparse.Namespace,
    seconds: float,
    references: dict[int, Answer] | None,
) -> tuple[Tally, Watch]:
    """All clients for so long; returns when each has its last answer."""
    tally, over, watching = Tally(), threading.Event(), threading.Event()
    watch = Watch(servers, watching)
    clients = [
        Client(seed, servers, requests, tally, over, references) for seed in range(chosen.clients)
    ]
    threads = [threading.Thread(target=client.run) for client in clients]
    watcher = threading.Thread(target=watch.run)
    killer = threading.Thread(target=kill_at_times, args=(servers, over))
    for thread in [*threads, watcher, *([killer] if chosen.kill else [])]:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in [*threads, *([killer] if chosen.kill else [])]:
        thread.join()
    watching.set()
    watcher.join()
    return tally, watch


def kill_at_times(servers: Sequence[Server], over: threading.Event) -> None:
    """`kill -9` of one server after another at random moments; each is started again at once."""
    draw = random.Random(0)  # noqa: S311 - the same each time
    while not over.wait(draw.uniform(*KILLED_AFTER)):
        server = servers[draw.randrange(len(servers))]
        server.kill()
        server.start()


def rows_of_those_who_left(servers: Sequence[Server], tally: Tally) -> dict[str, Any]:
    """How long their rows stayed, from when the client went (its clock) to the log's line."""
    freed = {
        line["request"]: line["at"]
        for server in servers
        for line in server.log_lines()
        if line["message"] == "row freed"
    }
    stayed = sorted(freed[name] - at for name, at in tally.left.items() if name in freed)
    return {
        "clients": len(tally.left),
        "rows": len(stayed),
        "rows_over_a_second": sum(seconds > ROW_SECONDS for seconds in stayed),
        "median_seconds": stayed[len(stayed) // 2] if stayed else None,
        "most_seconds": stayed[-1] if stayed else None,
    }


def log_faults(servers: Sequence[Server]) -> dict[str, Any]:
    """Lines of the logs that tell of a fault, and of files that the store refused."""
    lines = [line for server in servers for line in server.log_lines()]
    errors = [line["message"] for line in lines if line["level"] in ("error", "critical")]
    refused = [line["message"] for line in lines if "dropped the stored" in line["message"]]
    return {"errors": errors[:10], "refused_files": refused[:10]}


def verified(folder: Path) -> dict[str, Any]:
    """Every snapshot of a store, read whole."""
    damaged, whole, size = [], 0, 0
    for path in sorted(folder.glob("*.kvfold")):
        size += path.stat().st_size
        try:
            Snapshot.load(path)
            whole += 1
        except SnapshotError as error:
            damaged.append(str(error))
    return {"whole": whole, "damaged": damaged, "bytes": size}


def memory(samples: list[dict[str, float]], before: int, after: int) -> dict[str, Any]:
    """Resident memory with no caches before and after, and above them in between."""
    above = [s["resident_bytes"] - before - s["cache_bytes"] for s in samples]
    return {
        "idle_bytes_after_warm_up": before,
        "idle_bytes_at_the_end": after,
        "grown_bytes": after - before,
        "most_cache_bytes": max((s["cache_bytes"] for s in samples), default=0),
        "most_resident_bytes": max((s["resident_bytes"] for s in samples), default=0),
        "most_bytes_above_idle_and_caches": max(above, default=0),
    }


def references_of(
    arguments: Sequence[str], requests: Sequence[Asked], folder: Path
) -> dict[int, Answer]:
    """Each prompt's answer from a server without a store, one after another."""
    with Server(arguments, folder / "references.log") as server, httpx.Client(timeout=600) as http:
        return {asked.number: ask(http, server.url, asked, stream=False) for asked in requests}


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run and report."""
    kind, store = KINDS[chosen.model], folder / "store"
    arguments = (*kind.arguments, "--queue", str(2 * chosen.clients))
    models = (kind.folded,) if chosen.store else (kind.folded, kind.plain)
    requests = requests_of(kind, chosen.prompts, models, chosen.longest_answer)
    references = references_of(arguments, requests, folder) if chosen.store else None
    if chosen.store:
        arguments += ("--store", str(store), "--store-bytes", str(chosen.store_bytes))
    servers = [
        Server(arguments, folder / f"{number}.log", MEMORY_GIVEN_BACK)
        for number in range(chosen.servers)
    ]
    try:
        for server in servers:
            server.start()
        report = watched(servers, requests, chosen, references)
        report["log"] = log_faults(servers)
    finally:
        for server in servers:
            if server.running is not None:
                server.stop()
    if chosen.store:
        report["store"] = verified(store)
        report["store"]["half_written_files"] = len(list(store.glob(".*.tmp")))
    return report


def watched(
    servers: Sequence[Server],
    requests: Sequence[Asked],
    chosen: argparse.Namespace,
    references: dict[int, Answer] | None,
) -> dict[str, Any]:
    """A warm-up, the run, and what was seen of it."""
    warm_up = chosen.warm_up if chosen.warm_up is not None else min(60.0, chosen.seconds / 4)
    killing, chosen.kill = chosen.kill, False
    load(servers, requests, chosen, warm_up, references)
    chosen.kill = killing
    for server in servers:
        server.wait_until_idle(DRAIN_SECONDS)
    before = [server.resident_bytes() for server in servers]
    began = time.monotonic()
    tally, watch = load(servers, requests, chosen, chosen.seconds, references)
    ran = time.monotonic() - began
    drained = [server.wait_until_idle(DRAIN_SECONDS) for server in servers]
    after = [server.resident_bytes() for server in servers]
    return {
        "seconds": ran,
        "clients": dict(tally.counts),
        "problems": tally.problems,
        "drained_after_seconds": drained,
        "kills": sum(server.kills for server in servers),
        "rows_of_clients_that_left": rows_of_those_who_left(servers, tally),
        "memory": [
            memory(samples, start, end)
            for samples, start, end in zip(watch.samples, before, after, strict=True)
        ],
        "samples": watch.samples,
    }


def reasons(report: dict[str, Any], chosen: argparse.Namespace) -> list[str]:
    """What is not as it must be."""
    found = []
    counts = report["clients"]
    for name in ("errors", "wrong answers"):
        if counts.get(name):
            found.append(f"{counts[name]} {name}: {'; '.join(report['problems'][:3])}")
    if not counts.get("answers"):
        found.append("no answer came")
    if any(seconds is None for seconds in report["drained_after_seconds"]):
        found.append(f"the queue was not empty {DRAIN_SECONDS} s after the last client")
    left = report["rows_of_clients_that_left"]
    if left["rows_over_a_second"]:
        found.append(
            f"{left['rows_over_a_second']} of {left['rows']} rows stayed longer than "
            f"{ROW_SECONDS} s after their client left, at most {left['most_seconds']:.2f} s"
        )
    if not chosen.kill:
        found += [
            f"resident memory grew by {own['grown_bytes'] / 2**20:.1f} MiB with all caches gone"
            for own in report["memory"]
            if own["grown_bytes"] > GROWTH_BYTES
        ]
    for name in ("errors", "refused_files"):
        if report["log"][name]:
            found.append(f"the log tells of {name}: {report['log'][name][0]}")
    stored = report.get("store")
    if stored and (stored["damaged"] or not stored["whole"]):
        found.append(f"{len(stored['damaged'])} damaged files of {stored['whole']} whole ones")
    if stored and stored["bytes"] > chosen.store_bytes:
        found.append(f"the store takes {stored['bytes']:,} of {chosen.store_bytes:,} bytes")
    return found


def table(report: dict[str, Any]) -> str:
    """What a person reads."""
    left, mib = report["rows_of_clients_that_left"], 2**20
    lines = [f"{name:32} {count:10,}" for name, count in sorted(report["clients"].items())]
    for number, own in enumerate(report["memory"]):
        lines.append(
            f"server {number}: idle {own['idle_bytes_after_warm_up'] / mib:.1f} MiB, at the end "
            f"{own['idle_bytes_at_the_end'] / mib:.1f}; caches up to "
            f"{own['most_cache_bytes'] / mib:.1f}, beside them up to "
            f"{own['most_bytes_above_idle_and_caches'] / mib:.1f}"
        )
    if left["rows"]:
        lines.append(
            f"rows of clients that left: {left['rows']}, freed after {left['median_seconds']:.2f} "
            f"s (median), {left['most_seconds']:.2f} s (most)"
        )
    if "store" in report:
        stored = report["store"]
        lines.append(
            f"store: {stored['whole']} whole snapshots, {len(stored['damaged'])} damaged, "
            f"{stored['bytes'] / mib:.1f} MiB; kills: {report['kills']}"
        )
    return "\n".join(lines)


def name_of(chosen: argparse.Namespace) -> str:
    """The report's file."""
    if chosen.kill:
        return "soak-killed.json"
    if chosen.servers > 1:
        return "soak-two-servers.json"
    return "soak-store.json" if chosen.store else "soak.json"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=list(KINDS), default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--warm-up", type=float, help="seconds; a quarter, at most 60, if not")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--store-bytes", type=int, default=2**29)
    parser.add_argument("--kill", action="store_true", help="kill -9 of servers at random moments")
    parser.add_argument("--prompts", type=int, default=48, help="different ones")
    parser.add_argument("--longest-answer", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("results/serving"))
    chosen = parser.parse_args()
    if (chosen.servers > 1 or chosen.kill) and not chosen.store:
        parser.error("--servers and --kill are there to try a store: add --store")
    settings = {name: value for name, value in vars(chosen).items() if name != "out"}
    with tempfile.TemporaryDirectory() as folder:
        report = measure(chosen, Path(folder))
    found = reasons(report, chosen)
    verdict = {"passed": not found, "reasons": found}
    write_json(
        chosen.out / name_of(chosen), {**environment(), "settings": settings, **verdict, **report}
    )
    print(table(report))
    print("PASS" if not found else f"FAIL: {'; '.join(found)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
