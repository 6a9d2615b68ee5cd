"""The task `fidelity`: how close a subject stays to the plain model, whatever the text says.

Each window is a prompt and a continuation of the text itself, which is fed to the cache that the
prompt has left, as in `kvfold.evaluation.continuation`. At each position from the prompt's last on
the subject's predictions are compared with the plain model's (`kl`, `top_1_agreement`,
`top_5_agreement`; see `kvfold.evaluation.fidelity`), and the outputs of its attention layers with
the plain model's (`attention_cosine`; `cosine/layer 7` in the summary). That is what a layer gives
in the run as it is, with the errors of all layers below. `first_divergence` is how many greedy
tokens after the prompt are the plain model's, before the first that is not.

The plain model runs beside the subject: the add-on is taken off for that, and put on again. Its
runs are kept for the next subject on the same model. Another project's method is compared with the
same plain runs; its final hidden states get the logits that this process' head makes of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kvfold.anatomy import anatomy, attention_module
from kvfold.errors import EvaluationError
from kvfold.evaluation.chunks import logit_chunks
from kvfold.evaluation.continuation import CHUNK, continued, decoding_chunk
from kvfold.evaluation.fidelity import Fidelity
from kvfold.evaluation.greedy import read, speak
from kvfold.evaluation.peers.model import HIDDEN, PeerModel
from kvfold.evaluation.tasks.selection import SelectedItems, in_batches, mean
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Answer, Item, Subject
from kvfold.evaluation.tasks.texts import Windows, text_windows
from kvfold.evaluation.tasks.turns import agreed_tokens
from kvfold.runtime.attach import attachment_of

LENGTHS = (1024,)
WINDOWS = 8
CONTINUATION = 128
GREEDY = 48


@dataclass(frozen=True)
class FidelitySettings:
    """lengths: tokens of a window. windows: of each length.

    continuation: tokens of a window after its prompt; half of a window that is shorter than two of
    these. greedy: tokens of greedy text after the prompt.
    """

    lengths: tuple[int, ...] = LENGTHS
    windows: int = WINDOWS
    continuation: int = CONTINUATION
    greedy: int = GREEDY

    def __post_init__(self) -> None:
        """Raise `EvaluationError` for a window without a prompt."""
        if min(self.lengths) < 2:
            raise EvaluationError(
                f"windows must have at least 2 tokens; got lengths {list(self.lengths)}"
            )


@dataclass(frozen=True)
class _Run:
    """One model on one window, on the CPU.

    hidden: (continuation + 1, hidden), final states from the prompt's last position on. outputs:
    by layer, of attention at the same positions. text: greedy tokens after the prompt.
    """

    hidden: Tensor
    outputs: Mapping[int, Tensor]
    text: list[int]


class FidelityTask(SelectedItems):
    """See the module."""

    name = "fidelity"

    def __init__(self, chosen: FidelitySettings, windows: Windows, of_all: TaskSettings) -> None:
        self.chosen = chosen
        every = [
            {"id": f"{length}/{number}", "length": length, "ids": ids}
            for length, made in windows.by_length.items()
            for number, ids in enumerate(made)
        ]
        super().__init__(every, {**asdict(chosen), "text": dict(windows.source)}, of_all)
        self._plain: WeakKeyDictionary[nn.Module, dict[str, _Run]] = WeakKeyDictionary()

    def answers(self, subject: Subject, items: Sequence[Item]) -> Sequence[Answer]:
        """How near each window's run is to the plain model's, layer by layer in `said`."""

        def answer(alike: Sequence[Item]) -> list[Answer]:
            plain = self._plain_runs(subject, alike)
            own = plain
            if subject.peer is not None:
                own = _peer_runs(subject.peer, alike, self.chosen)
            elif attachment_of(subject.model) is not None:
                own = _runs(subject.model, alike, self.chosen)
            return [_answer(*each, subject) for each in zip(alike, own, plain, strict=True)]

        return in_batches(items, self.batch, lambda item: item["length"], answer)

    def summary(self, answers: Sequence[Answer]) -> Mapping[str, float]:
        """Mean cosine of each attention layer's output, `cosine/layer 7`, by layer."""
        layers = sorted(int(layer) for layer in answers[0].said["cosine"]) if answers else []
        return {
            f"cosine/layer {layer}": mean([a.said["cosine"][str(layer)] for a in answers])
            for layer in layers
        }

    def _plain_runs(self, subject: Subject, alike: Sequence[Item]) -> list[_Run]:
        """The plain model's runs, made where they are not known yet."""
        model = subject.local
        known = self._plain.setdefault(model, {})
        missing = [item for item in alike if item["id"] not in known]
        if missing:
            attachment = attachment_of(model)
            with nullcontext() if attachment is None else attachment.suspended():
                made = _runs(model, missing, self.chosen)
            known.update(zip([item["id"] for item in missing], made, strict=True))
        return [known[item["id"]] for item in alike]


