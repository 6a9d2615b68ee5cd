"""What a fit is given must be what it can work on: checked before any work, and told in its words.

Without this the same faults come up as errors of an embedding or of autograd, deep inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfold.anatomy import Anatomy, anatomy
from kvfold.errors import CorpusError, FitError
from kvfold.fitting.mixture import Mixture

INTEGERS = (torch.int64, torch.int32)


def check_mode() -> None:
    """Raise `FitError` under `torch.inference_mode()`, whose tensors can't be trained."""
    if torch.is_inference_mode_enabled():
        raise FitError(
            "a fit makes weights that gradients can flow through, and tensors made under "
            "torch.inference_mode() have none; call it outside of that (torch.no_grad() is fine)"
        )


def check_ids(shape: Anatomy, name: str, ids: Tensor) -> None:
    """Raise `CorpusError` unless a text holds ids of a model's vocabulary.

    name: what the text is called. ids: of any shape.
    """
    if ids.dtype not in INTEGERS:
        raise CorpusError(
            f"{name} must be token ids, int64; got {str(ids.dtype).removeprefix('torch.')}"
        )
    if ids.numel() == 0:
        return
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= shape.vocab_size:
        raise CorpusError(
            f"{name} must be ids from 0 to {shape.vocab_size - 1}; got {least} to {most}; use the "
            "model's own tokenizer"
        )


def check_text(model: Any, mixture: Mixture, held_out: Tensor) -> None:
    """Raise, before a stage runs, what is wrong with its text or with how it is called.

    Raises `CorpusError` for ids that are no tokens of the model's, `FitError` in inference mode.
    """
    check_mode()
    shape = anatomy(model)
    for part in mixture.parts:
        check_ids(shape, f"the text {part.name}", part.windows)
    check_ids(shape, "held_out", held_out)
