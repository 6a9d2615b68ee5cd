"""Reads the `.pt` files of the first model card: a CED projector and CSA2 adapters.

The card gives shapes but not the names inside its files, so tensors are recognised by shape and
by a word in their name. Both files may be nested dictionaries (names are then joined with dots)
and may hold anything else beside tensors, which is ignored.

- projector: two matrices of (kv_width, hidden), 1,024 x 2,560 in the card, one for K, one for V.
- adapters: for every reader, for K and for V, a base of (kv_width, kv_width) and, where the plan
  has `residual_hidden`, an up matrix of (residual_hidden, kv_width) and a down matrix of
  (kv_width, residual_hidden). The name has the layer's number, counted from 1 as in the card
  (24, 28, 32) or from 0 as in plans (23, 27, 31).

K and V are told by a name part such as `k`, `key`, `keys`, `k_proj`, `proj_k`, `w_k`, `to_k`,
`k_adapter`, `k20`, and the same with v. Matrices are those of `nn.Linear`: (out, in). Files are
read as plain data only: one that holds code is refused and never runs.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.anatomy import Anatomy
from kvfold.errors import AddOnError
from kvfold.methods import CedMaps, Csa2Fold, build_pipelines
from kvfold.methods.maps import ResidualMap
from kvfold.plan import Plan

MAX_FILE_BYTES = 8 * 2**30
MAX_DEPTH = 16
Place = tuple[int | None, str, str]
"""Reader (None: the projector), keys or values, and which of its tensors."""
Weights = dict[Place, Tensor]
_ROLE = re.compile(r"(?:^|.*_)(?P<role>k|v|key|value|keys|values)(?:\d*)(?:$|_.*)")
_JOINED = {"wk": "keys", "wv": "values", "kproj": "keys", "vproj": "values"}


def import_card(
    projector: Path | None, adapters: Path | None, plan: Plan, anatomy: Anatomy
) -> nn.ModuleList:
    """The pipelines of a `ced` + `csa2` plan with the weights of the card's files.

    projector, adapters: either may be None, its part then stays zero. plan: with one `ced` or
    `csa2` entry, or both, in the files' shapes (the preset `ced-csa2`). Give the result to
    `AddOn(plan, pipelines, Fingerprint.of(model), {})`. Raises `AddOnError` listing which names
    and shapes were expected and which came, and for files with code in them.
    """
    pipelines = build_pipelines(plan, anatomy)
    if projector is not None:
        _fill(_projector_maps(pipelines), read_tensors(Path(projector)), Path(projector), ())
    if adapters is not None:
        readers, maps = _adapter_maps(pipelines)
        _fill(maps, read_tensors(Path(adapters)), Path(adapters), readers)
    return pipelines.requires_grad_(False)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a `.pt` file by its dotted name; nothing in it is executed."""
    if not path.is_file():
        raise AddOnError(f"there must be a file {path}; there is none; check the path")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise AddOnError(
            f"{path} must have at most {MAX_FILE_BYTES:,} bytes; got {path.stat().st_size:,}; it "
            "is not an adapter file"
        )
    try:
        data: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise AddOnError(
            f"{path} must hold tensors and plain data only; it is damaged, or holds objects that "
            "would run code when loaded, and was not loaded; ask its author for a state dict of "
            "tensors"
        ) from error
    except Exception as error:
        raise AddOnError(
            f"{path} must be a file written by torch.save; it can't be read "
            f"({type(error).__name__}); fetch it again"
        ) from error
    return dict(_flatten(data, "", 0))


