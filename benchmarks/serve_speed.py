"""How quick serving is: first tokens from the store, many clients, and the bytes of a prompt.

- `first-token`: a question after a prefix of 2,048 tokens, cold, from the store, and from the store
  after a restart of the server; then where the time goes, beside what the machine could do at best.
- `throughput`: tokens a second of 8 clients beside one, and what a step of the batch is made of.
- `bytes`: a stored prompt of 2,048 tokens beside transformers' plain cache saved with safetensors,
  and beside what the plan says.

    python benchmarks/serve_speed.py
    python benchmarks/serve_speed.py --model tiny-hybrid --repeats 2 --parts bytes

Only worth reading on a machine that does nothing else. Leaves `speed.json` in `results/serving`;
ends with `PASS` or `FAIL` and the reasons, and status 1 for the latter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from kvfold import models
from kvfold.anatomy import anatomy
from kvfold.cli.options import load_addons
from kvfold.evaluation.environment import environment
from kvfold.evaluation.report import write_json
from kvfold.fitting.machine import machine_by_rates
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.runtime.ledger import plain_bytes
from kvfold.store.snapshot import describe_snapshot
from serving_costs import (
    limits_of,
    operations_a_token,
    stored_bytes,
    way_of_a_stored_prompt,
    weight_bytes,
)
from serving_process import KINDS, Kind, Server, words

PARTS = ("first-token", "throughput", "bytes")
TARGET = 5.0
"""Times quicker that a first token from the store must be."""
ANSWER = 16
QUESTION = 24
PLANS = ("4x", "8x", "csa2")
ROUNDING = 0.999
"""The plain file has a header of its own, which a plan doesn't count."""


def prompts_of(tokenizer: Any, tokens: int, count: int) -> list[list[int]]:
    """Prompts of so many tokens, each of a text of its own."""
    made = []
    for number in range(count):
        ids = tokenizer(words(f"prompt {number}", 2 * tokens), add_special_tokens=False)
        made.append(ids["input_ids"][:tokens])
        if len(made[-1]) < tokens:
            raise RuntimeError(f"a text must have {tokens} tokens; got {len(made[-1])}")
    return made


def first_token(url: str, model: str, prompt: list[int]) -> dict[str, Any]:
    """Seconds to the first token of a stream, all tokens, and how many came from the store."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "logprobs": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    tokens: list[str] = []
    cached, first = 0, None
    began = time.perf_counter()
    with (
        httpx.Client(timeout=600) as client,
        client.stream("POST", url + "/v1/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            if first is None:
                first = time.perf_counter() - began
            piece = json.loads(line.removeprefix("data: "))
            for choice in piece["choices"]:
                tokens += (choice["logprobs"] or {"tokens": []})["tokens"]
            if piece.get("usage"):
                cached = piece["usage"]["prompt_tokens_details"]["cached_tokens"]
    return {"seconds": first, "tokens": tokens, "cached": cached}


def wait_for_files(store: Path, count: int) -> None:
    """Until the store has so many snapshots."""
    deadline = time.monotonic() + 120
    while len(list(store.glob("*.kvfold"))) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{count} snapshots must be written within 120 s")
        time.sleep(0.05)


def measure_first_tokens(kind: Kind, chosen: argparse.Namespace) -> dict[str, Any]:
    """Cold, from the store, and from it after a restart; then the stages of the second."""
    tokenizer = models.load_tokenizer(chosen.model)
    prompts = prompts_of(tokenizer, chosen.prefix + QUESTION, chosen.repeats)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        arguments = (*kind.arguments, "--no-plain", "--store", str(store))
        found: dict[str, list[dict[str, Any]]] = {"cold": [], "stored": [], "restarted": []}
        with Server(arguments, Path(folder) / "log") as server:
            first_token(server.url, kind.folded, prompts[0][:64])  # what is made once
            for number, prompt in enumerate(prompts):
                found["cold"].append(first_token(server.url, kind.folded, prompt))
                wait_for_files(store, number + 1)
            for prompt in prompts:
                found["stored"].append(first_token(server.url, kind.folded, prompt))
        with Server(arguments, Path(folder) / "log") as server:
            for prompt in prompts:
                found["restarted"].append(first_token(server.url, kind.folded, prompt))
        stages = stages_of(kind, chosen, store, prompts)
    seconds = {name: statistics.median(a["seconds"] for a in own) for name, own in found.items()}
    same = all(
        a["tokens"] == b["tokens"]
        for name in ("stored", "restarted")
        for a, b in zip(found["cold"], found[name], strict=True)
    )
    inside = sum(stages["seconds"].values())
    stages["seconds"]["HTTP, threads and the rest"] = max(0.0, seconds["stored"] - inside)
    return {
        "prefix": chosen.prefix,
        "question": QUESTION,
        "median_seconds": seconds,
        "times_quicker": {n: seconds["cold"] / seconds[n] for n in ("stored", "restarted")},
        "same_tokens": same,
        "cached_tokens": {name: [a["cached"] for a in own] for name, own in found.items()},
        "all_seconds": {name: [a["seconds"] for a in own] for name, own in found.items()},
        "stages": stages,
    }


def stages_of(
    kind: Kind, chosen: argparse.Namespace, store: Path, prompts: Sequence[list[int]]
) -> dict[str, Any]:
    """Where the time of a stored prompt goes, beside the machine's limits."""
    model, tokenizer = models.load(chosen.model)
    (addon,) = load_addons([kind.folded], model).values()
    machine = machine_by_rates(model.device, [str(model.dtype).split(".")[1]])
    made_by = describe_snapshot(next(store.glob("*.kvfold"))).identity
    plan = Plan.from_dict(dict(made_by.plan))  # --demo may read the history in its own way
    with attach(model, addon, plan=plan, keep_codes=True) as attachment:
        way = way_of_a_stored_prompt(attachment, tokenizer, store, prompts[0], chosen.repeats)
    size = plain_bytes(anatomy(model), chosen.prefix, element_size=model.dtype.itemsize).total
    way["least_seconds"] = limits_of(way, model, machine, size)
    way["machine"] = machine.assumption
    return way


