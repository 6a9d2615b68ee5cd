"""What kvfold has to know of a model's layers, read from its configuration.

This is the only file that names architectures, and longer than the others for it. Everything else
asks an `Anatomy` which layers there are and how wide they are, and a `Family` how one attention
module makes its queries, keys and values. A new model family is one entry in `FAMILIES`.

All families here share one rotary convention: the first `rotary_dim` values of a head are rotated
in halves, `rotate(x) = x * cos + [-x_2, x_1] * sin`, and the rest pass through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kvfold.errors import AttachError, UnsupportedModelError

LayerKind = Literal["full_attention", "sliding_attention", "linear_attention"]
KNormKind = Literal["none", "rms", "rms_plus_one"]
ProjectionName = Literal["q", "k", "v", "o"]
"""A linear map of an attention module: to its queries (with the output gate, where one map makes
both), keys and values, and from its heads to its output."""

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Rotary variants whose frequencies never change with the length of the text."""


class Projections(NamedTuple):
    """What one attention module makes of its input, before any norm and before RoPE.

    queries: (batch, heads, seq, head_dim); keys and values: (batch, kv_heads, seq, head_dim);
    gate: (batch, seq, heads * head_dim), before its sigmoid, or None.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    gate: Tensor | None


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def _separate_projections(attention: Any, hidden: Tensor) -> Projections:
    d = attention.head_dim
    q, k, v = attention.q_proj(hidden), attention.k_proj(hidden), attention.v_proj(hidden)
    return Projections(_heads(q, d), _heads(k, d), _heads(v, d), None)


def _fused_projections(attention: Any, hidden: Tensor) -> Projections:
    d = attention.head_dim
    kv_width = attention.num_key_value_heads * d
    qkv = attention.qkv_proj(hidden)
    q, k, v = qkv.split([qkv.shape[-1] - 2 * kv_width, kv_width, kv_width], dim=-1)
    return Projections(_heads(q, d), _heads(k, d), _heads(v, d), None)


def _gated_projections(attention: Any, hidden: Tensor) -> Projections:
    d = attention.head_dim
    q_and_gate = attention.q_proj(hidden).view(*hidden.shape[:-1], -1, 2 * d)
    q, gate = q_and_gate.chunk(2, dim=-1)
    k, v = attention.k_proj(hidden), attention.v_proj(hidden)
    return Projections(
        q.transpose(1, 2), _heads(k, d), _heads(v, d), gate.reshape(*hidden.shape[:-1], -1)
    )


def _separate_rows(attention: Any, name: ProjectionName) -> tuple[nn.Module, int]:
    return getattr(attention, f"{name}_proj"), 0


def _fused_rows(attention: Any, name: ProjectionName) -> tuple[nn.Module, int]:
    if name == "o":
        return attention.o_proj, 0
    kv_width = attention.num_key_value_heads * attention.head_dim
    total = attention.qkv_proj.out_features
    start = {"q": 0, "k": total - 2 * kv_width, "v": total - kv_width}[name]
    return attention.qkv_proj, start


@dataclass(frozen=True)
class Family:
    """One architecture: its configuration names and how its attention modules are made.

    `project` computes the `Projections` of an attention module; `rows` names the module that makes
    one projection, with the first of its output columns that belongs to it.
    """

    name: str
    model_types: tuple[str, ...]
    k_norm: KNormKind = "none"
    output_gate: bool = False
    project: Callable[[Any, Tensor], Projections] = _separate_projections
    rows: Callable[[Any, ProjectionName], tuple[nn.Module, int]] = _separate_rows
    rotary_by_layer_type: bool = False

    def keys_values(self, attention: Any) -> tuple[tuple[nn.Module, int], tuple[nn.Module, int]]:
        """The `rows` of an attention module's keys and of its values."""
        return self.rows(attention, "k"), self.rows(attention, "v")


