"""What a stored cache depends on besides its text: the model, the add-on, and how they ran.

Two attachments of one identity make the same cache of the same text. The model is told by the
digest of its fingerprint, the add-on by that of all its weights, as they were when attached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from kvfold.errors import SnapshotError
from kvfold.runtime.attach import Attachment
from kvfold.runtime.weights_digest import weights_digest
from kvfold.store.fingerprint import Fingerprint

WITH_CODES = " with codes"


@dataclass(frozen=True)
class Identity:
    """Who made a cache.

    model_name: for messages only. model, addon: digests. plan: as plain data. dtype: the model's.
    resident: how each folded layer reads its history, by layer, which decides what is stored, and
    whether codes are kept beside.
    """

    model_name: str
    model: str
    addon: str
    plan: Mapping[str, Any]
    dtype: str
    resident: Mapping[str, str]

    @classmethod
    def of(cls, attachment: Attachment) -> Identity:
        """The identity of what an attachment makes; reads all weights of the add-on once."""
        fingerprint = Fingerprint.of(attachment.model)
        described = fingerprint.to_dict()
        described.pop("name")
        return cls(
            model_name=fingerprint.name,
            model=_digest(json.dumps(described, sort_keys=True).encode()),
            addon=_addon_digest(attachment),
            plan=json.loads(json.dumps(attachment.plan.to_dict())),
            dtype=str(attachment.model.dtype).removeprefix("torch."),
            resident={
                str(layer): reading + WITH_CODES * attachment.keeps_codes
                for layer, reading in attachment.resident.items()
            },
        )

    @property
    def digest(self) -> str:
        """One digest of everything but the model's name."""
        content = self.to_dict()
        content.pop("model_name")
        return _digest(json.dumps(content, sort_keys=True).encode())

    def check(self, other: Identity) -> None:
        """Raise `SnapshotError`, naming what differs, unless `other` makes the same caches."""
        reason = self._difference(other)
        if reason is not None:
            raise SnapshotError(
                "a stored cache can go on only with the model, add-on, plan and dtype that made "
                f"it; {reason}; attach as it was made, or make it anew"
            )

    def _difference(self, other: Identity) -> str | None:
        if self.model != other.model and self.dtype == other.dtype:
            return (
                f"it was made by {self.model_name!r}, and {other.model_name!r} has other weights "
                "or another shape"
            )
        if self.dtype != other.dtype:
            return f"it was made in {self.dtype}, and the model is in {other.dtype}"
        if self.plan != other.plan:
            keys = [k for k in {**self.plan, **other.plan} if self.plan.get(k) != other.plan.get(k)]
            told = (f"{k} was {self.plan.get(k)!r} and is {other.plan.get(k)!r}" for k in keys)
            return "of its plan " + ", ".join(told)
        if self.addon != other.addon:
            return "it was made with an add-on of the same plan and other weights"
        if self.resident != other.resident:
            return (
                f"its layers were read as {_readings(self.resident)} and are now read as "
                f"{_readings(other.resident)} (name `resident` in the plan instead of auto, and "
                "attach with the same keep_codes)"
            )
        return None

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Identity:
        """Read what `to_dict` made; raises `SnapshotError` for anything else."""
        texts = ("model_name", "model", "addon", "dtype")
        maps = ("plan", "resident")
        good = isinstance(data, dict) and set(data) == {*texts, *maps}
        good = good and all(isinstance(data[key], str) for key in texts)
        if not good or not all(isinstance(data[key], dict) for key in maps):
            raise SnapshotError(
                "a snapshot must say which model, add-on and plan made it; its description is not "
                "as kvfold writes it; make it anew"
            )
        return cls(**data)


def _readings(resident: Mapping[str, str]) -> str:
    return ", ".join(sorted(set(resident.values()))) or "nothing"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _addon_digest(attachment: Attachment) -> str:
    """Of every weight that has a part in what is stored, by name, dtype and shape."""
    projector = attachment.addon.state_projector
    decay = []
    if projector is not None:
        decay = [repr((projector.measured_replay, sorted(projector.kept.items())))]
    return weights_digest(_weights(attachment), *decay)


def _weights(attachment: Attachment) -> Iterator[tuple[str, Tensor]]:
    addon = attachment.addon
    for number, pipeline in enumerate(attachment.pipelines):
        yield from ((f"{number}.{name}", w) for name, w in sorted(pipeline.state_dict().items()))
    for name, part in (("state_projector", addon.state_projector), ("lora", addon.lora)):
        if part is not None:
            yield from ((f"{name}.{n}", w) for n, w in sorted(part.state_dict().items()))
