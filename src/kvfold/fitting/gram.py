"""Streamed second moments: all that a closed-form fit keeps of the text that it has seen.

`Gram` holds X'X, X'Y and the sums of both, so that its size does not depend on how many tokens
went by. `Sketch` holds `X'X Omega` for stacks too wide for that. Rows come in batches; products
of one batch are taken in float32 (float64 for float64 rows) and added up in float64. Rows are
first moved by the mean of the first batch, since float32 products of values far from zero (keys
with a large bias) would lose the variance that matters; the move is undone exactly in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import FitError
from kvfold.fitting.workers import Workers

State = dict[str, Any]
BLOCK = 1024
"""Columns of one block row of the triangle that is stored."""


def exact_dtype(x: Tensor) -> Tensor:
    """x in the dtype that batch products are taken in: float32, or float64 if it is that."""
    return x if x.dtype == torch.float64 else x.float()


class Moments:
    """Count, sums and sums of squares of rows, about a shift taken from the first batch."""

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        self.count = 0
        self.shift: Tensor | None = None
        self.sums = torch.zeros(width, dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.sums)

    def add(self, rows: Tensor) -> Tensor:
        """Take in rows (count, width); gives them back shifted, in the dtype of products."""
        rows = exact_dtype(rows)
        if self.shift is None:
            self.shift = rows.mean(0).double()
        shifted = rows - self.shift.to(rows.dtype)
        self.count += len(rows)
        self.sums += shifted.sum(0).double()
        self.squares += torch.linalg.vector_norm(shifted, dim=0).double().pow(2)
        return shifted

    @property
    def offset(self) -> Tensor:
        """The shift as a tensor, zeros before the first batch."""
        return torch.zeros_like(self.sums) if self.shift is None else self.shift

    @property
    def mean(self) -> Tensor:
        """Mean row: (width,), float64."""
        return self.offset + self.sums / max(1, self.count)

    @property
    def variance(self) -> Tensor:
        """Variance of each value: (width,), float64."""
        n = max(1, self.count)
        return (self.squares / n - (self.sums / n).pow(2)).clamp(min=0)

    def moved_sums(self, shift: Tensor) -> Tensor:
        """The sums about another shift."""
        return self.sums + self.count * (self.offset - shift)

    def merge(self, other: Moments) -> None:
        """Take in what another worker has seen."""
        if self.shift is None:
            self.shift = other.shift
        delta = other.offset - self.offset
        self.squares += other.squares + 2 * delta * other.sums + other.count * delta.pow(2)
        self.sums += other.moved_sums(self.offset)
        self.count += other.count

    def common_shift(self, workers: Workers) -> Tensor:
        """The first worker's shift, which others are moved to before they are added up."""
        return workers.all_of_first(self.offset.clone())

    def add_up(self, workers: Workers) -> None:
        """Have what all workers have seen; all must have the same shift."""
        count = torch.tensor([self.count], dtype=torch.float64, device=self.sums.device)
        self.count = int(workers.all_sum(count).item())
        workers.all_sum(self.sums)
        workers.all_sum(self.squares)

    def clear(self) -> None:
        """Forget all rows, but not the shift."""
        self.count = 0
        self.sums.zero_()
        self.squares.zero_()

    def state_dict(self) -> State:
        """Everything, as tensors and numbers."""
        return {
            "count": self.count,
            "shift": self.shift,
            "sums": self.sums,
            "squares": self.squares,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        shift = state["shift"]
        self.count = int(state["count"])
        self.shift = None if shift is None else shift.to(self.sums.device)
        self.sums.copy_(state["sums"])
        self.squares.copy_(state["squares"])


class Gram:
    """X'X of some features and X'Y with any number of targets.

    width: values of a feature row. targets: name and width of each target. Only the triangle of
    X'X is computed and stored, in block rows.
    """

    def __init__(
        self,
        width: int,
        targets: Mapping[str, int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.width = width
        self.features = Moments(width, device)
        self.targets = {name: Moments(w, device) for name, w in (targets or {}).items()}
        self.strips = [
            torch.zeros(min(BLOCK, width - i), width - i, dtype=torch.float64, device=device)
            for i in range(0, width, BLOCK)
        ]
        self.cross = {
            name: torch.zeros(width, w, dtype=torch.float64, device=device)
            for name, w in (targets or {}).items()
        }

    @property
    def count(self) -> int:
        """Rows seen."""
        return self.features.count

    def add(self, features: Tensor, targets: Mapping[str, Tensor] | None = None) -> None:
        """Take in one batch: features (..., width), each target (..., its width)."""
        x = self.features.add(features.reshape(-1, self.width))
        for strip, i in self._strips():
            strip += x[:, i : i + BLOCK].T @ x[:, i:]
        for name, target in (targets or {}).items():
            y = self.targets[name].add(target.reshape(len(x), -1))
            self.cross[name] += x.T @ y

    def _strips(self) -> list[tuple[Tensor, int]]:
        return [(strip, i * BLOCK) for i, strip in enumerate(self.strips)]

    def merge(self, other: Gram) -> None:
        """Take in what another worker has seen of other rows."""
        if self.features.shift is None:
            self.features.shift = other.features.shift
        delta, sums = other.features.offset - self.features.offset, other.features.sums
        for (strip, i), theirs in zip(self._strips(), other.strips, strict=True):
            rows = slice(i, i + BLOCK)
            moved = sums + other.count * delta
            strip += theirs + torch.outer(delta[rows], moved[i:])
            strip += torch.outer(sums[rows], delta[i:])
        for name, cross in self.cross.items():
            mine, its = self.targets[name], other.targets[name]
            target_delta = its.offset - (its if mine.shift is None else mine).offset
            cross += other.cross[name] + torch.outer(sums, target_delta)
            cross += torch.outer(delta, its.sums + other.count * target_delta)
            mine.merge(its)
        self.features.merge(other.features)

    def add_up(self, workers: Workers) -> None:
        """Have what all workers have seen: their shares of the rows in one, the same in each."""
        if workers.count == 1:
            return
        widths = {name: len(moments.sums) for name, moments in self.targets.items()}
        moved = Gram(self.width, widths, self.features.sums.device)
        moved.features.shift = self.features.common_shift(workers)
        for name, moments in self.targets.items():
            moved.targets[name].shift = moments.common_shift(workers)
        moved.merge(self)
        for tensor in (*moved.strips, *moved.cross.values()):
            workers.all_sum(tensor)
        for moments in (moved.features, *moved.targets.values()):
            moments.add_up(workers)
        self.features, self.targets = moved.features, moved.targets
        self.strips, self.cross = moved.strips, moved.cross

    def clear(self) -> None:
        """Forget all rows, but not the shifts: what another worker keeps is not kept twice."""
        for moments in (self.features, *self.targets.values()):
            moments.clear()
        for tensor in (*self.strips, *self.cross.values()):
            tensor.zero_()

    def times(self, x: Tensor, *, centred: bool = True) -> Tensor:
        """`X'X x / count` for x (width, columns), in the dtype of x; about the mean if centred."""
        n = max(1, self.count)
        result = torch.zeros_like(x)
        for strip, i in self._strips():
            rows = slice(i, i + len(strip))
            block = strip.to(x.dtype)
            result[rows].addmm_(block, x[i:])
            result[i + len(strip) :].addmm_(block[:, len(strip) :].T, x[rows])
        result /= n
        moment = (self.features.sums / n).to(x.dtype)
        if centred:
            return result.sub_(torch.outer(moment, moment @ x))
        shift = self.features.offset.to(x.dtype)
        return result + torch.outer(moment, shift @ x) + torch.outer(shift, (moment + shift) @ x)

    def covariance(self, *, centred: bool = True) -> Tensor:
        """`X'X / count` as one matrix (width, width), float64; about the mean if centred."""
        n = max(1, self.count)
        full = self.strips[0].new_empty(self.width, self.width)
        for strip, i in self._strips():
            rows = slice(i, i + len(strip))
            full[rows, i:] = strip / n
            full[i:, rows] = (strip / n).T
        moment = self.features.sums / n
        if centred:
            return full - torch.outer(moment, moment)
        shift = self.features.offset
        return full + torch.outer(moment, shift) + torch.outer(shift, moment + shift)

    def cross_covariance(self, name: str, *, centred: bool = True) -> Tensor:
        """`X'Y / count` for one target (width, target width), float64; about means if centred."""
        n = max(1, self.count)
        x, y = self.features, self.targets[name]
        product = self.cross[name] / n - torch.outer(x.sums / n, y.sums / n)
        return product if centred else product + torch.outer(x.mean, y.mean)

    def state_dict(self) -> State:
        """Everything, as tensors and numbers."""
        return {
            "features": self.features.state_dict(),
            "targets": {name: moments.state_dict() for name, moments in self.targets.items()},
            "strips": list(self.strips),
            "cross": dict(self.cross),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.features.load_state_dict(state["features"])
        for name, moments in self.targets.items():
            moments.load_state_dict(state["targets"][name])
            self.cross[name].copy_(state["cross"][name])
        for strip, theirs in zip(self.strips, state["strips"], strict=True):
            strip.copy_(theirs)


class Sketch:
    """`X'X Omega` for a seeded random Omega of `columns` columns, and X's own moments.

    Omega holds a few signs in each row (a sparse embedding), so that `X Omega` costs next to
    nothing. scale: divides each feature before Omega, (width,), so that no source outweighs the
    rest; workers whose sketches are merged must share it.
    """

    SIGNS = 4
    SEED = 2_026

    def __init__(
        self, width: int, columns: int, scale: Tensor, device: torch.device | None = None
    ) -> None:
        self.width = width
        self.columns = columns
        self.scale = scale.double().to(device)
        self.features = Moments(width, device)
        self.product = torch.zeros(width, columns, dtype=torch.float64, device=device)
        generator = torch.Generator().manual_seed(self.SEED)
        chunks = -(-width // columns)
        orders = [torch.randperm(chunks * columns, generator=generator) for _ in range(self.SIGNS)]
        self.buckets = torch.stack([order[:width] % columns for order in orders]).to(device)
        signs = 2 * torch.randint(0, 2, (self.SIGNS, width), generator=generator) - 1
        self.signs = (signs / self.SIGNS**0.5).double().to(device)

    @property
    def count(self) -> int:
        """Rows seen."""
        return self.features.count

    def omega(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Omega with the scale divided out: (width, columns)."""
        full = torch.zeros_like(self.product, dtype=dtype)
        rows = torch.arange(self.width, device=full.device)
        for buckets, signs in zip(self.buckets, self.signs, strict=True):
            full.index_put_((rows, buckets), (signs / self.scale).to(dtype), accumulate=True)
        return full

    def _project(self, x: Tensor) -> Tensor:
        projected = x.new_zeros(len(x), self.columns)
        for buckets, signs in zip(self.buckets, self.signs, strict=True):
            projected.index_add_(1, buckets, x * (signs / self.scale).to(x.dtype))
        return projected

    def add(self, features: Tensor) -> None:
        """Take in one batch of features (..., width)."""
        x = self.features.add(features.reshape(-1, self.width))
        projected = self._project(x)
        for i in range(0, self.width, BLOCK):
            self.product[i : i + BLOCK] += x[:, i : i + BLOCK].T @ projected

    def centred_product(self) -> Tensor:
        """`C Omega` for the covariance C: (width, columns), float64."""
        n = max(1, self.count)
        mean = self.features.sums / n
        return self.product / n - torch.outer(mean, self._project(mean[None])[0])

    def merge(self, other: Sketch) -> None:
        """Take in what another worker has seen; raises `FitError` if its scale is another."""
        if not torch.equal(self.scale, other.scale) or self.columns != other.columns:
            raise FitError(
                "sketches that are added up must share their scale and columns; start every "
                "worker with the first one's"
            )
        if self.features.shift is None:
            self.features.shift = other.features.shift
        delta, sums = other.features.offset - self.features.offset, other.features.sums
        moved = self._project((sums + other.count * delta)[None])[0]
        self.product += other.product + torch.outer(delta, moved)
        self.product += torch.outer(sums, self._project(delta[None])[0])
        self.features.merge(other.features)

    def add_up(self, workers: Workers) -> None:
        """Have what all workers have seen; they must share the scale, as for `merge`."""
        if workers.count == 1:
            return
        moved = Sketch(self.width, self.columns, self.scale, self.product.device)
        moved.features.shift = self.features.common_shift(workers)
        moved.merge(self)
        workers.all_sum(moved.product)
        moved.features.add_up(workers)
        self.features, self.product = moved.features, moved.product

    def clear(self) -> None:
        """Forget all rows, but not shift and scale."""
        self.features.clear()
        self.product.zero_()

    def state_dict(self) -> State:
        """Everything that data changed, as tensors and numbers."""
        return {
            "features": self.features.state_dict(),
            "product": self.product,
            "scale": self.scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.features.load_state_dict(state["features"])
        self.product.copy_(state["product"])
        self.scale.copy_(state["scale"])