FAMILIES: tuple[Family, ...] = (
    Family("Llama", ("llama",)),
    Family("Mistral", ("mistral",)),
    Family("Qwen2", ("qwen2",)),
    Family("Qwen3", ("qwen3",), k_norm="rms"),
    Family("Qwen3-MoE", ("qwen3_moe",), k_norm="rms"),
    Family(
        "Qwen3.5",
        ("qwen3_5", "qwen3_5_text"),
        k_norm="rms_plus_one",
        output_gate=True,
        project=_gated_projections,
    ),
    Family(
        "Qwen3.5-MoE",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        k_norm="rms_plus_one",
        output_gate=True,
        project=_gated_projections,
    ),
    Family("Gemma 3", ("gemma3", "gemma3_text"), k_norm="rms_plus_one", rotary_by_layer_type=True),
    Family("SmolLM3", ("smollm3",)),
    Family("Phi-3", ("phi3",), project=_fused_projections, rows=_fused_rows),
)


@dataclass(frozen=True)
class LayerAnatomy:
    """One layer: what it attends with and what its cache holds.

    Widths are in values per token; `state_values` (fp32) and `convolution_values` (model dtype)
    are what a linear-attention layer keeps per row, whatever the length.
    """

    index: int
    kind: LayerKind
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    k_norm: KNormKind
    output_gate: bool
    sliding_window: int | None = None
    state_values: int = 0
    convolution_values: int = 0

    @property
    def kv_width(self) -> int:
        """Values of one token's keys (as many again for its values); 0 for linear attention."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Anatomy:
    """A model as kvfold sees it."""

    family: Family
    model_type: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    rope_type: str
    layers: tuple[LayerAnatomy, ...]

    @property
    def num_layers(self) -> int:
        """How many layers the model has, of every kind."""
        return len(self.layers)

    @property
    def foldable_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers: the ones whose history can be folded."""
        return tuple(layer.index for layer in self.layers if layer.kind == "full_attention")

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep a recurrent state instead of keys and values."""
        return any(layer.kind == "linear_attention" for layer in self.layers)

    @property
    def rope_is_static(self) -> bool:
        """Whether a position always gets the same rotation, however long the text."""
        return self.rope_type in STATIC_ROPE_TYPES

    def projection_widths(self, layer: int, name: ProjectionName) -> tuple[int, int]:
        """Inputs and outputs of one projection of an attention layer, in values per token."""
        like = self.layers[layer]
        heads_width = like.heads * like.head_dim
        if name == "o":
            return heads_width, self.hidden_size
        if name == "q":
            return self.hidden_size, heads_width * (2 if like.output_gate else 1)
        return self.hidden_size, like.kv_width

    def bytes_per_token(self, element_size: int = 2) -> int:
        """Bytes that one more token costs in the plain cache (sliding layers still growing)."""
        return sum(2 * layer.kv_width * element_size for layer in self.layers)

    def recurrent_bytes(self, element_size: int = 2) -> int:
        """Bytes of recurrent (fp32) and convolution state per row, whatever the length."""
        return sum(
            4 * layer.state_values + element_size * layer.convolution_values
            for layer in self.layers
        )


def anatomy(model_or_config: Any) -> Anatomy:
    """Describe a model, or only its configuration, layer by layer.

    Raises `UnsupportedModelError` for an architecture outside `FAMILIES`, listing those inside.
    """
    config = getattr(model_or_config, "config", model_or_config)
    outer_type = getattr(config, "model_type", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    family = _family_of(outer_type, getattr(text, "model_type", None))
    kinds = _layer_kinds(text)
    layers = tuple(_layer(text, family, index, kind) for index, kind in enumerate(kinds))
    if getattr(text, "attn_logit_softcapping", None):
        raise UnsupportedModelError(
            "attention logits must not be soft-capped: this model's configuration sets "
            f"attn_logit_softcapping={text.attn_logit_softcapping}, which folded attention does "
            "not apply; use a model without it"
        )
    return Anatomy(
        family=family,
        model_type=str(text.model_type),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        max_positions=int(getattr(text, "max_position_embeddings", 0) or 0),
        rope_type=_rope_type(text),
        layers=layers,
    )


def _family_of(*model_types: str | None) -> Family:
    for family in FAMILIES:
        if any(model_type in family.model_types for model_type in model_types):
            return family
    supported = ", ".join(f"{f.name} ({'/'.join(f.model_types)})" for f in FAMILIES)
    raise UnsupportedModelError(
        f"kvfold folds only the architectures it knows; got model_type={model_types[0]!r}. "
        f"Supported: {supported}. To add one, add a Family to FAMILIES in kvfold/anatomy.py "
        "(CONTRIBUTING.md has the steps)"
    )


def _layer_kinds(config: Any) -> list[LayerKind]:
    known: tuple[LayerKind, ...] = ("full_attention", "sliding_attention", "linear_attention")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) is not None
        kinds = [known[1] if windowed else known[0]] * config.num_hidden_layers
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise UnsupportedModelError(
            f"every layer must be one of {', '.join(known)}; this model also has "
            f"{', '.join(unknown)} layers, which kvfold does not know"
        )
    return list(kinds)


def _layer(config: Any, family: Family, index: int, kind: LayerKind) -> LayerAnatomy:
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    if kind == "linear_attention":
        v_heads, k_heads = config.linear_num_value_heads, config.linear_num_key_heads
        k_dim, v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        channels = 2 * k_heads * k_dim + v_heads * v_dim
        return LayerAnatomy(
            index=index,
            kind=kind,
            heads=int(v_heads),
            kv_heads=0,
            head_dim=int(v_dim),
            rotary_dim=0,
            k_norm="none",
            output_gate=True,
            state_values=int(v_heads * k_dim * v_dim),
            convolution_values=int(channels * config.linear_conv_kernel_dim),
        )
    rope_switch = getattr(config, "no_rope_layers", None)
    has_rope = rope_switch is None or bool(rope_switch[index])
    window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    return LayerAnatomy(
        index=index,
        kind=kind,
        heads=heads,
        kv_heads=int(config.num_key_value_heads),
        head_dim=head_dim,
        rotary_dim=int(head_dim * _partial_rotary_factor(config, kind)) if has_rope else 0,
        k_norm=family.k_norm,
        output_gate=family.output_gate,
        sliding_window=window,
    )


def _rope_parameters(config: Any, kind: str) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get(kind)
    return dict(nested) if isinstance(nested, dict) else dict(parameters)


def _partial_rotary_factor(config: Any, kind: str) -> float:
    in_rope = _rope_parameters(config, kind).get("partial_rotary_factor")
    return float(in_rope or getattr(config, "partial_rotary_factor", None) or 1.0)


def _rope_type(config: Any) -> str:
    return str(_rope_parameters(config, "full_attention").get("rope_type") or "default")


def text_decoder(model: Any) -> Any:
    """The module that holds `.layers` and `.rotary_emb`: the text half of a multimodal model."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if not hasattr(decoder, "layers") or not hasattr(decoder, "rotary_emb"):
        raise UnsupportedModelError(
            "the model must have a decoder with layers and a rotary embedding; got "
            f"{type(model).__name__}, whose decoder {type(decoder).__name__} has not"
        )
    return decoder


