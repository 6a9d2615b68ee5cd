"""A peer that can be asked: its worker, and a check that it computes the model that it should.

What can't be compared is told with every run that has peers (`NOTES`), and which task a peer is
not asked is told by the task (`Task.not_for_peers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvfold.anatomy import anatomy
from kvfold.errors import PeerError
from kvfold.evaluation.memory import Memory
from kvfold.evaluation.peers.budget import Budget
from kvfold.evaluation.peers.environment import PeerEnvironment
from kvfold.evaluation.peers.model import PeerModel
from kvfold.evaluation.peers.process import TIMEOUT_SECONDS, WorkerProcess, running
from kvfold.evaluation.peers.spec import PeerSpec
from kvfold.evaluation.tasks.registry import ANSWERED_FREELY
from kvfold.models import model_folder
from kvfold.runtime.attach import AddOnLike
from kvfold.runtime.ledger import plain_bytes

NOTES = (
    (
        "A peer reads a context exactly and compresses its cache once, before it knows the "
        "question (its last token, where there is none). kvfold's folded prompts feel the folding "
        "already while they are read; a plan with prefill_attention: exact compares with peers "
        "more closely."
    ),
    (
        "What peers keep of a prompt is that of the whole prompt, its question included. What "
        "they generate they never compress, while kvfold goes on folding: after long answers they "
        "have more bytes than the table says."
    ),
    (
        "KVzip as kvpress has it hides keys and values from attention and frees none: its bytes "
        "in memory are the plain cache's, those stored are what it would need."
    ),
    (
        "SnapKV always keeps the window that it looks through: 64 tokens as in kvpress, or half of "
        "what it may keep where that is fewer."
    ),
    (
        "The quantised cache of transformers packs all of a prompt, whose own tokens saw exact "
        "keys and values, and keeps up to 128 newer ones as they are."
    ),
    "Peers run row by row on other releases of the libraries, and are not timed.",
)
FORMAT = 1
"""Of how peers are asked: raised where the same peer would answer differently."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "sequence_bias": (None, {}, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "num_beams": (None, 1),
}
"""Generation settings that change which token is chosen greedily, with values that change none."""

CHECK_TOKENS = 24
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.05
"""Largest difference of logits, as a share of the largest logit: that of another order of sums."""


