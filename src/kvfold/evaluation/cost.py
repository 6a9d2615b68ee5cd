"""What each subject of a run costs: bytes by part and length, peak memory, and time.

Bytes follow from plan and model and are the same in every run. Times and peaks are measured, in
turns (plain, first add-on, second, ...) and so on, and differ a little each time: that is why all
this lies in a file of its own, beside the figures of quality. The bytes of other projects' methods
are measured on caches of each length; they are not timed, since they run in other processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.anatomy import anatomy
from kvfold.evaluation.configuration import describe_addon, describe_model, digest
from kvfold.evaluation.environment import code_state, environment
from kvfold.evaluation.memory import Memory, memory_at
from kvfold.evaluation.peers.peer import Peer
from kvfold.evaluation.report import read_json, write_json
from kvfold.evaluation.runner import PLAIN, as_picked, check_names, layers_by_residency
from kvfold.evaluation.shapes import CostShape, check_shape
from kvfold.evaluation.speed import Speed, SpeedSettings, measure_speed
from kvfold.runtime.attach import AddOnLike, attach

COST_FILE = "cost.json"


@dataclass(frozen=True)
class CostSettings:
    """lengths: token counts at which bytes are given. speed_lengths: tokens of the prompts that
    are timed, none for no times. decode_tokens: steps timed after each. repeats: of it all.
    """

    lengths: tuple[int, ...] = (1024, 4096, 16384)
    speed_lengths: tuple[int, ...] = (256, 1024)
    decode_tokens: int = 16
    repeats: int = 3


def cost_of(
    model: Any,
    candidates: Mapping[str, AddOnLike],
    settings: CostSettings,
    *,
    seed: int = 0,
    peers: Mapping[str, Peer] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Cost of every subject as plain data, the plain model's first.

    seed: of the ids that prompts are made of. on_progress is told what is measured next.
    """
    tell = on_progress or (lambda _: None)
    check_names(candidates, (*settings.lengths, *settings.speed_lengths))
    shape = anatomy(model)
    subjects: dict[str, dict[str, Any]] = {}
    for name, addon in {PLAIN: None, **candidates}.items():
        resident: dict[str, int] = {}
        if addon is not None:
            with attach(model, addon) as attachment:
                resident = layers_by_residency(attachment)
        plan = None if addon is None else as_picked(addon.plan, resident)
        subjects[name] = _sizes(memory_at(plan, shape, settings.lengths), resident)
    for name, peer in (peers or {}).items():
        tell(f"bytes of {name}")
        subjects[name] = _sizes(peer.memory(settings.lengths, seed), {})
    generator = torch.Generator().manual_seed(seed)
    for length in settings.speed_lengths:
        tell(f"speed at {length:,} tokens")
        size = (1, length + settings.decode_tokens)
        ids = torch.randint(shape.vocab_size, size, generator=generator)
        for name, speed in _speeds(model, candidates, ids, length, settings).items():
            subjects[name]["speed"].append(_timed(speed))
    return {"settings": asdict(settings), "subjects": subjects}


def write_cost(
    folder: Path,
    model: Any,
    candidates: Mapping[str, AddOnLike],
    settings: CostSettings,
    *,
    seed: int = 0,
    peers: Mapping[str, Peer] | None = None,
    on_progress: Callable[[str], None] | None = None,
    described_model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`cost_of` in a run folder's `cost.json`; what is there of the same subjects is kept.

    But not what other sources of kvfold measured: they may be faster, or store other bytes. A
    commit that changes no source of the package leaves it as it is.

    described_model: by `describe_model`, where it is known already: it reads all weights.
    """
    path = folder / COST_FILE
    described = {name: describe_addon(addon) for name, addon in candidates.items()}
    machine = environment()["machine"]
    plain = describe_model(model, None) if described_model is None else described_model
    asked_peers = {name: peer.describe() for name, peer in (peers or {}).items()}
    key = _key(plain, described, asdict(settings), seed, machine, asked_peers)
    before = read_cost(folder)
    code, measured_by = code_state(), before.get("code") or {}
    if before.get("digest") == key and measured_by.get("sources") == code["sources"]:
        return before
    made = cost_of(model, candidates, settings, seed=seed, peers=peers, on_progress=on_progress)
    data = {"digest": key, "machine": machine, "code": code, **made}
    write_json(path, data)
    return read_json(path)


def read_cost(folder: Path) -> dict[str, Any]:
    """What `write_cost` wrote into a run folder, empty if nothing; raises `EvaluationError`."""
    path = folder / COST_FILE
    if not path.exists():
        return {}
    data = read_json(path)
    check_shape(data, CostShape, path, "delete it and run the same command again")
    return data


def is_cost_of(
    cost: Mapping[str, Any],
    run: Mapping[str, Any],
    metrics: Mapping[str, Any],
    addons: Mapping[str, Any],
) -> bool:
    """Whether a cost was measured of the very subjects that answered.

    run, metrics: what `run.json` and `metrics.json` hold. addons: by subject, as described beside
    its answers; without one of them, or of the model, only names can be compared.
    """
    if set(cost["subjects"]) != set(metrics["subjects"]):
        return False
    peers = run.get("peers", {})
    names = [n for n in metrics["subjects"] if n != metrics["plain"] and n not in peers]
    if "model" not in run or any(addons.get(name) is None for name in names):
        return True
    described = {name: addons[name] for name in names}
    key = _key(run["model"], described, cost["settings"], metrics["seed"], cost["machine"], peers)
    return bool(cost["digest"] == key)


def _key(
    model: Mapping[str, Any],
    addons: Mapping[str, Any],
    settings: Mapping[str, Any],
    seed: int,
    machine: Mapping[str, Any],
    peers: Mapping[str, Any],
) -> str:
    """The digest of all that a cost depends on but the code, which lies beside it in the file.

    So a report of a later kvfold shows what an earlier one measured, and names its commit.
    """
    asked: list[Any] = [{**model, "tokenizer": None}, addons, settings, seed, machine]
    if peers:
        asked.append(peers)
    return digest(json.loads(json.dumps(asked)))


def _sizes(memory: Sequence[Memory], resident: dict[str, int]) -> dict[str, Any]:
    """A subject's entry, without times."""
    return {
        "addon_bytes": memory[0].addon_bytes if memory else 0,
        "resident": resident,
        "memory": [{**asdict(entry), **entry.derived()} for entry in memory],
        "speed": [],
    }


def _speeds(
    model: Any,
    candidates: Mapping[str, AddOnLike],
    ids: Tensor,
    length: int,
    settings: CostSettings,
) -> dict[str, Speed]:
    chosen = SpeedSettings(
        history=length, decode_tokens=settings.decode_tokens, repeats=settings.repeats
    )
    return measure_speed(model, {PLAIN: None, **candidates}, ids, chosen)


def _timed(speed: Speed) -> dict[str, Any]:
    """Plain data, with the seconds of the prefill."""
    return {**asdict(speed), "prefill_seconds": speed.history / speed.prefill_tokens_per_second}
