"""Text to fit on and text to check on, and how it becomes windows of tokens.

Without a corpus of their own, people get one that every Python brings along: the prose of the
language reference in `pydoc_data.topics`. Any corpus splits the same way each time into a part to
fit on and a held-out part that shares no text with it. Everything is read into memory, so what
is read is bounded. `kvfold.fitting.packing` takes the same sources one document at a time.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.errors import CorpusError, MissingExtraError
from kvfold.evaluation.encoding import encode
from kvfold.models import is_hub_id

Part = Literal["train", "held_out", "all"]

DEFAULT_CORPUS = "pydoc_data.topics"
HELD_OUT_FRACTION = 0.1
HELD_OUT_EVERY_TOPIC = 6
MAX_CHARACTERS = 256 * 1024 * 1024
HUB_CHARACTERS = 16 * 1024 * 1024
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tokens", ".raw"})
JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
HUB_PREFIX = "hub:"
SHORTEST_PROSE = 40
RECORD_PAIRS = (
    ("question", "answer"),
    ("problem", "solution"),
    ("prompt", "response"),
    ("prompt", "completion"),
)
"""Fields of a record that are one text together, the second on a line of its own."""


@dataclass(frozen=True)
class Corpus:
    """A corpus by name, and its two parts, which share no text."""

    name: str
    train: str
    held_out: str


class CalibrationWindows(NamedTuple):
    """Token windows to fit on and to check on, each (windows, window), int64."""

    train: Tensor
    held_out: Tensor


def load_corpus(corpus: str | Path | None = None, tokenizer: Any = None) -> Corpus:
    """Read a corpus and split it.

    corpus: None for the default; a text file, a JSON-lines file, or a folder of them; or
    `hub:name[@config][:split[:field]]`, a data set of the Hugging Face hub (default split train,
    field text; its first 16 million characters). A record of JSON lines or of a hub data set
    holds `text`, or one of the pairs of `RECORD_PAIRS` (question and answer, ...), or chat
    `messages`, which need the tokenizer's chat template. Except in the default, which splits by
    topic, the last tenth is held out. Raises `CorpusError` with the path or record at fault.
    """
    if corpus is None:
        train, held_out = default_documents()
        return Corpus(DEFAULT_CORPUS, "\n\n".join(train) + "\n", "\n\n".join(held_out) + "\n")
    name = str(corpus)
    text = _read(name, tokenizer)
    if not text.strip():
        raise CorpusError(f"a corpus must have text in it; {name} is empty; name another")
    cut = line_after(text, int(len(text) * (1 - HELD_OUT_FRACTION)))
    return Corpus(name, text[:cut], text[cut:])


def read_documents(name: str, tokenizer: Any = None) -> list[str]:
    """The documents of a corpus in its own order, blank ones too; not of the default one.

    A text file is one document, and so is every record of JSON lines and every row of a hub data
    set. name, tokenizer and errors: as in `load_corpus`.
    """
    if name.startswith(HUB_PREFIX):
        return _read_hub(name, tokenizer)
    return [text for path in _files(name) for text in _file_documents(path, tokenizer)]


def load_text(
    corpus: str | Path | None = None, *, part: Part = "train", tokenizer: Any = None
) -> str:
    """One part of a corpus as one string, or `all` of it (see `load_corpus`)."""
    loaded = load_corpus(corpus, tokenizer)
    if part == "all":
        return loaded.train + loaded.held_out
    return loaded.train if part == "train" else loaded.held_out


def token_windows(
    text: str, tokenizer: Any, *, window: int = 512, tokens: int | None = None
) -> Tensor:
    """Non-overlapping windows from the start of a text: (windows, window), int64.

    The text is tokenised as one string without special tokens; a last partial window is left
    out. tokens: stop after this many (rounded down to whole windows). Raises `CorpusError` if
    there is not one whole window, and says how many tokens there are.
    """
    check_window(window, tokens)
    return cut_windows(torch.tensor(encode(text, tokenizer, tokens), dtype=torch.int64), window)


def check_window(window: int, tokens: int | None) -> None:
    """Raise `CorpusError` unless a window has a token and `tokens` hold a whole window."""
    if window < 1:
        raise CorpusError(f"a window must have at least 1 token; got {window}")
    if tokens is not None and tokens < window:
        raise CorpusError(
            f"tokens must be at least one window; got {tokens} tokens with a window of {window}; "
            "raise tokens or lower the window"
        )


def cut_windows(ids: Tensor, window: int) -> Tensor:
    """Token ids, (tokens,) int64, as windows without overlap: (windows, window).

    A last partial window is left out. Raises `CorpusError` if there is not one whole window.
    """
    count = len(ids) // window
    if count == 0:
        raise CorpusError(
            f"the text must fill at least one window of {window} tokens; it has {len(ids)} "
            "tokens; use a longer text or a shorter window"
        )
    return ids[: count * window].view(count, window)


def calibration_windows(
    corpus: str | Path | None,
    tokenizer: Any,
    *,
    window: int = 512,
    tokens: int | None = None,
    held_out_tokens: int | None = None,
) -> CalibrationWindows:
    """Windows to fit on and held-out windows, from texts that don't overlap.

    tokens, held_out_tokens: at most this many of each; all there are if None. Raises
    `CorpusError` as `load_corpus` and `token_windows` do.
    """
    loaded = load_corpus(corpus, tokenizer)
    train = token_windows(loaded.train, tokenizer, window=window, tokens=tokens)
    try:
        held_out = token_windows(loaded.held_out, tokenizer, window=window, tokens=held_out_tokens)
    except CorpusError as error:
        raise CorpusError(f"held-out part of {loaded.name}: {error}") from None
    return CalibrationWindows(train, held_out)


def line_after(text: str, start: int) -> int:
    """Where a text can be cut from `start` on: at a line, or else a word, or else just there."""
    for boundary in ("\n", " "):
        found = text.find(boundary, start)
        if 0 <= found < len(text) - 1:
            return found + 1
    return start


def default_documents() -> tuple[list[str], list[str]]:
    """The default corpus: documents to train on and held-out ones, each the prose of a topic."""
    import pydoc_data.topics

    topics: dict[str, str] = pydoc_data.topics.topics
    names = sorted(topics)
    held_names = names[::HELD_OUT_EVERY_TOPIC]
    seen: set[str] = set()
    held_out = _prose(topics, held_names, seen)
    return _prose(topics, [name for name in names if name not in held_names], seen), held_out


def _prose(topics: dict[str, str], names: list[str], seen: set[str]) -> list[str]:
    """The prose of each topic that has any, a paragraph once: topics repeat others' sections."""
    documents = []
    for name in names:
        kept = []
        for block in re.split(r"\n\s*\n", topics[name]):
            paragraph = " ".join(textwrap.dedent(block).split())
            if _is_prose(paragraph) and paragraph not in seen:
                seen.add(paragraph)
                kept.append(paragraph)
        if kept:
            documents.append("\n\n".join(kept))
    return documents


