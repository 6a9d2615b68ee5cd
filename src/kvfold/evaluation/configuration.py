"""What an answer depends on, as plain data with a digest: model, add-on, tokenizer, task, versions.

Two runs whose digests are equal would give the same answers, so the second need not be made. All
weights are in the digest, not the names that they go by: a folder that was moved is the same
model, one that was trained on is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from torch import nn

from kvfold import __version__
from kvfold.errors import EvaluationError
from kvfold.evaluation.tasks.task import Task
from kvfold.runtime.attach import AddOnLike
from kvfold.runtime.weights_digest import weights_digest

FORMAT = 1
NAMES = ("_name_or_path", "name_or_path", "transformers_version")
"""Entries of a model's configuration that change no answer."""


def digest(data: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys; raises `EvaluationError`."""
    try:
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EvaluationError(
            f"settings must be plain data, or a run can't be told from another; {error}; got "
            f"{data!r}"
        ) from None
    return hashlib.sha256(text.encode()).hexdigest()


def describe_model(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The plain model and its tokenizer, before anything is attached."""
    config, generation = model.config.to_dict(), getattr(model, "generation_config", None)
    settings = {} if generation is None else generation.to_dict()
    return {
        "model": weights_digest([*model.named_parameters(), *model.named_buffers()]),
        "config": digest(_without_names(config)),
        "generation": digest(_without_names(settings)),
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device.type),
        "tokenizer": _tokenizer_digest(tokenizer),
        "versions": {
            "kvfold": __version__,
            **{name: metadata.version(name) for name in ("torch", "transformers")},
        },
    }


def describe_addon(addon: AddOnLike | None) -> dict[str, Any] | None:
    """Its plan and its weights; None for none."""
    if addon is None:
        return None
    parts: tuple[nn.Module | None, ...] = (addon.pipelines, addon.state_projector, addon.lora)
    found: dict[str, Any] = {"plan": addon.plan.to_dict()}
    for name, part in zip(("pipelines", "state_projector", "lora"), parts, strict=True):
        if part is not None:
            found[name] = weights_digest([*part.named_parameters(), *part.named_buffers()])
    return found


def describe_task(task: Task, seed: int) -> dict[str, Any]:
    """A task's settings as plain data; seed: of what answering may draw."""
    return {
        "format": FORMAT,
        "task": task.name,
        "chunk": task.chunk,
        "seed": seed,
        "settings": dict(task.settings()),
    }


def changed_keys(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """What differs between two descriptions, as `settings.limit: 10 -> 20`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            yield from changed_keys(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-8:]}"


def _without_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A transformers configuration as plain data."""
    kept = {key: value for key, value in config.items() if key not in NAMES}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def _tokenizer_digest(tokenizer: Any) -> str | None:
    """Vocabulary, merges, special tokens and chat template; None for no tokenizer."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = dict(sorted(tokenizer.get_vocab().items()))
    else:
        whole = json.loads(backend.to_str())
        # set anew by every call of the tokenizer, so no part of what it is
        rules = {key: value for key, value in whole.items() if key not in ("padding", "truncation")}
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    template = getattr(tokenizer, "chat_template", None)
    return digest({"rules": rules, "special": special, "template": template})
