"""Multiplications and additions of a tensor operation, from the shapes of what it takes.

Formulas of matrix products, convolutions and attention are torch's own (`torch.utils
.flop_counter`); those that it lacks are here. A factorisation counts as in Golub and Van Loan,
*Matrix Computations*. All other operations count as nothing: what they cost is moving memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Size
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _rows_columns(shape: Size) -> tuple[int, int, int]:
    """Matrices in a batch, rows and columns of each."""
    *batch, rows, columns = shape
    count = 1
    for size in batch:
        count *= size
    return count, rows, columns


def _cholesky(matrix: Size, *_: Any, **__: Any) -> int:
    count, n, _columns = _rows_columns(matrix)
    return count * n**3 // 3


def _cholesky_solve(right: Size, *_: Any, **__: Any) -> int:
    count, n, columns = _rows_columns(right)
    return 2 * count * n**2 * columns


def _triangular_solve(_: Size, right: Size, **__: Any) -> int:
    count, n, columns = _rows_columns(right)
    return count * n * max(n, columns) * min(n, columns)


def _eigenvectors(matrix: Size, *_: Any, **__: Any) -> int:
    count, n, _columns = _rows_columns(matrix)
    return 9 * count * n**3


def _orthonormal(matrix: Size, *_: Any, **__: Any) -> int:
    count, rows, columns = _rows_columns(matrix)
    least, most = min(rows, columns), max(rows, columns)
    return 4 * count * (most * least**2 - least**3 // 3)


def _attention(query: Size, key: Size, value: Size, *_: Any, **__: Any) -> int:
    keys, values = _like(query, key), _like(query, value)
    return int(sdpa_flop_count(query, keys, values))  # type: ignore[no-untyped-call]


def _attention_backward(
    gradient: Size, query: Size, key: Size, value: Size, *_: Any, **__: Any
) -> int:
    keys, values = _like(query, key), _like(query, value)
    count = sdpa_backward_flop_count(gradient, query, keys, values)  # type: ignore[no-untyped-call]
    return int(count)


def _like(query: Size, shared: Size) -> Size:
    """Keys or values as if no heads of the queries shared them."""
    return Size((*query[:2], *shared[2:]))


def _product_added(_: Size, left: Size, right: Size, **__: Any) -> int:
    """`addmm_` and `baddbmm_`, which torch counts only where they make a new tensor."""
    count, rows, inner = _rows_columns(left)
    return 2 * count * rows * inner * right[-1]


OWN: Mapping[Any, Callable[..., int]] = {
    aten.addmm_: _product_added,
    aten.baddbmm_: _product_added,
    aten.linalg_cholesky_ex: _cholesky,
    aten.cholesky_solve: _cholesky_solve,
    aten.linalg_solve_triangular: _triangular_solve,
    aten._linalg_eigh: _eigenvectors,
    aten.linalg_qr: _orthonormal,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def operations_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Multiplications and additions of one call; 0 for what is not counted."""
    packet = func._overloadpacket
    if packet in OWN:
        shapes = [x.shape for x in args if isinstance(x, torch.Tensor)]
        return OWN[packet](*shapes)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
