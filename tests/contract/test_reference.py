"""A whole folded model, written out without a cache: what every fast path has to equal.

Each folded layer's attention is one dense softmax over [exact keys | slots] of the whole text,
with the mask of `kvfold.runtime.reference`. Slots are averaged one at a time and quantised by
decoding what was encoded. Nothing of the cache, its schedule or its readings is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvfold.anatomy import attention_module, k_norm_weight, rotary, text_decoder
from kvfold.methods import Activations, Pipeline, Source
from kvfold.methods.maps import rms_normalize
from kvfold.methods.turboquant import TurboQuant
from kvfold.runtime.capture import capture
from kvfold.runtime.reference import reference_mask

PASSES = 12
"""More than windows in the text: with each pass one more window of codes is right."""


class Dense:
    """A model with an add-on, one pass over the whole text at a time.

    readings: of each layer. exact: how many tokens of the text are a prompt whose queries see
    every key (exact prefill). given: activations that all codes are made from, if not those of the
    folded model itself. The codes of a token that come after its own layers have run are
    taken from the pass before, so passes are repeated until the logits no longer change. skipped:
    what ran where under prefill skipping; what upper layers make of other tokens is never used.
    """

    def __init__(
        self,
        case: Any,
        readings: dict[int, str],
        *,
        exact: int = 0,
        given: Activations | None = None,
        skipped: Skipped | None = None,
    ) -> None:
        self.case = case
        self.readings = readings
        self.exact = exact
        self.skipped = skipped
        self.given = given
        self.found: dict[Source, Tensor] = {}
        self.before: dict[Source, Tensor] = {}

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """(1, seq, vocabulary)."""
        made: Tensor = self._come_to_rest(lambda: self.case.plain(ids, use_cache=False).logits)
        return made

    @torch.no_grad()
    def hidden_states(self, ids: Tensor) -> Tensor:
        """(1, seq, hidden), after the final norm."""
        decoder = text_decoder(self.case.plain)
        return self._come_to_rest(lambda: decoder(input_ids=ids, use_cache=False).last_hidden_state)

    def _come_to_rest(self, one_pass: Callable[[], Tensor]) -> Tensor:
        made = torch.zeros(())
        with self._patched():
            for _ in range(PASSES):
                self.before = dict(self.found)
                self.found.clear()
                last, made = made, one_pass()
                if torch.equal(last, made):
                    return made
        raise AssertionError("the passes do not come to rest")

    @contextmanager
    def _patched(self) -> Iterator[None]:
        with ExitStack() as stack:
            layers = text_decoder(self.case.plain).layers
            for pipeline in self.case.addon.pipelines:
                for source in pipeline.inputs:
                    if source.kind == "hidden":
                        handle = layers[source.layer].register_forward_pre_hook(
                            self._keep(source), with_kwargs=True
                        )
                        stack.callback(handle.remove)
                for layer in self.skipped.linear if self.skipped else ():
                    module = layers[layer].linear_attn
                    if "forward" not in module.__dict__:
                        module.forward = self.skipped.linear_forward(module, self.found)
                        stack.callback(delattr, module, "forward")
                for layer in pipeline.layers:
                    module = attention_module(self.case.plain, layer)
                    module.forward = self._forward(layer, module, pipeline)
                    stack.callback(delattr, module, "forward")
            yield

    def _keep(self, source: Source) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.found[source] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _forward(self, layer: int, module: Any, pipeline: Pipeline) -> Any:
        def forward(
            hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
        ) -> tuple[Tensor, None]:
            made = self.case.anatomy.family.project(module, hidden_states)
            self.found[Source("inputs", layer)] = hidden_states
            self.found[Source("keys", layer)] = made.keys.transpose(1, 2).flatten(2)
            self.found[Source("values", layer)] = made.values.transpose(1, 2).flatten(2)
            own = Layer(self.case, layer, module, self.readings[layer])
            queries = own.turned(own.normed(made.queries, "q_norm"), *position_embeddings)
            keys = own.turned(own.normed(made.keys, "k_norm"), *position_embeddings)
            slot_keys, slot_values = own.history(pipeline, self._code_of(pipeline))
            keys = torch.cat([keys, slot_keys], dim=2)
            values = torch.cat([made.values, slot_values], dim=2)
            mixed = own.attention(queries, keys, values, pipeline, self.exact, self.skipped)
            mixed = mixed.transpose(1, 2).flatten(2)
            if made.gate is not None:
                mixed = mixed * torch.sigmoid(made.gate)
            return module.o_proj(mixed), None

        return forward

    def _code_of(self, pipeline: Pipeline) -> tuple[Tensor, Tensor] | None:
        """Every token's code and what its gate scores, if they can be known yet."""
        chosen = (self.found, self.before) if self.given is None else (self.given,)
        for known in chosen:
            if pipeline.depth.code_width and all(s in known for s in pipeline.inputs):
                hidden = known.get(pipeline.depth.gate_source)
                code = pipeline.depth.encode(known)
                return code, code if hidden is None else hidden
        return None