def _is_prose(paragraph: str) -> bool:
    return (
        len(paragraph) >= SHORTEST_PROSE
        and paragraph[-1] in ".:!?)"
        and not any(mark in paragraph for mark in ("::=", ">>>", "~~~"))
        and sum(c.isalpha() or c == " " for c in paragraph) > 0.8 * len(paragraph)
    )


def _read(name: str, tokenizer: Any) -> str:
    if name.startswith(HUB_PREFIX):
        return "\n\n".join(_read_hub(name, tokenizer))
    files = _files(name)
    if files == [Path(name)]:
        return _file_text(files[0], tokenizer)
    return "\n\n".join(_file_text(path, tokenizer).rstrip("\n") for path in files) + "\n"


def _files(name: str) -> list[Path]:
    """The file of this name, or those of a folder that are text, sorted and not too many."""
    path = Path(name)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CorpusError(
            f"a corpus must be a file, a folder or hub:NAME; there is no {name}; check the path"
        )
    known = TEXT_SUFFIXES | JSON_LINES_SUFFIXES
    files = [p for p in sorted(path.rglob("*")) if p.suffix in known and p.is_file()]
    if not files:
        raise CorpusError(
            f"a corpus folder must hold files named {', '.join(sorted(known))}; {name} has none"
        )
    _check_size(sum(file.stat().st_size for file in files), name)
    return files


def _check_size(size: int, name: str) -> None:
    if size > MAX_CHARACTERS:
        raise CorpusError(
            f"a corpus is held in memory and may have at most {MAX_CHARACTERS:,} bytes; {name} "
            "has more; name a smaller part of it"
        )


def _file_text(path: Path, tokenizer: Any) -> str:
    documents = _file_documents(path, tokenizer)
    return "\n\n".join(documents) + "\n" if _has_records(path) else documents[0]