def measure_throughput(kind: Kind, chosen: argparse.Namespace) -> dict[str, Any]:
    """One client and several, each with the same number of requests, on one server."""
    model, tokenizer = models.load(chosen.model)
    machine = machine_by_rates(model.device, [str(model.dtype).split(".")[1]])
    rate = next(iter(machine.operations.values()))
    lines = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Server((*kind.arguments, "--no-plain"), Path(folder) / "log") as server,
    ):
        for clients in (1, chosen.clients):
            prompts = prompts_of(tokenizer, chosen.prompt, clients * chosen.rounds)
            lines.append(run_clients(server, kind.folded, prompts, clients, chosen.answer))
    for line in lines:
        rows = line["rows_a_step"]
        line["least_step_seconds"] = {
            "weights read once": weight_bytes(model) / machine.bandwidth,
            "operations": rows * operations_a_token(model) / rate,
        }
    one, many = lines
    gain = many["tokens_a_second"] / one["tokens_a_second"]
    return {"clients": lines, "times_more": gain, "machine": machine.assumption}


def run_clients(
    server: Server, model: str, prompts: list[list[int]], clients: int, answer: int
) -> dict[str, Any]:
    """Tokens a second, and of what."""

    def ask(prompt: list[int]) -> int:
        body = {"model": model, "prompt": prompt, "max_tokens": answer, "temperature": 0}
        got = httpx.post(server.url + "/v1/completions", json=body, timeout=600)
        return int(got.raise_for_status().json()["usage"]["completion_tokens"])

    before, began = server.figures(), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        tokens = sum(pool.map(ask, prompts))
    seconds, after = time.perf_counter() - began, server.figures()
    steps, spent = (
        after[f"kvfold_step_seconds_{what}"] - before.get(f"kvfold_step_seconds_{what}", 0.0)
        for what in ("count", "sum")
    )
    return {
        "clients": clients,
        "requests": len(prompts),
        "tokens": tokens,
        "tokens_a_second": tokens / seconds,
        "seconds": seconds,
        "seconds_in_steps": spent,
        "seconds_in_prompts_and_the_rest": seconds - spent,
        "step_seconds": spent / max(1.0, steps),
        "rows_a_step": (tokens - len(prompts)) / max(1.0, steps),
    }