def _flatten(data: Any, prefix: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(data, Tensor):
        yield prefix or "tensor", data
    elif depth < MAX_DEPTH and isinstance(data, Mapping):
        for key, item in data.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    elif depth < MAX_DEPTH and isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            yield from _flatten(item, f"{prefix}.{index}" if prefix else str(index), depth + 1)


def _projector_maps(pipelines: nn.ModuleList) -> Weights:
    found = [module for module in pipelines.modules() if isinstance(module, CedMaps)]
    if len(found) != 1 or len(found[0].layers) != 1:
        raise AddOnError(
            "a projector file needs a plan with one ced entry of one layer, as the preset "
            f"ced-csa2 has on the card's model; got {len(found)} ced entries"
        )
    maps = found[0]
    layer = str(maps.layers[0])
    wanted: Weights = {}
    for role in ("keys", "values"):
        wanted.update(_parts(None, role, maps.get_submodule(f"{role}.{layer}")))
    return wanted


def _adapter_maps(
    pipelines: nn.ModuleList,
) -> tuple[tuple[int, ...], Weights]:
    found = [module for module in pipelines.modules() if isinstance(module, Csa2Fold)]
    if len(found) != 1 or found[0].form != "separate":
        raise AddOnError(
            "an adapters file needs a plan with one csa2 entry of form 'separate', as the preset "
            f"ced-csa2 has on the card's model; got {[method.form for method in found]}"
        )
    wanted: Weights = {}
    for role, maps in (("keys", found[0].keys), ("values", found[0].values)):
        for layer, module in maps.items():
            wanted.update(_parts(int(layer), role, module))
    return tuple(sorted({layer for layer, _, _ in wanted if layer is not None})), wanted


def _parts(layer: int | None, role: str, module: nn.Module) -> Weights:
    assert isinstance(module, ResidualMap)
    parts: Weights = {(layer, role, "base"): module.base.weight}
    if module.base.bias is not None:
        parts[layer, role, "bias"] = module.base.bias
    if module.mlp is not None:
        for part, index in (("up", 0), ("down", 2)):
            weight = module.mlp[index].weight
            assert isinstance(weight, Tensor)
            parts[layer, role, part] = weight
    return parts


def _role(name: str) -> str | None:
    """Whether a dotted name speaks of keys or of values, by its last part that says so."""
    for part in reversed(re.split(r"[^0-9A-Za-z_]+", name.lower())):
        if part in _JOINED:
            return _JOINED[part]
        match = _ROLE.fullmatch(part)
        if match:
            return "keys" if match["role"].startswith("k") else "values"
    return None


def _layer(name: str, numbers: Mapping[int, int]) -> int | None:
    """The reader that a name speaks of: the first of its numbers that is one's."""
    for digits in re.findall(r"\d+", name):
        if int(digits) in numbers:
            return numbers[int(digits)]
    return None


def _numbering(names: list[str], readers: tuple[int, ...]) -> dict[int, int]:
    """Numbers in names to 0-based layers, counted from 1 as in the card if that fits."""
    seen = {int(digits) for name in names for digits in re.findall(r"\d+", name)}
    first = 1 if {reader + 1 for reader in readers} <= seen else 0
    return {reader + first: reader for reader in readers}


@torch.no_grad()
def _fill(
    wanted: Weights,
    received: dict[str, Tensor],
    path: Path,
    readers: tuple[int, ...],
) -> None:
    numbers = _numbering(list(received), readers)
    left = dict(wanted)
    unknown = []
    for name, tensor in received.items():
        layer, role = _layer(name, numbers), _role(name)
        matches = [
            key
            for key, parameter in wanted.items()
            if key[:2] == (layer, role) and parameter.shape == tensor.shape
        ]
        if len(matches) > 1:
            raise AddOnError(
                f"{name} of {path} must be recognised by its shape {list(tensor.shape)}, but "
                f"{', '.join(part for _, _, part in matches)} of that layer all have it; import "
                "the weights by hand into pipelines made by kvfold.methods.build_pipelines"
            )
        match = matches[0] if matches and matches[0] in left else None
        if match is None or not tensor.is_floating_point():
            unknown.append(name)
            continue
        if not bool(torch.isfinite(tensor).all()):
            raise AddOnError(f"{name} of {path} must be finite; it is not; fetch the file again")
        left.pop(match).copy_(tensor)
    if left or unknown:
        raise AddOnError(_difference(path, wanted, left, received, unknown))


def _difference(
    path: Path,
    wanted: Weights,
    left: Weights,
    received: Mapping[str, Tensor],
    unknown: list[str],
) -> str:
    def named(key: Place) -> str:
        layer, role, part = key
        where = "projector" if layer is None else f"layers.{layer + 1}"
        return f"{where}.{role[0]}.{part} {list(wanted[key].shape)}"

    expected = ", ".join(named(key) for key in wanted)
    came = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in received.items())
    return (
        f"{path} must hold one tensor for each weight of the plan, recognised by shape, by k or v "
        f"and by layer number (from 1 or from 0) in its name. Expected: {expected}. Came: "
        f"{came or 'no tensors'}. Without a match: {', '.join(map(named, left)) or 'none'}; not "
        f"recognised: {', '.join(unknown) or 'none'}. Rename the file's entries, or use the plan "
        "that they were made for"
    )