ATTACHMENT_MARK = "_kvfold_attachment"
"""Attribute of a decoder's forward that tells that an add-on stands in for the model's own."""


def require_plain(model: Any) -> None:
    """Raise `AttachError` if an add-on is attached: some work needs the model as it is."""
    if getattr(text_decoder(model).forward, ATTACHMENT_MARK, None) is not None:
        raise AttachError(
            "an add-on is attached to this model already; detach it first (leave its with block, "
            "or call detach())"
        )


def attention_module(model: Any, layer: int) -> Any:
    """The full-attention module of one layer (0-based)."""
    return text_decoder(model).layers[layer].self_attn


def linear_attention_module(model: Any, layer: int) -> Any:
    """The linear-attention (Gated DeltaNet) module of one layer (0-based)."""
    return text_decoder(model).layers[layer].linear_attn


def mixer_module(model: Any, layer: int) -> Any:
    """What mixes tokens in one layer (0-based): its attention, or its linear attention."""
    if anatomy(model).layers[layer].kind == "linear_attention":
        return linear_attention_module(model, layer)
    return attention_module(model, layer)


@dataclass(frozen=True)
class LinearInputs:
    """The weights with which a Gated DeltaNet module turns its input into what its state reads.

    qkv_weight: (channels, hidden), its rows q, then k, then v; b_weight (of beta) and a_weight (of
    the decay): (v_heads, hidden). conv_weight: (channels, kernel) of the causal convolution that
    q, k and v pass, conv_bias: (channels,) or None. a_log and dt_bias: (v_heads,), of the log
    decay `g = -exp(a_log) * softplus(a + dt_bias)`. All are the module's own, not copies.
    """

    qkv_weight: Tensor
    b_weight: Tensor
    a_weight: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int

    @property
    def k_channels(self) -> slice:
        """Where the keys are among the channels, head by head; the queries are before them."""
        return slice(self.k_heads * self.k_dim, 2 * self.k_heads * self.k_dim)

    @property
    def v_channels(self) -> slice:
        """Where the values are among the channels, head by head."""
        return slice(self.k_channels.stop, self.k_channels.stop + self.v_heads * self.v_dim)

    @property
    def head_of(self) -> tuple[int, ...]:
        """The key head that each value head reads: neighbouring value heads share one."""
        return tuple(head // (self.v_heads // self.k_heads) for head in range(self.v_heads))


def linear_inputs(module: Any) -> LinearInputs:
    """The weights of a linear-attention module; raises `UnsupportedModelError` if not SiLU."""
    if module.activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            "a convolution of linear attention must end in SiLU, the only one kvfold computes; "
            f"this model's ends in {module.activation!r}; use a model with hidden_act='silu'"
        )
    return LinearInputs(
        qkv_weight=module.in_proj_qkv.weight,
        b_weight=module.in_proj_b.weight,
        a_weight=module.in_proj_a.weight,
        conv_weight=module.conv1d.weight.squeeze(1),
        conv_bias=module.conv1d.bias,
        a_log=module.A_log,
        dt_bias=module.dt_bias,
        k_heads=int(module.num_k_heads),
        v_heads=int(module.num_v_heads),
        k_dim=int(module.head_k_dim),
        v_dim=int(module.head_v_dim),
    )


