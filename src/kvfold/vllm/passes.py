"""Running some layers on part of a step's rows, below vLLM's own backends.

vLLM makes each layer's metadata once for a whole step. Where layers run more than once in it, on
other rows each time, they need metadata for each pass. Layers that may are given a backend of their
own, a subclass of the stock one, whose metadata knows how to be made anew for some of its rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import subclass_attention_backend

from kvfold.vllm.skip import KeptRows, cut, step_of


@dataclasses.dataclass(frozen=True)
class WholeStep:
    """What a whole step's metadata was made of, and what makes it."""

    common: Any
    build: Callable[[Any], Any]

    def of(self, kept: KeptRows, *, recurrent: bool) -> Any:
        """Metadata for some rows.

        recurrent: vLLM finds a state by the number of tokens that its request has after the step,
        so that number stays, whichever rows run.
        """
        if recurrent:
            _, seen = step_of(self.common)
            kept = kept._replace(seen=[seen[request] for request in kept.requests])
        return self.build(cut(self.common, kept))


@functools.cache
def repeatable_backend(base: Any) -> Any:
    """A stock backend whose metadata holds, as `kvfold_step`, the `WholeStep` it was made of."""
    stock: Any = base.get_builder_cls()

    class RepeatableBuilder(stock):
        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
        ) -> Any:
            build = super().build
            made = build(common_prefix_len, common_attn_metadata, *args, **kwargs)
            made.kvfold_step = WholeStep(common_attn_metadata, lambda common: build(0, common))
            return made

    return subclass_attention_backend("KvfoldPasses", base, RepeatableBuilder)


def some_pieces(kept: KeptRows, numbers: Sequence[int]) -> KeptRows:
    """The pieces of these numbers, at least one."""
    parts = torch.split(kept.rows, kept.lengths)
    return KeptRows(
        torch.cat([parts[n] for n in numbers]),
        [kept.lengths[n] for n in numbers],
        [kept.requests[n] for n in numbers],
        [kept.seen[n] for n in numbers],
    )


def context_of(
    context: Any, kept: KeptRows, attending: Iterable[str] = (), recurrent: Iterable[str] = ()
) -> Any:
    """The forward context in which layers, by their names, run on some rows of the step.

    A recurrent layer continues the state that is there: where a request begins in this step, it
    must have been cleared.
    """
    metadata, slots = dict(context.attn_metadata), dict(context.slot_mapping)
    made: dict[int, Any] = {}
    for names, keeps_state in ((attending, False), (recurrent, True)):
        for name in names:
            whole = metadata[name]
            if id(whole) not in made:
                made[id(whole)] = whole.kvfold_step.of(kept, recurrent=keeps_state)
            metadata[name] = made[id(whole)]
            slots[name] = slots[name][kept.rows.to(slots[name].device)]
    return dataclasses.replace(context, attn_metadata=metadata, slot_mapping=slots)
