"""What serving costs inside one process: the way of a stored prompt, and its bytes.

Nothing is served here; each part is run by itself, so that its time and bytes can be told apart.
"""

from __future__ import annotations

import hashlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DynamicCache

from kvfold import models
from kvfold.anatomy import anatomy
from kvfold.budget import history_bytes, plain_history_bytes
from kvfold.fitting.machine import Machine
from kvfold.plan import Plan
from kvfold.presets import preset
from kvfold.runtime.attach import Attachment, attach
from kvfold.runtime.feeding import last_logits
from kvfold.runtime.ledger import plain_bytes, predict_bytes
from kvfold.serving.choice import Choice
from kvfold.serving.lane import PREFILL_CHUNK
from kvfold.serving.request import Request, Sampling, Ticket
from kvfold.store.addon import AddOn
from kvfold.store.prefix_store import PrefixStore
from kvfold.store.snapshot import Snapshot

WEIGHT_SCALE = 0.02


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median seconds and the last result."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        made = work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), made


def operations_a_token(model: Any) -> float:
    """Of the layers alone: two for each weight; attention's own, which depend on lengths, apart."""
    inner = sum(weight.numel() for weight in model.model.layers.parameters())
    return 2.0 * inner


def head_operations(model: Any) -> float:
    """Of the logits of one token."""
    return 2.0 * model.config.hidden_size * model.config.vocab_size


def weight_bytes(model: Any) -> int:
    """What a decode step must read of the model once: layers and head."""
    layers = sum(weight.nbytes for weight in model.model.layers.parameters())
    return layers + int(head_operations(model) / 2) * int(model.dtype.itemsize)


def way_of_a_stored_prompt(
    attachment: Attachment, tokenizer: Any, store: Path, ids: list[int], repeats: int
) -> dict[str, Any]:
    """Seconds of each stage between a prompt that is in a store and its first token."""
    prefixes, model = PrefixStore(store), attachment.model
    identity = prefixes.identity(attachment)  # worked out once, when a server starts
    whole, found = timed(lambda: prefixes.longest(attachment, ids), repeats)
    if found is None:
        raise RuntimeError(f"the store at {store} must hold a prefix of the prompt")
    read, content = timed(lambda: prefixes.place.read(found.name), repeats)
    checksum, _ = timed(lambda: hashlib.sha256(content).digest(), repeats)
    parse, _ = timed(
        lambda: Snapshot.read(io.BytesIO(content), len(content), attachment, identity=identity),
        repeats,
    )
    place, _ = timed(lambda: attachment.cache_from([found.state]), repeats)
    rest = torch.tensor([ids[found.tokens :]])
    forwards = []
    for _ in range(repeats):
        cache = attachment.cache_from([found.state])
        began = time.perf_counter()
        logits = last_logits(model, rest, cache, [found.tokens])
        forwards.append(time.perf_counter() - began)
    request = Request("any", tuple(ids), 4, sampling=Sampling(temperature=0))

    def sample() -> Any:
        choice = Choice(Ticket(request, lambda event: None), 0, tokenizer, frozenset())
        return choice.take(logits[0], int(logits[0].argmax()))

    sampling, _ = timed(sample, repeats)
    return {
        "tokens_from_store": found.tokens,
        "tokens_left": rest.shape[1],
        "file_bytes": found.file_bytes,
        "seconds": {
            "look up": max(0.0, whole - read - parse),
            "read": read,
            "checksum": checksum,
            "parse": max(0.0, parse - checksum),
            "place": place,
            "forward of the last tokens": statistics.median(forwards),
            "sampling": sampling,
        },
    }


def limits_of(way: dict[str, Any], model: Any, machine: Machine, plain_size: int) -> dict[str, Any]:
    """What no server on this machine could be quicker than, for the same stages."""
    rate = next(iter(machine.operations.values()))
    operations = way["tokens_left"] * operations_a_token(model) + head_operations(model)
    cold = (way["tokens_from_store"] + way["tokens_left"]) * operations_a_token(model)
    return {
        "bytes of the file, moved once": way["file_bytes"] / machine.bandwidth,
        "bytes of the cache, written once": plain_size / machine.bandwidth,
        "operations of the last tokens": operations / rate,
        "operations of the whole prompt": (cold + head_operations(model)) / rate,
    }


def read_in_chunks(model: Any, ids: torch.Tensor, cache: Any) -> Any:
    """A cache that has read ids (1, tokens) as the server reads a prompt."""
    for start in range(0, ids.shape[1], PREFILL_CHUNK):
        last_logits(model, ids[:, start : start + PREFILL_CHUNK], cache, [start])
    return cache


def stored_bytes(
    name: str, dtypes: list[torch.dtype], plans: list[str], ids: torch.Tensor
) -> list[dict[str, Any]]:
    """A prompt's file under each plan beside transformers' plain cache saved with safetensors."""
    lines = []
    for dtype in dtypes:
        model, _ = models.load(name, dtype=dtype)
        plain = _plain_file(model, ids)
        for plan in plans:
            line = _stored(model, plan, ids)
            line["plain_file_bytes"] = plain
            line["times_smaller"] = plain / line["file_bytes"]
            lines.append({"dtype": str(dtype).removeprefix("torch."), **line})
    return lines


def _plain_file(model: Any, ids: torch.Tensor) -> int:
    """Bytes of the plain cache's tensors in one safetensors file."""
    cache = read_in_chunks(model, ids, DynamicCache(config=model.config))
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(cache.layers):
        for kind in ("keys", "values", "conv_states", "recurrent_states"):
            held = getattr(layer, kind, None)
            pieces = held.values() if isinstance(held, dict) else [held]
            for number, tensor in enumerate(pieces):
                if tensor is not None:
                    tensors[f"{index}.{kind}.{number}"] = tensor.contiguous()
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "plain.safetensors")
        return (Path(folder) / "plain.safetensors").stat().st_size


def _stored(model: Any, plan: str, ids: torch.Tensor) -> dict[str, Any]:
    shape, size, tokens = anatomy(model), model.dtype.itemsize, ids.shape[1]
    if plan in ("4x", "8x", "csa2"):
        addon = AddOn.untrained(model, preset(plan, shape))
        for weight in addon.pipelines.parameters():
            weight.data.normal_(std=WEIGHT_SCALE)
    else:
        addon = AddOn.from_pretrained(plan).to(dtype=model.dtype, device=model.device)
    with attach(model, addon, keep_codes=True) as attachment:
        cache = read_in_chunks(model, ids, attachment.new_cache())
        (state,) = attachment.rows_of(cache)
        snapshot = Snapshot.of(cache)
        file_bytes = len(snapshot.to_bytes())
    kept = {name.split(".", 2)[2] for name in snapshot.rows[0].tensors if ".slots." in name}
    return {
        "plan": plan,
        "tokens": tokens,
        "file_bytes": file_bytes,
        "tensor_bytes": snapshot.rows[0].nbytes(),
        "bytes_without_codes_alone": state.nbytes(),
        "slots_left_in": sorted(kept),
        "plan_times_smaller_a_token_of_history": plain_history_bytes(shape)
        / history_bytes(addon.plan, shape),
        "plan_times_smaller_at_this_length": plain_bytes(
            shape, tokens, element_size=size
        ).total / _predicted(addon.plan, shape, tokens, size),
    }  # fmt: skip


def _predicted(plan: Plan, shape: Any, tokens: int, size: int) -> int:
    """What the plan says that a row holds after so many tokens, its history as codes alone."""
    told = predict_bytes(plan.replace(resident="shared"), shape, tokens, element_size=size)
    return told.total - told["unused"]
