"""A plain model's cache in the form that rows have outside of caches, and back.

Stores keep rows of folded caches. A plain cache is one in which no layer is folded: what makes and
checks its rows is an attachment of the empty plan, on an instance of the model that never runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvfold.plan import Plan
from kvfold.runtime.attach import Attachment, attach
from kvfold.runtime.sharing import sharing_weights
from kvfold.runtime.state import RowState
from kvfold.store.addon import AddOn


def folding_nothing(model: Any) -> Attachment:
    """An attachment of the empty plan to another instance on a plain model's weights."""
    own = sharing_weights(model)
    return attach(own, AddOn.untrained(own, Plan()))


def row_of(attachment: Attachment, cache: DynamicCache, tokens: Sequence[int]) -> RowState:
    """A copy of the one row of a plain cache that has seen these tokens."""
    made = attachment.new_cache()
    made.layers = cache.layers
    made.restore([len(tokens)], torch.tensor([list(tokens)], dtype=torch.int32))
    return attachment.rows_of(made)[0]


def cache_of(attachment: Attachment, state: RowState) -> DynamicCache:
    """A plain cache with that row; raises `CacheError` for one of another plan or model."""
    made = DynamicCache(config=attachment.model.config)
    made.layers = attachment.cache_from([state]).layers
    return made
