"""One set of weights for several add-ons at once.

An add-on is attached to a model's instance, and an instance takes one. A second instance over the
same tensors costs only its modules, so the plain model and every add-on can be served side by side.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

from kvfold.anatomy import require_plain


def sharing_weights(model: Any) -> Any:
    """Another instance of a model, on the same parameters and buffers.

    Attaching to one leaves the other as it is. Raises `AttachError` while an add-on is attached.
    """
    require_plain(model)
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
