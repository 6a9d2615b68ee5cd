"""Text that the frozen model writes itself: what its own add-on will have to read.

Rows are sampled with the model's own probabilities from a few tokens on. Each batch has a
generator of its own, so that a row depends on the settings alone, not on how many are asked for or
on where an earlier run was stopped, and nobody else's draws are touched. With a file, what was made
is written after every batch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvfold.anatomy import anatomy, require_plain
from kvfold.errors import AddOnError, CorpusError
from kvfold.evaluation.encoding import encode
from kvfold.fitting.bar import progress_bar
from kvfold.fitting.frozen import frozen
from kvfold.fitting.seeds import derived_seed
from kvfold.fitting.workers import ALONE, Workers
from kvfold.store.fingerprint import Fingerprint

FORMAT_VERSION = 1
PROMPT_TOKENS = 8
"""Tokens of a prompt that are kept at most."""

ROWS = "rows"
SETTINGS = "settings"
FINGERPRINT = "base"


@dataclass(frozen=True)
class _Settings:
    """What a row depends on, beside the model and the row's number."""

    format_version: int
    window: int
    seed: int
    temperature: float
    top_p: float | None
    batch: int
    prompts: str


def self_generated(
    model: Any,
    tokenizer: Any,
    *,
    tokens: int,
    window: int,
    seed: int,
    temperature: float = 1.0,
    top_p: float | None = None,
    prompts: Sequence[str] | None = None,
    batch: int = 8,
    progress: bool = False,
    file: str | Path | None = None,
    workers: Workers = ALONE,
) -> Tensor:
    """Rows that a model writes: (tokens // window, window) int64, prompts included, on the CPU.

    model: plain; it and the caller's random state are left as they were. temperature, top_p: of
    sampling; None samples among all tokens. prompts: row i goes on from the i-th, round and
    round, cut to `PROMPT_TOKENS` and to the shortest in its batch; by default from the tokenizer's
    begin-of-text token, or a new line if it has none. A row goes on after an end-of-text token.
    batch: rows at once, which has a part in what is drawn; the last batch is made whole. file: a
    .safetensors file to take rows from that are there already and to write all to; what it holds
    beyond `tokens` stays. workers: those that make this same call; each writes other batches, all
    get the same rows, and only the first shows the bar and keeps the file.

    Raises `AttachError` while an add-on is attached, `CorpusError` for settings that make no row,
    and for a file that is damaged or of another model or other settings, which is not touched.
    """
    require_plain(model)
    _check(model, tokens, window, temperature, top_p, batch)
    begins = _prompts(tokenizer, prompts, window)
    _check_ids(begins, anatomy(model).vocab_size)
    settings = _Settings(
        FORMAT_VERSION,
        window,
        seed,
        float(temperature),
        None if top_p is None else float(top_p),
        batch,
        hashlib.sha256(json.dumps(begins).encode()).hexdigest(),
    )
    count = tokens // window
    path = None if file is None else _checked_path(Path(file))
    rows = torch.empty(0, window, dtype=torch.int64)
    if path is not None and path.exists():
        rows = _read(path, settings, model)
    base = "" if path is None else Fingerprint.of(model).to_json()
    workers.agree("self-made text", len(rows))
    with frozen(model), progress_bar(progress and workers.first) as (bar, task):
        bar.update(task, description="self text", total=count, completed=len(rows), visible=True)
        while len(rows) < count:
            number = len(rows) // batch + workers.rank
            rows = torch.cat([rows, workers.joined(_batch(model, settings, begins, number))])
            if path is not None and workers.first:
                _write(path, rows, settings, base)
            bar.update(task, completed=min(count, len(rows)))
    return rows[:count].clone()