def measure_bytes(kind: Kind, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Files of one prompt, in the model's dtype and in bfloat16."""
    tokenizer = models.load_tokenizer(chosen.model)
    (prompt,) = prompts_of(tokenizer, chosen.prefix, 1)
    dtypes = [torch.float32, torch.bfloat16]
    return stored_bytes(chosen.model, dtypes, [*PLANS, kind.folded], torch.tensor([prompt]))


def reasons(report: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    found = []
    first = report.get("first-token")
    if first:
        for name, times in first["times_quicker"].items():
            if times < TARGET:
                found.append(f"first token {name}: {times:.1f} times quicker, not {TARGET:g}")
            if min(first["cached_tokens"][name]) < first["prefix"] // 256 * 256:
                found.append(f"{name}: the store did not give the whole prefix")
        if not first["same_tokens"]:
            found.append("other tokens from the store than cold")
    for line in report.get("bytes", []):
        told = line["plan_times_smaller_at_this_length"]
        tensors = line["plain_file_bytes"] / line["tensor_bytes"]
        if tensors < ROUNDING * told:
            found.append(
                f"{line['plan']} in {line['dtype']}: {tensors:.3f} times smaller without header "
                f"and ids, and the plan says {told:.3f}"
            )
    return found


def table(report: dict[str, Any]) -> str:
    """What a person reads."""
    lines = []
    if first := report.get("first-token"):
        for name, seconds in first["median_seconds"].items():
            times = first["times_quicker"].get(name)
            lines.append(f"first token {name:10} {seconds * 1e3:9.1f} ms" + _times(times))
        for name, seconds in first["stages"]["seconds"].items():
            lines.append(f"    {name:28} {seconds * 1e3:9.2f} ms")
        for name, seconds in first["stages"]["least_seconds"].items():
            lines.append(f"    at least: {name:33} {seconds * 1e3:9.2f} ms")
    if many := report.get("throughput"):
        for line in many["clients"]:
            least = max(line["least_step_seconds"].items(), key=lambda pair: pair[1])
            lines.append(
                f"{line['clients']:2} clients {line['tokens_a_second']:8.1f} tokens/s, step "
                f"{line['step_seconds'] * 1e3:.1f} ms for {line['rows_a_step']:.1f} rows; at least "
                f"{least[1] * 1e3:.1f} ms ({least[0]}); steps take "
                f"{line['seconds_in_steps'] / line['seconds']:.0%}"
            )
        lines.append(f"{many['times_more']:.2f} times the tokens of one client")
    for line in report.get("bytes", []):
        lines.append(
            f"{line['plan']:18} {line['dtype']:9} {line['file_bytes']:12,} bytes, "
            f"{line['times_smaller']:6.2f} times smaller; the plan: "
            f"{line['plan_times_smaller_at_this_length']:6.2f} at this length, "
            f"{line['plan_times_smaller_a_token_of_history']:6.2f} a token of history (16 bits)"
        )
    return "\n".join(lines)


def _times(times: float | None) -> str:
    return "" if times is None else f"  {times:.1f} times quicker"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=list(KINDS), default="smollm2-135m")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prefix", type=int, default=2048, help="tokens, whole blocks of 256")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    parser.add_argument("--prompt", type=int, default=128, help="tokens, for throughput")
    parser.add_argument("--answer", type=int, default=64, help="tokens, for throughput")
    parser.add_argument("--out", type=Path, default=Path("results/serving"))
    chosen = parser.parse_args()
    settings = {name: value for name, value in vars(chosen).items() if name != "out"}
    kind, report = KINDS[chosen.model], dict[str, Any]()
    measures = (measure_first_tokens, measure_throughput, measure_bytes)
    for part, measure in zip(PARTS, measures, strict=True):
        if part in chosen.parts:
            report[part] = measure(kind, chosen)
    found = reasons(report)
    verdict = {"passed": not found, "reasons": found}
    write_json(
        chosen.out / "speed.json", {**environment(), "settings": settings, **verdict, **report}
    )
    print(table(report))
    print("PASS" if not found else f"FAIL: {'; '.join(found)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