def make(settings: TaskSettings) -> FidelityTask:
    """The task, on `wikitext-2/test.txt` or the text that the settings name."""
    chosen = FidelitySettings(settings.lengths or LENGTHS)
    counts = dict.fromkeys(sorted(set(chosen.lengths)), chosen.windows)
    return FidelityTask(chosen, text_windows(settings, counts), settings)


def _runs(model: Any, alike: Sequence[Item], chosen: FidelitySettings) -> list[_Run]:
    """The model as it is now, on windows of one length."""
    attachment = attachment_of(model)
    chunk = decoding_chunk(None if attachment is None else attachment.plan)
    return _continued_runs(model, alike, chosen, chunk, _last_columns)


def _peer_runs(peer: PeerModel, alike: Sequence[Item], chosen: FidelitySettings) -> list[_Run]:
    return _continued_runs(
        peer, alike, chosen, CHUNK, lambda model, count: model.last_columns(count)
    )


@torch.no_grad()
def _continued_runs(
    model: Any,
    alike: Sequence[Item],
    chosen: FidelitySettings,
    chunk: int,
    last_columns: Callable[[Any, int], AbstractContextManager[dict[int, Tensor]]],
) -> list[_Run]:
    """chunk: tokens in one forward. last_columns: as `_last_columns`, for this kind of model."""
    ids = torch.tensor([item["ids"] for item in alike]).to(model.device)
    count = min(chosen.continuation, ids.shape[1] // 2)
    with last_columns(model, count + 1) as taken:
        scores, cache = read(model, ids[:, :-count])
        text_cache = copy.deepcopy(cache)
        for _ in continued(model, ids[:, -count:], cache, chunk=chunk):
            pass
    text = speak(model, scores, text_cache, chosen.greedy).tolist()
    hidden = taken.pop(HIDDEN)
    return [
        _Run(hidden[row], {layer: each[row] for layer, each in taken.items()}, text[row])
        for row in range(len(alike))
    ]


@contextmanager
def _last_columns(model: Any, count: int) -> Iterator[dict[int, Tensor]]:
    """Fills in, as the model runs, the last `count` positions of all calls together, on the CPU.

    By layer, the output of its attention, (batch, count, hidden); and the final hidden states of
    which logits are made.
    """
    taken: dict[int, Tensor] = {}

    def take(key: int, columns: Tensor) -> None:
        new = columns[:, -count:].cpu()
        taken[key] = torch.cat([taken[key], new], dim=1)[:, -count:] if key in taken else new

    def output_of(layer: int) -> Any:
        return lambda _module, _args, output: take(
            layer, output[0] if isinstance(output, tuple) else output
        )

    with ExitStack() as stack:
        for layer in anatomy(model).foldable_layers:
            hook = attention_module(model, layer).register_forward_hook(output_of(layer))
            stack.callback(hook.remove)
        head = model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _module, args: take(HIDDEN, args[0]))
        stack.callback(hook.remove)
        yield taken


def _answer(item: Item, own: _Run, plain: _Run, subject: Subject) -> Answer:
    model = subject.local
    ids = torch.tensor([item["ids"][-len(own.hidden) :]], device=model.device)
    measure = Fidelity()
    hidden, base = (run.hidden[None].to(model.device) for run in (own, plain))
    for chunk in logit_chunks(model, ids, hidden, None if own is plain else base):
        measure.update(chunk)
    cosines = {str(n): _cosine(own.outputs[n], plain.outputs[n]) for n in sorted(plain.outputs)}
    agreed = agreed_tokens(own.text, plain.text)
    scores = {
        **measure.result(),
        "attention_cosine": mean(list(cosines.values())),
        "first_divergence": float(agreed),
    }
    wrong = [name for name, value in scores.items() if not abs(value) < float("inf")]
    if wrong:
        raise EvaluationError(
            f"every figure must be finite; {subject.name} gave {wrong[0]} {scores[wrong[0]]} on "
            f"window {item['id']}; load the model in float32 or bfloat16, or fit its add-on on "
            "more text"
        )
    said = {
        "length": item["length"],
        "cosine": cosines,
        "text": subject.tokenizer.decode(own.text),
        "plain_text": subject.tokenizer.decode(plain.text),
    }
    return Answer(item["id"], said, scores)


def _cosine(one: Tensor, other: Tensor) -> float:
    """Mean cosine over positions; one, other: (positions, hidden)."""
    found = torch.cosine_similarity(one.double(), other.double(), dim=-1)
    return float(found.clamp(-1, 1).mean())