class Skipped:
    """Which tokens of a text ran through the layers from `split` on, call by call.

    calls: how many tokens each call brought. spans: contiguous tokens that ran, in order. Between
    two of them a recurrent state is lost, or goes on over inputs that the add-on predicts.
    """

    def __init__(self, case: Any, calls: list[int]) -> None:
        plan = case.plan
        self.split = plan.split
        self.projector = case.addon.state_projector
        self.linear = [
            layer.index
            for layer in case.anatomy.layers[self.split :]
            if layer.kind == "linear_attention"
        ]
        self.spans: list[list[int]] = [[0, 0]]
        seen = 0
        for new in calls:
            begin = seen + new - plan.replay if new > plan.replay else seen
            upto = max(seen, min(plan.anchors, begin))
            self.spans[-1][1] = upto
            if begin > upto:
                self.spans.append([begin, begin])
            seen += new
            self.spans[-1][1] = seen

    def linear_forward(self, module: Any, found: dict[Source, Tensor]) -> Any:
        """A linear layer that starts from nothing in each span, or has predicted inputs between."""
        own = type(module).forward
        ran = [token for start, stop in self.spans for token in range(start, stop)]

        def forward(hidden_states: Tensor, **_: Any) -> Tensor:
            if self.projector is not None:
                features = self.projector.features(found)
                inputs = self.projector.project(module.layer_idx, features)
                inputs[:, ran] = hidden_states[:, ran]
                made: Tensor = own(module, inputs)
                return made
            made = torch.zeros_like(hidden_states)
            for start, stop in self.spans:
                if stop > start:
                    made[:, start:stop] = own(module, hidden_states[:, start:stop])
            return made

        return forward

    def mask(self, mask: Tensor, slots: int, group: int, anchors: int) -> Tensor:
        """Token by token: what each query of a span sees; rows of other tokens see everything.

        mask: (seq, seq + slots) without skipping.
        """
        seq = mask.shape[0]
        made = torch.ones_like(mask)
        for start, stop in self.spans:
            for query in range(start, stop):
                made[query] = mask[query]
                for slot in range(slots):
                    first, last = anchors + group * slot, anchors + group * slot + group - 1
                    if first < start and last <= query and start > anchors:
                        made[query, seq + slot] = True
                        made[query, first : last + 1] = False
                made[query, anchors:start] = False
        return made