def _has_records(path: Path) -> bool:
    return path.suffix in JSON_LINES_SUFFIXES


def _file_documents(path: Path, tokenizer: Any) -> list[str]:
    text = _decoded(path)
    return list(_json_lines(text, path, tokenizer)) if _has_records(path) else [text]


def _decoded(path: Path) -> str:
    try:
        _check_size(path.stat().st_size, str(path))
        data = path.read_bytes()
    except OSError as error:
        raise CorpusError(f"a corpus file must be readable; {path}: {error.strerror}") from None
    if b"\0" in data:
        raise CorpusError(f"a corpus file must be text; {path} is binary (it holds zero bytes)")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"a corpus file must be UTF-8 text; {path} is not, at byte {error.start}; convert it"
        ) from None


def _json_lines(text: str, path: Path, tokenizer: Any) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise CorpusError(f"each line must be one JSON object; {where}: {error}") from None
        yield _record_text(record, where, tokenizer)


def _record_text(record: Any, where: str, tokenizer: Any) -> str:
    fields = record if isinstance(record, dict) else {}
    if isinstance(fields.get("text"), str):
        return str(fields["text"])
    for first, second in RECORD_PAIRS:
        if isinstance(fields.get(first), str) and isinstance(fields.get(second), str):
            return f"{fields[first]}\n{fields[second]}"
    if isinstance(fields.get("messages"), list):
        return _chat_text(fields["messages"], where, tokenizer)
    got = ", ".join(map(str, fields)) if fields else type(record).__name__
    pairs = ", or ".join(" and ".join(pair) for pair in RECORD_PAIRS)
    raise CorpusError(
        f"a record must have text, or {pairs}, as strings, or a list of messages; {where} has "
        f"{got}; rename the field"
    )


def _chat_text(messages: list[Any], where: str, tokenizer: Any) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise CorpusError(
            f"chat messages need a tokenizer with a chat template; {where} has messages, and "
            "this model's tokenizer has no template; write them out as text"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        raise CorpusError(f"the chat template can't render {where}: {error}") from None


class HubSource(NamedTuple):
    """The parts of `hub:NAME[@CONFIG][:SPLIT[:FIELD]]`, empty where they are not named."""

    repository: str
    config: str
    split: str
    field: str


def hub_source(name: str) -> HubSource:
    """Read the name of a hub data set; raises `CorpusError` for one that the hub can't have."""
    data_set, _, rest = name.removeprefix(HUB_PREFIX).partition(":")
    split, _, field = rest.partition(":")
    repository, _, config = data_set.partition("@")
    if not is_hub_id(repository):
        raise CorpusError(
            "a hub corpus is hub:NAME[@CONFIG][:SPLIT[:FIELD]], its NAME a repository of the hub, "
            f"such as owner/name; got {name}; name a folder or a file by its path alone, without "
            f"{HUB_PREFIX}"
        )
    return HubSource(repository, config, split, field)


def _read_hub(name: str, tokenizer: Any) -> list[str]:
    """The rows' texts of a hub data set, streamed until it ends or `HUB_CHARACTERS` are read."""
    repository, config, split, field = hub_source(name)
    if Path(repository).exists():
        raise CorpusError(
            f"{name} is a data set of the hub, and {repository} is also a file or folder here, "
            "which would be read in its place; start kvfold elsewhere, or, if the folder is what "
            f"you want, name it as ./{repository}"
        )
    load_dataset = _load_dataset_function()
    parts: list[str] = []
    size = 0
    try:
        rows = load_dataset(repository, config or None, split=split or "train", streaming=True)
        for number, row in enumerate(rows):
            part = _hub_text(row, field, f"{name}, row {number}", tokenizer)
            parts.append(part)
            size += len(part)
            if size >= HUB_CHARACTERS:
                break
    except CorpusError:
        raise
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        raise CorpusError(f"the hub data set {name} can't be read: {error}") from error
    return parts


def _hub_text(row: Any, field: str, where: str, tokenizer: Any) -> str:
    if not field:
        return _record_text(row, where, tokenizer)
    if not isinstance(row.get(field), str):
        raise CorpusError(f"{where} has no text field {field!r}; it has {', '.join(row)}")
    return str(row[field])


def _load_dataset_function() -> Callable[..., Any]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingExtraError(
            "a hub data set needs the `datasets` package; install it with pip install 'kvfold[hub]'"
        ) from None
    function: Callable[..., Any] = load_dataset
    return function