def _check(
    model: Any, tokens: int, window: int, temperature: float, top_p: float | None, batch: int
) -> None:
    if window < 2 or tokens < window or batch < 1:
        raise CorpusError(
            "self-made text needs windows of at least 2 tokens, tokens for one of them, and a "
            f"batch of at least 1; got {tokens} tokens, a window of {window} and a batch of {batch}"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise CorpusError(f"the temperature must be above 0 and finite; got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise CorpusError(f"top_p must be above 0 and at most 1, or None; got {top_p}")
    longest = anatomy(model).max_positions
    if longest and window > longest:
        raise CorpusError(
            f"the model writes at most {longest} tokens in a row; got a window of {window}; use a "
            "shorter one"
        )


def _prompts(tokenizer: Any, prompts: Sequence[str] | None, window: int) -> list[list[int]]:
    """The ids of the first tokens of each prompt."""
    begin = tokenizer.bos_token_id
    if prompts is None:
        ids = [[begin]] if begin is not None else [encode("\n", tokenizer)[:1]]
    else:
        most = min(PROMPT_TOKENS, window - 1)
        head = [begin] if begin is not None and _adds_begin(tokenizer) else []
        ids = [(head + encode(prompt, tokenizer, most))[:most] for prompt in prompts]
    if not ids or not all(ids):
        raise CorpusError(
            "a row of self-made text begins with at least one token; "
            f"{'there are no prompts' if not ids else 'a prompt has none'}; name prompts with text"
        )
    return ids


def _check_ids(begins: list[list[int]], vocabulary: int) -> None:
    largest = max(map(max, begins))
    if largest >= vocabulary:
        raise CorpusError(
            f"a row must begin with ids from 0 to {vocabulary - 1}; got {largest}; use the model's "
            "own tokenizer"
        )


def _adds_begin(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts its begin-of-text token before a text."""
    ids: list[int] = tokenizer("", verbose=False)["input_ids"]
    return ids[:1] == [tokenizer.bos_token_id]


def _batch(model: Any, settings: _Settings, begins: list[list[int]], number: int) -> Tensor:
    """One batch of rows, (batch, window) int64 on the CPU."""
    first = number * settings.batch
    chosen = [begins[(first + row) % len(begins)] for row in range(settings.batch)]
    shortest = min(map(len, chosen))
    ids = torch.tensor([prompt[:shortest] for prompt in chosen], device=model.device)
    drawing = _Sampling(settings, torch.Generator(model.device), number)
    with _no_stop(model, settings.window - shortest) as config:
        made: Tensor = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=[drawing],
        )
    return made.to("cpu", torch.int64)


class _Sampling:
    """Scores of which the largest is a sample: `log p - log E`, E drawn from Exp(1) for each.

    The argmax of these is distributed as p. `generate` samples from the global generators alone;
    so it takes the largest score here, and the draws come from a generator of our own.
    """

    def __init__(self, settings: _Settings, generator: torch.Generator, number: int) -> None:
        self.temperature, self.top_p = settings.temperature, settings.top_p
        self.generator = generator
        generator.manual_seed(derived_seed(settings.seed, "self text", number))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores: (batch, vocabulary) float32; returns the same shape."""
        scores = scores / self.temperature
        if self.top_p is not None:
            scores = _within(scores, self.top_p)
        drawn = torch.empty_like(scores).exponential_(generator=self.generator)
        return scores - drawn.clamp_min_(torch.finfo(drawn.dtype).tiny).log_()


def _within(scores: Tensor, top_p: float) -> Tensor:
    """Minus infinity for all but the likeliest tokens, the fewest that hold `top_p` together."""
    ordered, order = scores.sort(dim=-1, descending=True)
    shares = ordered.softmax(-1)
    beyond = shares.cumsum(-1) - shares >= top_p
    return scores.masked_fill(beyond.scatter(-1, order, beyond), -math.inf)


@contextmanager
def _no_stop(model: Any, new_tokens: int) -> Iterator[Any]:
    """A configuration of `generate` for so many new tokens, which no end-of-text token stops.

    What a model's own configuration asks for (penalties, suppressed tokens) would fill in whatever
    this one leaves open, so this one stands in for it meanwhile.
    """
    from transformers import GenerationConfig

    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens, do_sample=False, use_cache=True
    )
    own = model.generation_config
    model.generation_config = config
    try:
        yield config
    finally:
        model.generation_config = own


def _checked_path(path: Path) -> Path:
    if path.suffix != ".safetensors":
        raise CorpusError(f"self-made text is kept in a .safetensors file; got {path}; rename it")
    return path


def _write(path: Path, rows: Tensor, settings: _Settings, base: str) -> None:
    """Write all rows atomically."""
    about = {"format": "pt", SETTINGS: json.dumps(asdict(settings)), FINGERPRINT: base}
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file({ROWS: rows.to(torch.int32)}, beside, metadata=about)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise CorpusError(
            f"self-made text must be kept where files can be written; {path} can't be: {error}; "
            "name another file"
        ) from error


def _read(path: Path, settings: _Settings, model: Any) -> Tensor:
    """The rows of a file, (rows, window) int64; whole batches of this model and these settings."""
    remedy = f"name another file, or delete {path} to start anew"
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            rows: Tensor = file.get_tensor(ROWS).to(torch.int64)
        found = json.loads(about[SETTINGS])
        base = Fingerprint.from_dict(json.loads(about[FINGERPRINT]))
        differing = [key for key, value in asdict(settings).items() if found[key] != value]
    except (SafetensorError, AddOnError, OSError, LookupError, TypeError, ValueError) as error:
        raise CorpusError(
            f"{path} must be self-made text that kvfold wrote; it can't be read "
            f"({type(error).__name__}); {remedy}"
        ) from error
    if differing:
        raise CorpusError(
            f"the self-made text in {path} must have been made with the same settings; its "
            f"{', '.join(differing)} is different; {remedy}"
        )
    try:
        base.check(model)
    except AddOnError as error:
        raise CorpusError(
            f"the self-made text in {path} must be this model's; {base.name!r} made it, which is "
            f"another model or other weights; {remedy}"
        ) from error
    whole = rows.ndim == 2 and rows.shape[1] == settings.window
    if not whole or len(rows) % settings.batch or not _are_ids(rows, base.anatomy.vocab_size):
        raise CorpusError(
            f"{path} must hold whole batches of {settings.batch} rows of {settings.window} token "
            f"ids; it holds {tuple(rows.shape)}, or other numbers; {remedy}"
        )
    return rows


def _are_ids(rows: Tensor, vocabulary: int) -> bool:
    return rows.numel() > 0 and 0 <= int(rows.min()) <= int(rows.max()) < vocabulary
