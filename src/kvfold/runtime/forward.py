"""The forward that stands in for an attached model's decoder.

It takes the caller's cache argument under either of its names, works out which columns are tokens
and at which positions, cuts long folded prompts into chunks, and opens and commits one step a
chunk. The decoder's own forward then runs unchanged.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvfold.errors import AttachError
from kvfold.methods import Activations, Source
from kvfold.runtime.cache import FoldedCache, Running
from kvfold.runtime.call import DecoderCall
from kvfold.runtime.columns import UNKNOWN
from kvfold.runtime.schedule import Step
from kvfold.runtime.skipping import PLAIN_CHUNK, PREFILL_CHUNK, SkippedPrefill

if TYPE_CHECKING:
    from kvfold.runtime.attach import Attachment

CACHE_NAMES = ("cache", "past_key_values")
INPUTS = ("input_ids", "inputs_embeds")


class DecoderForward:
    """Callable in place of `decoder.forward`; `original` is the decoder's own."""

    def __init__(self, attachment: Attachment, original: Any) -> None:
        self.attachment = attachment
        self.original = original
        parameters = inspect.signature(original).parameters
        self.cache_name = next(name for name in CACHE_NAMES if name in parameters)
        self.order = list(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder on the caller's arguments, chunk by chunk, with a folded cache."""
        kwargs.update(zip(self.order, args, strict=False))
        self._refuse(kwargs)
        use_cache = kwargs.pop("use_cache", None)
        if use_cache is None:
            use_cache = bool(getattr(self.attachment.decoder.config, "use_cache", True))
        record = bool(kwargs.pop("kvfold_record", False))
        cache = self._cache(kwargs)
        attention_mask = kwargs.pop("attention_mask", None)
        if attention_mask is None:
            attention_mask = self._mask_of_pads(cache, kwargs)
        position_ids = kwargs.pop("position_ids", None)
        inputs = {n: kwargs.pop(n, None) for n in INPUTS}
        shape = next(x for x in inputs.values() if x is not None).shape
        batch, columns = int(shape[0]), int(shape[1])
        if columns == 0:
            raise AttachError("there must be at least one new token in each row; got none")
        cache.require_whole()
        tokens = _tokens(attention_mask, batch, columns, cache)
        self._refuse_inner_pads(tokens, cache)
        _check_positions(position_ids, tokens, cache)
        call = DecoderCall(kwargs, inputs, cache, attention_mask, tokens)
        with torch.no_grad():
            skips = self._skips(call, record)
            chunks = self._chunks(columns, cache, record=record, skips=skips)
            if len(chunks) == columns > 1:
                self._refuse_pads_in_single_columns(tokens)
            if skips:
                outputs = [SkippedPrefill(self.attachment, self, call).run(chunks)]
            else:
                outputs = [self._full(call, start, stop, record) for start, stop in chunks]
        return self._joined(outputs, cache if use_cache else None)

    def _mask_of_pads(self, cache: FoldedCache, kwargs: dict[str, Any]) -> Tensor | None:
        """What a caller leaves out who has no pads among new tokens, but whose cache has some.

        Folded layers count real tokens; the others would see the pads.
        """
        if not cache.padded_columns or len(cache.folded) == self.attachment.anatomy.num_layers:
            return None
        before = cache.attention_mask()
        new = next(x for n in INPUTS if (x := kwargs.get(n)) is not None).shape[:2]
        if new[0] != before.shape[0]:
            return None
        return torch.cat([before, before.new_ones(new)], dim=1)

    def _skips(self, call: DecoderCall, record: bool) -> bool:
        """Whether some row's new tokens are more than are replayed; refuses what can't be had."""
        attachment = self.attachment
        if attachment.split is None or int(call.tokens.sum(1).max()) <= attachment.plan.replay:
            return False
        if attachment.wants_last_only and not record:
            asked = self._outputs_of_layers(call.kwargs)
            if not asked:
                return True
            if attachment.prompt_logits == "refuse":
                raise AttachError(
                    f"{asked} can't be had of a skipped prompt, most of whose tokens run through "
                    "the lower layers only; attach with prefill: full, or with "
                    "prompt_logits='full' to run such calls through all layers"
                )
        if attachment.prompt_logits == "refuse":
            raise AttachError(
                "under prefill: skip a prompt has logits (and hidden states) for its last token "
                f"only; this call brings more than replay={attachment.plan.replay} new tokens to a "
                "row and wants more than that; ask a causal model with logits_to_keep=1, as "
                "generate does, or attach with prompt_logits='full' to run such calls through all "
                "layers"
            )
        return False

    def _outputs_of_layers(self, kwargs: dict[str, Any]) -> str | None:
        """The name of what was asked for that every layer gives of every token, if anything."""
        config = self.attachment.decoder.config
        names = ("output_hidden_states", "output_router_logits")
        return next((n for n in names if kwargs.get(n) or getattr(config, n, False)), None)

    def _full(self, call: DecoderCall, start: int, stop: int, record: bool) -> Any:
        """One chunk through all layers."""
        attachment, cache = self.attachment, call.cache
        folded = attachment.plan.prefill_attention == "folded" or cache.given is not None
        new, counts = stop - start, call.counts(start, stop)
        running = attachment.full_pass(
            cache, new, counts, folded=(folded or new == 1) and not record, record=record
        )
        return self.run(call, start, stop, running)

    def run(
        self,
        call: DecoderCall,
        start: int,
        stop: int,
        running: Running,
        keep: dict[Source, Tensor] | None = None,
    ) -> Any:
        """Some columns of a call through the layers of a pass.

        keep: where to put the activations that came up.
        """
        assert running.tokens is not None
        mask = call.attention_mask
        if mask is not None:
            mask = mask[:, : mask.shape[1] - call.columns + stop]
        inputs = {n: None if x is None else x[:, start:stop] for n, x in call.inputs.items()}
        output = self._run_layers(call, inputs, mask, running.tokens, running, {}, keep)
        ids, step = inputs["input_ids"], running.tokens
        if ids is None:
            ids = torch.full((call.batch, stop - start), UNKNOWN, device=step.device)
        call.cache.log.append(ids, None if step.uniform else step.valid)
        return output

    def run_upper(
        self, call: DecoderCall, hidden: Tensor, step: Step, running: Running, found: Activations
    ) -> Any:
        """Hidden states (batch, step.new, hidden) through the layers of a pass above the first.

        found: activations of layers below, for the methods that need them.
        """
        mask = None
        if not bool(step.valid.all()):
            mask = step.valid.long().expand(call.batch, -1)
        inputs = {"inputs_embeds": hidden}
        return self._run_layers(call, inputs, mask, step, running, found, None)

    def _run_layers(
        self,
        call: DecoderCall,
        inputs: dict[str, Any],
        mask: Tensor | None,
        step: Step,
        running: Running,
        found: Activations,
        keep: dict[Source, Tensor] | None,
    ) -> Any:
        attachment, cache = self.attachment, call.cache
        attachment.open(cache, running)
        done = False
        try:
            attachment.publish(found)
            positions = step.positions.clamp_min(0)
            output = self.original(
                attention_mask=mask,
                position_ids=positions.expand(call.batch, -1),
                use_cache=True,
                **{self.cache_name: cache},
                **call.kwargs,
                **inputs,
            )
            if keep is not None:
                keep.update(attachment.activations)
            done = True
        finally:
            attachment.close(done=done)
        return output

    def _refuse(self, kwargs: dict[str, Any]) -> None:
        if self.attachment.decoder.training:
            raise AttachError(
                "an attached model only runs inference; call model.eval() first (training goes "
                "through kvfold's own fitting)"
            )
        config = self.attachment.decoder.config
        if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
            raise AttachError(
                "output_attentions can't be had while an add-on is attached, since folded "
                "attention never forms the weights; detach first"
            )

    def _refuse_inner_pads(self, tokens: Tensor, cache: FoldedCache) -> None:
        others = {layer.kind for layer in self.attachment.anatomy.layers} - {"full_attention"}
        inner = any(
            seen and not bool(row.all()) for seen, row in zip(cache.rows, tokens, strict=False)
        )
        if others and inner:
            raise AttachError(
                "rows of a batch that goes on must get equally many new tokens on a model with "
                f"{' and '.join(sorted(others))} layers, whose own states and windows count pads "
                "between tokens; run the rows apart, or one turn at a time"
            )

    def _cache(self, kwargs: dict[str, Any]) -> FoldedCache:
        passed = [kwargs.pop(name, None) for name in (*CACHE_NAMES, "kvfold_cache")]
        given: Any = next((cache for cache in passed if cache is not None), None)
        if given is None:
            given = self.attachment.new_cache()
        elif isinstance(given, Cache) and not isinstance(given, FoldedCache):
            given = self._adopt(given)
        if not isinstance(given, FoldedCache):
            raise AttachError(
                f"the cache of an attached model must be a FoldedCache; got {type(given).__name__} "
                "with tokens in it; use attachment.new_cache(), or pass no cache"
            )
        if given.owner is not self.attachment:
            raise AttachError(
                "this cache belongs to another attachment; a cache can only go on with the "
                "attachment that made it"
            )
        return given

    def _adopt(self, plain: Cache) -> Cache:
        """The folded cache that goes on in place of an empty one of the caller's or generate's.

        The plain one stays empty, but tells the folded one's length from then on: so a copy of it,
        or the same one on another attachment, is refused instead of starting anew in silence.
        """
        adopted = self.attachment.adopted
        if plain not in adopted and plain.get_seq_length() == 0:
            made = self.attachment.new_cache()
            adopted[plain] = made
            plain.get_seq_length = lambda *_, **__: made.columns  # type: ignore[method-assign]
            plain.reset = made.reset  # type: ignore[method-assign]
        return adopted.get(plain, plain)

    def _refuse_pads_in_single_columns(self, tokens: Tensor) -> None:
        """transformers gives no mask to recurrent layers where one column runs by itself."""
        if self.attachment.anatomy.is_hybrid and not bool(tokens.all()):
            raise AttachError(
                "this plan runs folded prompts in chunks of its window, and a window of 1 leaves "
                "the pads of a hybrid's rows unmasked; use a window of at least 2, or rows of "
                "equal length"
            )

    def _chunks(
        self, columns: int, cache: FoldedCache, *, record: bool, skips: bool
    ) -> list[tuple[int, int]]:
        plan = self.attachment.plan
        size = columns
        if not record and (plan.prefill_attention == "folded" or cache.given is not None):
            size = (
                PLAIN_CHUNK if skips and self.attachment.lower_layers_are_plain else PREFILL_CHUNK
            )
            if self.attachment.exits_lag and cache.given is None:
                size = min(size, max(1, plan.window))
        return [(start, min(start + size, columns)) for start in range(0, columns, size)]

    def _joined(self, outputs: list[Any], cache: FoldedCache | None) -> Any:
        first = outputs[0]
        if len(outputs) > 1:
            first.last_hidden_state = torch.cat([o.last_hidden_state for o in outputs], dim=1)
            if getattr(first, "hidden_states", None) is not None:
                states = zip(*(o.hidden_states for o in outputs), strict=True)
                first.hidden_states = tuple(torch.cat(layer, dim=1) for layer in states)
        first[self.cache_name] = cache
        return first


def _tokens(attention_mask: Tensor | None, batch: int, columns: int, cache: FoldedCache) -> Tensor:
    """Which of the new columns are tokens, (batch, columns) bool on the CPU."""
    if cache.rows and len(cache.rows) != batch:
        raise AttachError(
            f"the cache holds {len(cache.rows)} rows, but the input has {batch}; use one cache "
            "for each batch"
        )
    if attention_mask is None:
        return torch.ones(batch, columns, dtype=torch.bool)
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        raise AttachError(
            "attention_mask must be (batch, columns) of 0 and 1 while an add-on is attached, "
            f"since folded layers make their own masks; got {_describe(attention_mask)}"
        )
    expected = cache.columns + columns
    if attention_mask.shape != (batch, expected):
        raise AttachError(
            f"attention_mask must cover the {cache.columns} columns in the cache and the "
            f"{columns} new ones: ({batch}, {expected}); got {tuple(attention_mask.shape)}"
        )
    tokens = attention_mask[:, -columns:].to("cpu", torch.bool)
    if bool((tokens[:, :-1] & ~tokens[:, 1:]).any()):
        raise AttachError(
            "pads must lie to the left of the new tokens of every row; got a pad after a token "
            "(set tokenizer.padding_side = 'left')"
        )
    return tokens


def _describe(mask: Any) -> str:
    if isinstance(mask, dict):
        return "a dict, as generate makes for a static cache: leave cache_implementation out"
    return f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__


def _check_positions(position_ids: Tensor | None, tokens: Tensor, cache: FoldedCache) -> None:
    """Refuse positions of the new columns that are not ours, before anything has run."""
    if position_ids is None:
        return
    before = torch.tensor(cache.rows or [0] * len(tokens))[:, None]
    ours = (before + tokens.cumsum(dim=1) - 1).to(position_ids.device)
    if bool(((position_ids - ours) * tokens.to(position_ids.device) != 0).any()):
        raise AttachError(
            "position_ids must count each row's real tokens from 0 (pads excluded) while an "
            "add-on is attached; leave position_ids out, or correct them"
        )