@dataclass(frozen=True)
class Peer:
    """One peer of a run. source: folder or hub id of the model that the run is of."""

    spec: PeerSpec
    environment: PeerEnvironment
    source: str
    plan: Mapping[str, Any] | None
    budget: Budget
    timeout_seconds: float = TIMEOUT_SECONDS

    def describe(self) -> dict[str, Any]:
        """All that its answers depend on beside the model, as plain data."""
        return {
            "format": FORMAT,
            **self.spec.to_dict(),
            "like_plan": None if self.plan is None else dict(self.plan),
            "versions": dict(self.environment.versions),
        }

    @contextmanager
    def open(self, plain: Any, say: Callable[[str], None]) -> Iterator[PeerModel]:
        """The peer as a model; plain: the same model here.

        say: is told how far the worker's own logits are from ours. Raises `PeerError` if it can't
        be started, or computes another model.
        """
        dtype = self.spec.dtype or str(plain.dtype).removeprefix("torch.")
        with self._worker(dtype, plain.device.type) as worker:
            if self.spec.dtype is None:
                release = self.environment.versions.get("transformers")
                say(
                    f"{self.spec.name}: logits of transformers {release} differ from ours by at "
                    f"most {logits_apart(plain, worker):.1e} of the largest, uncompressed"
                )
            yield PeerModel(plain, worker, self.budget)

    def memory(self, lengths: Sequence[int], seed: int) -> tuple[Memory, ...]:
        """Bytes of the cache after prompts of so many tokens, measured on caches of that length.

        One layer is run, on random ids, and counts for all, which are alike. In bfloat16, unless
        the peer is in another dtype.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = self.budget.shape
        with self._worker(self.spec.dtype or "bfloat16", "cpu", "--only-layers", "1") as worker:
            return tuple(
                self._memory(worker, torch.randint(shape.vocab_size, (n,), generator=generator))
                for n in lengths
            )

    def _memory(self, worker: WorkerProcess, ids: torch.Tensor) -> Memory:
        prompt = len(ids)
        made, _ = worker.ask(
            "read",
            rows=[ids.tolist()],
            questions=[1],
            kept=[self.budget.kept(prompt, 1)],
            keep="last",
            columns=0,
        )
        found, _ = worker.ask("bytes", caches=made["caches"])
        worker.ask("copy", caches=[], drop=made["caches"])
        real, kept = int(found["real"][0]), int(found["kept"][0])
        plain = plain_bytes(self.budget.shape, prompt, element_size=2).total
        return Memory(prompt, {self.spec.method: kept}, kept, real, plain)

    def _worker(self, dtype: str, device: str, *more: str) -> Any:
        bits = () if self.spec.bits is None else ("--bits", str(self.spec.bits))
        arguments = (
            *(self.source, "--method", self.spec.method, "--dtype", dtype, "--device", device),
            *("--threads", str(torch.get_num_threads()), *bits, *more),
        )
        return running(
            self.spec.name,
            self.environment.python,
            arguments,
            timeout_seconds=self.timeout_seconds,
        )


def logits_apart(plain: Any, worker: WorkerProcess) -> float:
    """How far an uncompressed worker's logits are from a model's here, as a share of the largest.

    Raises `PeerError` where they are further apart than rounding explains: another model.
    """
    vocabulary = plain.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, CHECK_TOKENS), generator=generator)
    _, tensors = worker.ask(
        "read", rows=ids.tolist(), questions=[CHECK_TOKENS], kept=[None], keep="all", columns=0
    )
    with torch.no_grad():
        ours = plain(input_ids=ids.to(plain.device), use_cache=False).logits.float().cpu()
    theirs = tensors["logits"]
    same = ours.shape == theirs.shape
    apart = float((ours - theirs).abs().max() / ours.abs().max()) if same else float("inf")
    if not apart <= TOLERANCE.get(plain.dtype, LOW_PRECISION_TOLERANCE):
        raise PeerError(
            f"{worker.name} must run the model that is measured; its worker loaded one that gives "
            f"other logits (apart by {apart:.2g} of the largest); name the folder that the model "
            "was loaded from"
        )
    return apart


def check_model(model: Any) -> None:
    """Raise `PeerError` for a model whose layers do not all have full attention."""
    kinds = {layer.kind for layer in anatomy(model).layers}
    if others := sorted(kinds - {"full_attention"}):
        raise PeerError(
            "peers are for models whose layers all have full attention, as kvpress takes them; "
            f"{type(model).__name__} has {', '.join(others)}; leave --peers out on this model"
        )


def check_choices(model: Any) -> None:
    """Raise `PeerError` for a model that generates by other scores than its own.

    Of the harness's tasks that are answered by a text: peers take the likeliest token there, and
    transformers' own generation, which answers for all others, changes scores as it is told.
    """
    chosen = model.generation_config.to_dict()
    changed = {n: chosen[n] for n, neutral in NEUTRAL.items() if chosen.get(n) not in neutral}
    if changed:
        told = ", ".join(f"{name}={value}" for name, value in changed.items())
        raise PeerError(
            "peers choose the likeliest token by the model's own scores; this model's generation "
            f"settings change them ({told}), so answers to {', '.join(ANSWERED_FREELY)} would not "
            "compare; leave these tasks out of what peers are asked (--peers-skip), or the "
            "settings out of generation_config.json"
        )


def make_peers(
    specs: Sequence[PeerSpec],
    environment: PeerEnvironment,
    name: str,
    model: Any,
    candidates: Mapping[str, AddOnLike],
) -> dict[str, Peer]:
    """Peers by name; name: of the model, as `kvfold.models.load` takes it.

    candidates: add-ons by name, which peers may be like (see `spec.check_likes`). Raises
    `PeerError` as `check_model` does.
    """
    check_model(model)
    shape = anatomy(model)
    made: dict[str, Peer] = {}
    for spec in specs:
        plan = None if spec.like is None else candidates[spec.like].plan
        budget = Budget(spec, shape, plan)
        described = None if plan is None else plan.to_dict()
        made[spec.name] = Peer(spec, environment, model_folder(name), described, budget)
    return made
