"""An add-on: a plan's fitted methods, the base model they belong to, and how well they fit.

On disk it is a folder of two files. `addon.safetensors` holds the weights by their names in the
plan's pipelines. `addon.json` holds the format version, the plan, the base model's fingerprint,
the fit report, library versions, and digests of both files; a changed byte is an error, not
another model. Nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvfold.errors import AddOnError, PlanError
from kvfold.methods import (
    Lora,
    StateProjector,
    build_lora,
    build_pipelines,
    build_state_projector,
    depth_methods,
)
from kvfold.plan import Plan
from kvfold.store.fingerprint import Fingerprint
from kvfold.store.folder import check_replaceable, previous, replacing
from kvfold.store.shipped import shipped, shipped_folder

FORMAT_VERSION = 4
OLDEST_READABLE = 2
"""Version 2 knew no prefill skipping, and so no state projectors; version 3 no low-rank terms."""
WEIGHTS_FILE = "addon.safetensors"
DESCRIPTION_FILE = "addon.json"
STATE_PROJECTOR = "state_projector."
LORA = "lora."
MAX_DESCRIPTION_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 16 * 2**20
AGAIN = "fetch the add-on again, or fit it anew"


class AddOn:
    """A fitted plan, ready to be attached to its base model.

    plan: the plan. pipelines: one `Pipeline` per code, in the order of `build_pipelines`. base:
    the model's fingerprint. report: plain data, see `kvfold.fitting.report`. state_projector: of
    the upper linear-attention layers, where the plan asks for one. lora: low-rank terms on
    projections, likewise.
    """

    def __init__(
        self,
        plan: Plan,
        pipelines: nn.ModuleList,
        base: Fingerprint,
        report: Mapping[str, Any],
        state_projector: StateProjector | None = None,
        lora: Lora | None = None,
    ) -> None:
        self.plan = plan
        self.pipelines = pipelines
        self.base = base
        self.report = dict(report)
        self.state_projector = state_projector
        self.lora = lora

    @classmethod
    def untrained(cls, model: Any, plan: Plan) -> AddOn:
        """The plan's methods with zero weights for a model: for plans that have no weights.

        Low-rank terms start as `kvfold.methods.lora` says, which changes nothing yet.
        """
        base = Fingerprint.of(model)
        pipelines = build_pipelines(plan, base.anatomy)
        projector = build_state_projector(plan, base.anatomy)
        lora = build_lora(plan, base.anatomy)
        reference = next(model.parameters())
        made = cls(plan, pipelines, base, {}, projector, lora)
        return made.to(device=reference.device, dtype=reference.dtype)

    def __repr__(self) -> str:
        """Base model, methods and size."""
        found = sorted({method.name for method in depth_methods(self.pipelines)})
        names = ", ".join(found + ["lora"] * (self.lora is not None)) or "nothing"
        return f"AddOn({names} for {self.base.name!r}, {self.parameter_bytes():,} bytes)"

    def to(self, *args: Any, **kwargs: Any) -> AddOn:
        """Move the weights to a device or dtype, as `nn.Module.to` does; returns itself."""
        for part in self._parts().values():
            part.to(*args, **kwargs).requires_grad_(False)
        return self

    def _parts(self) -> dict[str, nn.Module]:
        """What has weights, by the beginning of their names on disk."""
        own: dict[str, nn.Module] = {"": self.pipelines}
        if self.state_projector is not None:
            own[STATE_PROJECTOR] = self.state_projector
        if self.lora is not None:
            own[LORA] = self.lora
        return own

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every weight."""
        for part in self._parts().values():
            yield from part.parameters()

    def check_base(self, model: Any) -> None:
        """Raise `AddOnError`, naming both models, unless the add-on belongs to this one."""
        self.base.check(model)

    def parameter_bytes(self) -> int:
        """Bytes of the add-on's weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, beside: Mapping[str, bytes] | None = None
    ) -> None:
        """Write the add-on to a folder, whole or not at all.

        An add-on that is there already is replaced in one rename, and other files beside it are
        kept. beside: further files by name, written with it. Raises `AddOnError` for a path that
        holds something else.
        """
        more = dict(beside or {})
        target = Path(folder).absolute()
        check_replaceable(target, DESCRIPTION_FILE, "an add-on")
        with replacing(target, (WEIGHTS_FILE, DESCRIPTION_FILE, *more)) as made:
            self._write(made)
            for name, content in more.items():
                (made / name).write_bytes(content)

    def export_lora(self, model: Any, folder: str | os.PathLike[str]) -> None:
        """Write the low-rank terms as a peft adapter of the base model.

        `PeftModel.from_pretrained(base, folder)` then adds what the add-on adds, and its
        `merge_and_unload()` gives plain weights for engines that want them; the folding itself is
        no part of it. model: the base, as it is. Raises `AddOnError` for another model, for an
        add-on without such terms or a folder of something else, `MissingExtraError` without peft.
        """
        from kvfold.store.peft_export import export_lora

        self.check_base(model)
        if self.lora is None:
            raise AddOnError(
                "only an add-on with low-rank terms can be written as a peft adapter; this one's "
                "plan has no lora; train one with it"
            )
        export_lora(model, self.lora, Path(folder))

    def _write(self, folder: Path) -> None:
        weights = {name: tensor.contiguous().cpu() for name, tensor in _named(self._parts())}
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        description = {
            "format_version": FORMAT_VERSION,
            "plan": self.plan.to_dict(),
            "base": self.base.to_dict(),
            "report": self.report,
            "states_kept": _states_kept(self.state_projector),
            "versions": _versions(),
            "weights_sha256": _file_digest(folder / WEIGHTS_FILE),
        }
        description["sha256"] = _description_digest(description)
        (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1) + "\n")

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> AddOn:
        """Read an add-on from a folder, by the name of one that comes with kvfold, or a hub id.

        revision: of the hub repository. dtype, device: where to put the weights; as stored and
        on the CPU by default. Raises `AddOnError` for files that are missing, damaged, of an
        unknown version, or do not fit their own plan.
        """
        folder = _find(name_or_path, revision)
        description = _read_description(folder / DESCRIPTION_FILE)
        base = Fingerprint.from_dict(description.get("base"))
        try:
            plan = Plan.from_dict(description.get("plan"))
            with torch.device("meta"):
                pipelines = build_pipelines(plan, base.anatomy)
                projector = build_state_projector(plan, base.anatomy)
                lora = build_lora(plan, base.anatomy)
        except PlanError as error:
            raise AddOnError(f"the add-on in {folder} has no valid plan: {error}") from error
        report = description.get("report") or {}
        if not isinstance(report, dict):
            raise AddOnError(
                f"the report of the add-on in {folder} must be a mapping; got "
                f"{type(report).__name__}; {AGAIN}"
            )
        if projector is not None:
            _read_states_kept(projector, description.get("states_kept"), folder)
        made = cls(plan, pipelines, base, report, projector, lora)
        digest = str(description.get("weights_sha256"))
        _load_weights(made._parts(), folder / WEIGHTS_FILE, digest)
        return made.to(device=device, dtype=dtype)


def _named(parts: Mapping[str, nn.Module]) -> list[tuple[str, Tensor]]:
    """Weights by name; one that two methods share appears once."""
    return [
        (beginning + name, tensor.detach())
        for beginning, part in parts.items()
        for name, tensor in part.named_parameters()
    ]


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("kvfold", "torch", "transformers", "safetensors"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _description_digest(description: Mapping[str, Any]) -> str:
    content = {key: value for key, value in description.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _find(name_or_path: str | os.PathLike[str], revision: str | None) -> Path:
    path = Path(name_or_path)
    if not path.exists() and previous(path).is_dir():
        return previous(path)  # killed between the two renames of a replacement
    if path.is_dir():
        return path
    name = str(name_or_path)
    if not path.exists() and (own := shipped_folder(name)) is not None:
        return own
    if path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise AddOnError(
            f"an add-on is a folder with {DESCRIPTION_FILE} and {WEIGHTS_FILE}, one that comes "
            f"with kvfold ({', '.join(shipped())}), or a hub id such as owner/name; there is none "
            f"such as {name}; check the path"
        )
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=[DESCRIPTION_FILE, WEIGHTS_FILE]
        )
    except Exception as error:
        raise AddOnError(
            f"{name} must be a folder on this machine or an add-on on the hub; neither was found "
            f"({type(error).__name__}: {error}); check its spelling and your connection"
        ) from error
    return Path(found)


def _read_description(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise AddOnError(
            f"an add-on has a file {DESCRIPTION_FILE}; {path.parent} has none; check that it is "
            "an add-on's folder"
        )
    if path.stat().st_size > MAX_DESCRIPTION_BYTES:
        raise AddOnError(
            f"{path} must be at most {MAX_DESCRIPTION_BYTES:,} bytes; it has "
            f"{path.stat().st_size:,}; {AGAIN}"
        )
    try:
        description = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AddOnError(f"{path} must be JSON text; it is damaged ({error}); {AGAIN}") from error
    if not isinstance(description, dict):
        raise AddOnError(f"{path} must hold a JSON object; got a list or a value; {AGAIN}")
    version = description.get("format_version")
    if not isinstance(version, int) or not OLDEST_READABLE <= version <= FORMAT_VERSION:
        raise AddOnError(
            f"this kvfold reads add-ons of format versions {OLDEST_READABLE} to {FORMAT_VERSION}; "
            f"{path} has version {version!r}; install the kvfold that wrote it, or fit the add-on "
            "anew"
        )
    if description.get("sha256") != _description_digest(description):
        raise AddOnError(f"{path} was damaged or edited: its digest does not match; {AGAIN}")
    return description


def _states_kept(projector: StateProjector | None) -> dict[str, Any] | None:
    """What a state projector was told of decay, as plain data."""
    if projector is None:
        return None
    kept = {str(layer): list(shares) for layer, shares in projector.kept.items()}
    return {"replay": projector.measured_replay, "kept": kept}


def _read_states_kept(projector: StateProjector, data: Any, folder: Path) -> None:
    try:
        kept = {layer: data["kept"][str(layer)] for layer in projector.layers}
        projector.set_kept(data["replay"], kept)
    except (KeyError, TypeError, ValueError) as error:
        raise AddOnError(
            f"the add-on in {folder} must say what is left of each state after how many tokens; "
            f"states_kept is not as kvfold writes it ({type(error).__name__}: {error}); {AGAIN}"
        ) from error


def _load_weights(parts: Mapping[str, nn.Module], path: Path, digest: str) -> None:
    expected = dict(_named(parts))
    if not path.is_file():
        raise AddOnError(f"an add-on has a file {WEIGHTS_FILE}; {path.parent} has none; {AGAIN}")
    most = MAX_HEADER_BYTES + sum(8 * tensor.numel() for tensor in expected.values())
    size = path.stat().st_size
    if size > most:
        raise AddOnError(
            f"{path} has {size:,} bytes, more than the {most:,} that its plan can need; {AGAIN}"
        )
    if _file_digest(path) != digest:
        raise AddOnError(f"{path} is truncated or damaged: its digest does not match; {AGAIN}")
    try:
        with safe_open(path, framework="pt") as file:
            received = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise AddOnError(f"{path} must be a safetensors file ({error}); {AGAIN}") from error
    check_names_and_shapes(
        {name: tuple(tensor.shape) for name, tensor in expected.items()},
        {name: tuple(tensor.shape) for name, tensor in received.items()},
        str(path),
    )
    stored = {tensor.dtype for tensor in received.values()}
    if not all(dtype.is_floating_point for dtype in stored):
        raise AddOnError(f"the tensors of {path} must be floating; got {stored}; {AGAIN}")
    for part in parts.values():
        part.to_empty(device="cpu")
        if len(stored) == 1:
            part.to(next(iter(stored)))
    with torch.no_grad():
        for name, tensor in _named(parts):
            tensor.copy_(received[name])


def check_names_and_shapes(
    expected: Mapping[str, tuple[int, ...]], received: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise `AddOnError` that lists what is missing, unexpected or of another shape."""
    problems = []
    missing = sorted(set(expected) - set(received))
    unexpected = sorted(set(received) - set(expected))
    wrong = sorted(n for n in set(expected) & set(received) if expected[n] != received[n])
    if missing:
        problems.append("missing: " + ", ".join(f"{n} {list(expected[n])}" for n in missing))
    if unexpected:
        found = ", ".join(f"{name} {list(received[name])}" for name in unexpected)
        problems.append(f"not expected: {found}")
    if wrong:
        shapes = ", ".join(f"{n} {list(received[n])} instead of {list(expected[n])}" for n in wrong)
        problems.append(f"of another shape: {shapes}")
    if problems:
        raise AddOnError(
            f"the tensors of {where} must be those of the plan; {'; '.join(problems)}; check "
            "that the file and the plan belong together"
        )
