"""One tiny Llama that says scripts and, without one, anything: vLLM serves one model at a time.

Its hidden states have two parts. What layers compute is in the first and decides what comes next,
but for tokens of scripts: those have a place each in the second part, which passes through all
layers and outweighs the first.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from ..openai_cases import CALL_TOKENS, SCRIPTS, successors

COMPUTED, PLACES = 64, 32
"""Values of the two parts."""
SHAPE: dict[str, Any] = {
    "hidden_size": COMPUTED + PLACES,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
LOUD = 60.0
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% set start = namespace(of='<answer>') %}"
    "{% for m in messages %}{% if m.content == 'fail' %}{{ raise_exception('no such talk') }}"
    "{% endif %}<user>{{ m.content }}"
    "{% for name in ['unicode', 'call'] %}{% if m.content and name in m.content %}"
    "{% set start.of = '<' + name + '>' %}{% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ start.of }}{% endif %}"
)
"""A message with a script's name makes the model begin it."""


def asked(name: str) -> list[dict[str, Any]]:
    """Messages after which the model says what it has under a name."""
    return [{"role": "user", "content": f"Tell {name}." if name in SCRIPTS else "Tell me."}]


def talking_tokenizer(byte_tokenizer: Any) -> Any:
    """The tokenizer of bytes, with tokens for scripts and their starts."""
    made = deepcopy(byte_tokenizer)
    made.add_tokens([*CALL_TOKENS, *(f"<{name}>" for name in SCRIPTS)])
    made.chat_template = TEMPLATE
    return made


@torch.no_grad()
def talking_model(tiny_model: Any, tokenizer: Any) -> Any:
    """The model."""
    model = tiny_model("llama", vocab_size=len(tokenizer), **SHAPE)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[COMPUTED:] = 0
        if layer.self_attn.o_proj.bias is not None:
            layer.self_attn.o_proj.bias[COMPUTED:] = 0
        layer.mlp.down_proj.weight[COMPUTED:] = 0
    model.model.norm.weight[COMPUTED:] = 1
    embedding[:, COMPUTED:] = 0
    head[:, COMPUTED:] = 0
    pairs = [
        pair
        for name, script in SCRIPTS.items()
        for pair in successors(tokenizer, f"<{name}>", script)
    ]
    # Without a script none is begun, and nothing ends before it is as long as was asked for.
    head[[*tokenizer.all_special_ids, *(token for pair in pairs for token in pair)]] = 0
    assert len(pairs) <= PLACES
    for place, (token, following) in enumerate(pairs, start=COMPUTED):
        embedding[token, place] = LOUD
        head[following, place] = LOUD
    return model