def rotary(model: Any, family: Family, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of full-attention layers, as the model itself computes them.

    positions: (batch, seq), integer or fractional; both results: (batch, seq, rotary_dim) in the
    dtype of `like`.
    """
    embedding = text_decoder(model).rotary_emb
    if family.rotary_by_layer_type:
        cos, sin = embedding(like, positions, "full_attention")
    else:
        cos, sin = embedding(like, positions)
    return cos, sin


def k_norm_weight(family: Family, attention: Any) -> tuple[Tensor, float] | None:
    """The vector that a key's RMS norm multiplies by, and its epsilon; None without a k_norm."""
    if family.k_norm == "none":
        return None
    norm = attention.k_norm
    weight = norm.weight if family.k_norm == "rms" else 1.0 + norm.weight
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return weight, float(epsilon)


def supported_attention(model: Any) -> None:
    """Refuse attention implementations and dtypes that folded attention can't stand in for."""
    implementation = getattr(model.config, "_attn_implementation", "sdpa")
    if implementation not in ("eager", "sdpa"):
        raise UnsupportedModelError(
            "the model must be loaded with attn_implementation='sdpa' or 'eager'; got "
            f"{implementation!r}; load it again with attn_implementation='sdpa'"
        )
    dtype = model.dtype
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedModelError(
            f"the model's dtype must be float16, bfloat16, float32 or float64; got {dtype}"
        )
