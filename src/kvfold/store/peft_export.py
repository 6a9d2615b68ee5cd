"""An add-on's low-rank terms as a peft adapter, for whatever loads one or merges it into the base.

Where a model makes several projections in one module, their terms become one of the sum of their
ranks: the rows of A stacked, and B in blocks that leave the other projections' rows at zero.

peft is optional and is imported here only.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import MissingExtraError
from kvfold.methods import Lora
from kvfold.runtime.adapters import AdaptedRows, check_projections
from kvfold.store.folder import check_replaceable, replacing

CONFIG_FILE = "adapter_config.json"
FILES = (CONFIG_FILE, "adapter_model.safetensors", "README.md")


def export_lora(model: Any, lora: Lora, folder: Path) -> None:
    """Write the terms to `folder` as peft writes an adapter of `model`, whole or not at all.

    The model is only looked at. Raises `MissingExtraError` without peft, `AddOnError` for a
    folder of something else.
    """
    peft = _peft()
    target = folder.absolute()
    check_replaceable(target, CONFIG_FILE, "a peft adapter")
    by_module = _by_module(model, lora)
    alpha = lora.scale * lora.rank
    several = {name: len(rows) for name, rows in by_module.items() if len(rows) > 1}
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        target_modules=list(by_module),
        rank_pattern={name: lora.rank * count for name, count in several.items()},
        alpha_pattern={name: alpha * count for name, count in several.items()},
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, at names that peft uses
        # peft changes a model in place, so it gets an outline of this one, without weights.
        outline = type(model)(copy.deepcopy(model.config))
        wrapped = peft.get_peft_model(outline, config)
    weights = {
        f"base_model.model.{name}.lora_{matrix}.default.weight": tensor
        for name, rows in by_module.items()
        for matrix, tensor in zip("AB", _stacked(rows), strict=True)
    }
    with replacing(target, FILES) as made:
        wrapped.save_pretrained(str(made), state_dict=weights, save_embedding_layers=False)


def _by_module(model: Any, lora: Lora) -> dict[str, list[AdaptedRows]]:
    """The terms of each module that has some, by the module's name in the model."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, list[AdaptedRows]] = {}
    for rows in check_projections(model, lora):
        found.setdefault(names[id(rows.module)], []).append(rows)
    return found


def _stacked(rows: Iterable[AdaptedRows]) -> tuple[Tensor, Tensor]:
    """A and B of one module's terms together: (ranks, inputs) and (all outputs, ranks)."""
    a, b = [], []
    for one in rows:
        own = one.term.b.detach().cpu()
        padded = own.new_zeros(one.outputs, own.shape[1])
        padded[one.start : one.start + own.shape[0]] = own
        a.append(one.term.a.detach().cpu())
        b.append(padded)
    return torch.cat(a), torch.cat(b, dim=1)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise MissingExtraError(
            "to write a peft adapter takes the `peft` package; install it with "
            "pip install 'kvfold[lora]'"
        ) from None
    return peft
