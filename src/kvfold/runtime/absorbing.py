"""When attention sums codes in place of values, and the maps from codes that let it.

With weights w_s of slots, codes z_s and values D z_s + b, the sum of w_s (D z_s + b) is
D (sum of w_s z_s) + b (sum of w_s): one map for each query in place of one for each slot. With few
queries, as in decoding, that is far less work.
"""

from __future__ import annotations


def absorbing_pays(
    *, heads: int, kv_heads: int, head_dim: int, code_width: int, queries: int, slots: int
) -> bool:
    """Whether absorbing values takes fewer multiplications than making them.

    queries: of each head. slots: that they read.
    """
    made = slots * (code_width * kv_heads * head_dim + heads * queries * head_dim)
    summed = heads * queries * code_width * (slots + head_dim)
    return summed < made
