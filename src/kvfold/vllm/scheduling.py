"""Prefix caching with recurrent states: where a chunk must end so that its state can be shared.

vLLM keeps a state for later prompts when a chunk of a prompt ends at a multiple of one block
length, which its scheduler takes to be the shortest of all blocks. Here every kind of row has a
length of its own and a prefix is found at multiples of all of them, so that is where chunks end.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from kvfold.plan import Plan

SCHEDULER = "kvfold.vllm.scheduling.aligned_scheduler"
"""For vLLM's `scheduler_cls`."""


def hash_unit(plan: Plan) -> int:
    """Tokens by which prompts are compared: of whole slots, and shorter than any block.

    Were it as long as some block, vLLM would share parts of blocks, which rows of a window
    are not made for.
    """
    return math.lcm(8, *(plan.group_of(layer) for layer in plan.folded_layers))


def aligned_scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """vLLM's own scheduler, that ends chunks where all blocks end."""
    stock = copy.copy(vllm_config.scheduler_config)
    stock.scheduler_cls = None
    made = stock.get_scheduler_cls()(vllm_config=vllm_config, **arguments)
    made.cache_config = copy.copy(made.cache_config)
    made.cache_config.block_size = made.block_size
    return made