class Layer:
    """One folded layer's attention, written out."""

    def __init__(self, case: Any, index: int, module: Any, reading: str) -> None:
        self.case = case
        self.index = index
        self.module = module
        self.reading = reading
        self.shape = case.anatomy.layers[index]
        self.plan = case.plan

    def normed(self, x: Tensor, name: str) -> Tensor:
        """q_norm or k_norm of heads, where the model has them."""
        norm = None if self.shape.k_norm == "none" else getattr(self.module, name)
        return x if norm is None else norm(x)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RoPE of the rotary part: x (batch, heads, seq, head_dim)."""
        width = self.shape.rotary_dim
        if width == 0:
            return x
        part, rest = x[..., :width], x[..., width:]
        first, second = part.chunk(2, dim=-1)
        swapped = torch.cat([-second, first], dim=-1)
        return torch.cat([part * cos[:, None] + swapped * sin[:, None], rest], dim=-1)

    def heads(self, flat: Tensor) -> Tensor:
        """(batch, seq, kv_width) to (batch, kv_heads, seq, head_dim)."""
        return flat.unflatten(-1, (self.shape.kv_heads, self.shape.head_dim)).transpose(1, 2)

    def history(
        self, pipeline: Pipeline, known: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Attention-ready keys and values of all slots of the text."""
        if known is None:
            empty = torch.zeros(1, 0, self.shape.kv_width, dtype=self.case.model.dtype)
            return self.heads(empty), self.heads(empty)
        slots = slots_of(pipeline, *known, self.plan.anchors)
        positions = self.plan.anchors + pipeline.group * torch.arange(slots.shape[1])
        place = place_of(self.case.plan, self.index)
        family = self.case.anatomy.family
        at = rotary(self.case.plain, family, (positions + place)[None], slots)
        if pipeline.bits is None:
            return self._read(pipeline, slots, at)
        if self.reading == "expanded":
            keys, values = self._read(pipeline, slots, at)
            bits = pipeline.bits
            return rounded(keys, bits.key_bits, bits.seed), rounded(
                values, bits.value_bits, bits.seed
            )
        keys, values = self._read(pipeline, rounded_code(pipeline, slots), at)
        if self._absorbs_keys(pipeline):
            keys = self._absorbed_keys(pipeline, slots, at)
        return keys, values

    def _read(
        self, pipeline: Pipeline, slots: Tensor, at: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        keys, values = pipeline.depth.decode(self.index, slots)
        return self.turned(self.normed(self.heads(keys), "k_norm"), *at), self.heads(values)

    def _absorbs_keys(self, pipeline: Pipeline) -> bool:
        return (
            self.reading == "absorbed"
            and self.shape.rotary_dim < self.shape.head_dim
            and pipeline.depth.affine_keys(self.index) is not None
        )

    def _absorbed_keys(
        self, pipeline: Pipeline, slots: Tensor, at: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The rotary part as it was, quantised by itself; the rest from the quantised code, with
        the k_norm scale of the key as it was."""
        width = self.shape.rotary_dim
        true = self.heads(pipeline.depth.decode(self.index, slots)[0])
        rest = self.heads(pipeline.depth.decode(self.index, rounded_code(pipeline, slots))[0])
        found = k_norm_weight(self.case.anatomy.family, self.module)
        if found is not None:
            weight, epsilon = found
            scale = true.pow(2).mean(-1, keepdim=True).add(epsilon).rsqrt()
            rest = rest * scale * weight
        bits = pipeline.bits
        assert bits is not None
        turned = self.turned(self.normed(true, "k_norm"), *at)[..., :width]
        if width:
            turned = rounded(turned, bits.key_bits, bits.seed)
        return torch.cat([turned, rest[..., width:]], dim=-1)

    def attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        pipeline: Pipeline,
        exact: int,
        skipped: Skipped | None,
    ) -> Tensor:
        """One softmax over [exact | slots]; the first `exact` queries see exact keys only."""
        seq, slots = queries.shape[2], keys.shape[2] - queries.shape[2]
        mask = reference_mask(
            torch.arange(seq),
            seq,
            slots,
            anchors=self.plan.anchors,
            window=self.plan.window,
            group=pipeline.group,
        )
        mask[:exact, :seq] = torch.ones(exact, seq, dtype=torch.bool).tril()
        mask[:exact, seq:] = False
        if skipped is not None and self.index >= skipped.split:
            mask = skipped.mask(mask, slots, pipeline.group, self.plan.anchors)
        repeat = queries.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(repeat, dim=1) for x in (keys, values))
        logits = self.module.scaling * queries @ keys.transpose(2, 3)
        if pipeline.sequence is not None and pipeline.sequence.mass:
            bias = pipeline.sequence.mass[str(self.index)]
            logits[..., seq:] += bias[None, :, None, None]
        return logits.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ values


def place_of(plan: Any, layer: int) -> float:
    """Which of its tokens' positions a slot has, from its first token's on."""
    for entry in plan.sequence:
        if layer in entry.layers:
            last = entry.group - 1
            return {"first": 0.0, "mean": last / 2, "last": float(last)}[entry.position]
    return 0.0


def slots_of(pipeline: Pipeline, code: Tensor, hidden: Tensor, anchors: int) -> Tensor:
    """All slots of a text, (1, slots, code_width), each averaged by itself."""
    gate, group = pipeline.sequence, pipeline.group
    if gate is None:
        return code[:, anchors:]
    if pipeline.depth.gate_source.kind == "hidden":
        hidden = rms_normalize(hidden)
    made = [code[:, :0]]
    for start in range(anchors, code.shape[1] - group + 1, group):
        own = slice(start, start + group)
        slot = weighted(pipeline, code[:, own], hidden[:, own], gate.ape)
        if gate.carry is not None and start > anchors:
            before = slice(start - group, start)
            earlier = weighted(pipeline, code[:, before], hidden[:, before], gate.ape_before)
            share = widened(pipeline, gate.carry)
            slot = (1 - share) * slot + share * earlier
        made.append(slot[:, None])
    return torch.cat(made, dim=1)


def weighted(pipeline: Pipeline, code: Tensor, hidden: Tensor, ape: Tensor | None) -> Tensor:
    """softmax(score + ape) over a group's tokens, times their codes: (1, code_width)."""
    gate = pipeline.sequence
    assert gate is not None
    if gate.score is None or ape is None:
        return code.mean(dim=1)
    scores = functional.linear(hidden, gate.score.weight)
    if gate.expand is not None:
        heads = sum(part.heads for part in pipeline.depth.code_parts)
        own = functional.linear(scores[..., heads:], gate.expand.weight)
        scores = widened(pipeline, scores[..., :heads]) + own
    return (widened(pipeline, (scores + ape).softmax(dim=1)) * code).sum(dim=1)


def widened(pipeline: Pipeline, weights: Tensor) -> Tensor:
    """A weight for every value of a code."""
    parts = pipeline.depth.code_parts
    if weights.shape[-1] != sum(part.heads for part in parts):
        return weights
    widths = [part.width for part in parts for _ in range(part.heads)]
    return weights.repeat_interleave(torch.tensor(widths), dim=-1)


def rounded(vectors: Tensor, bits: int, seed: int) -> Tensor:
    """Decoded from what they are encoded to, along the last axis."""
    codec = TurboQuant(vectors.shape[-1], bits, seed)
    return codec.decode(codec.encode(vectors), dtype=vectors.dtype)


def rounded_code(pipeline: Pipeline, slots: Tensor) -> Tensor:
    """Each head of each part rounded as a vector of its own."""
    bits = pipeline.bits
    assert bits is not None
    pieces, start = [], 0
    for part in pipeline.depth.code_parts:
        each = bits.value_bits if part.kind == "values" else bits.key_bits
        for _ in range(part.heads):
            pieces.append(rounded(slots[..., start : start + part.width], each, bits.seed))
            start += part.width
    return torch.cat(pieces, dim=-1)


@pytest.mark.every_family
def test_folded_logits_are_those_of_the_dense_reference(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """A whole folded prompt of an attached model, where each layer expands its own slots."""
    _check(case(arch, method, resident="expanded"), helpers)


@pytest.mark.from_codes
def test_logits_read_from_codes_are_those_of_the_dense_reference(
    case: Any, helpers: Any, arch: str, method: str, reading: str
) -> None:
    """The same where slots stay codes."""
    _check(case(arch, method, resident=reading), helpers)


def _check(made: Any, helpers: Any) -> None:
    ids = helpers.tokens(44)
    with made.attach() as attachment:
        folded = made.run(ids, attachment.new_cache())
        readings = attachment.resident
    helpers.assert_same(folded, Dense(made, readings).logits(ids))


def test_decoding_after_an_exact_prefill_is_that_of_the_dense_reference(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """The prompt's queries see everything; the tokens after it see what was kept of it."""
    made = case(arch, method, prefill_attention="exact", resident="auto")
    ids = helpers.tokens(44)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        parts = [made.run(ids[:, :33], cache)]
        parts += [made.run(column, cache) for column in ids[:, 33:].split(1, dim=1)]
        readings = attachment.resident
    helpers.assert_same(torch.cat(parts, dim=1), Dense(made, readings, exact=33).logits(ids))


@pytest.mark.quantised
def test_decoding_in_float32_is_that_of_the_dense_reference(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """One token at a time through the packed reading, where the machine can compile it.

    In float32 some codes flip, see `conftest.FLIPPED`; most logits are far closer.
    """
    made = case(arch, method, dtype=torch.float32, resident="expanded")
    ids = helpers.tokens(44)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        parts = [made.run(column, cache) for column in ids.split(1, dim=1)]
        readings = attachment.resident
    ours, theirs = torch.cat(parts, dim=1), Dense(made, readings).logits(ids)
    helpers.assert_same(ours, theirs, helpers.tolerance(1))
    typical = (ours - theirs).abs().median() / theirs.abs().max()
    assert typical < helpers.tolerance(0) / 10


@pytest.mark.on_families("qwen3", "qwen3_5")
def test_scores_with_an_exact_history_are_those_of_the_dense_reference(
    case: Any, helpers: Any, arch: str, method: str, reading: str
) -> None:
    """Two passes: slots are made of the plain model's activations, and the text sees those."""
    made = case(arch, method, resident=reading)
    ids = helpers.tokens(44)
    with made.attach() as attachment:
        scored = attachment.hidden_states(ids, history="exact")
        readings = attachment.resident
    sources = {source for pipeline in made.addon.pipelines for source in pipeline.inputs}
    given = capture(made.plain, made.anatomy, sources, ids)
    helpers.assert_same(scored, Dense(made, readings, given=given).hidden_states(ids))


SKIPPING_CALLS = {
    "one prompt": [44],
    "nothing to skip but anchors": [15],
    "two turns": [30, 24],
    "a short turn": [26, 7, 19],
    "tokens between turns": [25, 1, 1, 1, 22, 1],
}


@pytest.mark.parametrize("calls", SKIPPING_CALLS.values(), ids=SKIPPING_CALLS)
@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "smollm3"])
@pytest.mark.parametrize("resident", ["expanded", "shared", "absorbed"])
@pytest.mark.skipping
def test_skipped_prompts_are_those_of_the_dense_reference(
    case: Any, helpers: Any, arch: str, method: str, resident: str, calls: list[int]
) -> None:
    """Each call's last logits, where upper layers run on anchors and replayed tokens only."""
    _check_skipped(case(arch, method, prefill="skip", replay=12, resident=resident), helpers, calls)


@pytest.mark.parametrize("calls", SKIPPING_CALLS.values(), ids=SKIPPING_CALLS)
@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("method", ["ced", "ced-csa2+pool-overlap-3"])
def test_states_of_skipped_tokens_are_those_of_the_dense_reference(
    case: Any, helpers: Any, arch: str, method: str, calls: list[int]
) -> None:
    """With a state projector linear layers go on over predicted inputs of skipped tokens."""
    made = case(arch, method, prefill="skip", replay=12, state_projector=True)
    _check_skipped(made, helpers, calls)


def _check_skipped(made: Any, helpers: Any, calls: list[int]) -> None:
    ids = helpers.tokens(sum(calls))
    ends = torch.tensor(calls).cumsum(0)
    parts = []
    with made.attach() as attachment:
        cache = attachment.new_cache()
        for end, count in zip(ends.tolist(), calls, strict=True):
            parts.append(helpers.last(made.model, ids[:, end - count : end], cache))
        readings = attachment.resident
    dense = Dense(made, readings, skipped=Skipped(made, calls)).logits(ids)
    helpers.assert_same(torch.cat(parts, dim=1), dense[:, ends - 1])
