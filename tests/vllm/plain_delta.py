"""Gated DeltaNet in plain float32 tensors, in place of vLLM's kernels for the CPU.

Those run in bfloat16 only, in which two runs that should be equal are so by chance. What kvfold
adds is in which rows run when, and from which state: with this in their place that can be told
exactly. It reads and writes states where and as they do.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first


def forward(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """As `QwenGatedDeltaNetAttention.forward_cpu`."""
    channels = (2 * layer.key_dim + layer.value_dim) // layer.tp_size
    mixed, gate = layer.in_proj_qkvz(hidden)[0].tensor_split([channels], dim=-1)
    b, a = layer.in_proj_ba(hidden)[0].chunk(2, dim=-1)
    gate = gate.unflatten(-1, (-1, layer.head_v_dim))
    output = torch.zeros_like(gate)
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, dict):
        own = metadata[layer.prefix]
        bounds = own.non_spec_query_start_loc.tolist()
        for request, (start, stop) in enumerate(itertools.pairwise(bounds)):
            if stop > start:
                rows = slice(start, stop)
                output[rows] = _request(layer, own, request, mixed[rows], b[rows], a[rows])
    return layer._output_projection(output, gate)


def _request(layer, metadata, request, mixed, b, a):
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    place = int(metadata.non_spec_state_indices_tensor[request])
    convolved, state = (held[place] for held in layer.kv_cache)
    convolved = convolved if is_conv_state_dim_first() else convolved.T
    state = state.view(state.shape[0], layer.head_k_dim, layer.head_v_dim)
    if request >= metadata.num_decodes and not metadata.has_initial_state[request]:
        convolved.zero_()
        state.zero_()
    inputs = torch.cat([convolved, mixed.T], dim=1)
    weight = layer.conv1d.weight.view(len(inputs), -1)
    made = functional.silu(functional.conv1d(inputs[None], weight[:, None], groups=len(inputs)))[0]
    convolved.copy_(inputs[:, -convolved.shape[1] :])
    width = layer.key_dim // layer.tp_size
    query, key, value = made.T.tensor_split([width, 2 * width], dim=-1)
    repeat = layer.num_v_heads // layer.num_k_heads
    heads = [x.unflatten(-1, (-1, layer.head_k_dim)) for x in (query, key)]
    query, key = (x.repeat_interleave(repeat, dim=1) for x in heads)
    output, after = torch_chunk_gated_delta_rule(
        query[None],
        key[None],
        value.unflatten(-1, (-1, layer.head_v_dim))[None],
        g=(-layer.A_log.exp() * functional.softplus(a + layer.dt_bias))[None],
        beta=b.sigmoid()[None],
        initial_state=state[None].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    state.copy_(after[0])
    return output[0]
