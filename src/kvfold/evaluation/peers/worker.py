"""The process that runs a peer: one model, one method, asked in JSON lines on its standard input.

Run by file, in an environment of its own: it imports torch, transformers, and what its method is
from (kvpress, optimum-quanto), and nothing of kvfold. What it prints goes to standard error.

A request is a line of JSON; an answer is a line of JSON and then the bytes of the tensors that the
line lists, float32. Rows run one after another, each on a cache of its own, so that no row is
padded. A new row is read in two parts: the context, after which the method compresses the cache,
and the question, which follows on what is left, as in kvpress' own pipeline.

    {"op": "read", "rows": [[...]], "questions": [3], "kept": [200], "keep": "last", "columns": 0}
    {"op": "go_on", "caches": [0], "rows": [[...]], "keep": "all", "columns": 4}
    {"op": "copy", "caches": [0]}        {"op": "bytes", "caches": [0]}

kept: of the context's tokens, null for all. keep: logits of the last token or of all that are new
(of a new row: of its question). columns: of so many last ones also what each layer's attention put
out, and the final hidden state. Any request may `drop` caches that nobody needs any more.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

PRESSES = {
    "snapkv": "SnapKVPress",
    "expected-attention": "ExpectedAttentionPress",
    "kvzip": "KVzipPress",
    "streaming-llm": "StreamingLLMPress",
}
SNAPKV_WINDOW = 64
"""kvpress' own choice."""

QUANTIZED_GROUP = 64
"""transformers' own choice: values that share a scale."""

PACKAGES = ("torch", "transformers", "kvpress", "optimum-quanto")
MASKS = "masked_key_indices"
"""Where kvpress notes, on an attention module, the keys that it only hides."""

HIDDEN = "hidden"


@dataclass
class Row:
    """One text: its cache, how many of its tokens were read, and what of it is only hidden."""

    cache: Any
    seen: int = 0
    masks: list[Any] = field(default_factory=list)


class Worker:
    """See the module. only_layers: of the model, None for all; bytes are those of all layers."""

    def __init__(
        self,
        source: str,
        method: str,
        dtype: torch.dtype,
        device: str,
        bits: int | None,
        only_layers: int | None,
    ) -> None:
        self.method, self.bits = method, bits
        self.model = load(source, dtype).to(device).eval().requires_grad_(False)
        self._check_layers()
        self.times = 1.0
        if only_layers is not None:
            layers = self.model.model.layers
            self.times = len(layers) / only_layers
            self.model.model.layers = layers[:only_layers]
            self.model.config.num_hidden_layers = only_layers
        if method == "kvzip":
            self._without_chat_template(source)
        self.rows: dict[int, Row] = {}
        self.made = 0

    def answer(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain data and tensors."""
        for number in request.get("drop", ()):
            self.rows.pop(number, None)
        given = {key: value for key, value in request.items() if key not in ("op", "drop")}
        operations: dict[str, Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]] = {
            "read": self.read,
            "go_on": self.go_on,
            "copy": self.copy,
            "bytes": self.bytes,
        }
        return operations[request["op"]](**given)

    def read(
        self,
        rows: Sequence[Sequence[int]],
        questions: Sequence[int],
        kept: Sequence[int | None],
        keep: str,
        columns: int,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """New texts; the logits are of their questions."""
        numbers = []
        for ids, question, some in zip(rows, questions, kept, strict=True):
            row = self._context(ids[:-question], some)
            numbers.append(self.made)
            self.rows[self.made] = row
            self.made += 1
        ends = [ids[-question:] for ids, question in zip(rows, questions, strict=True)]
        return self.go_on(numbers, ends, keep, columns)

    def go_on(
        self, caches: Sequence[int], rows: Sequence[Sequence[int]], keep: str, columns: int
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """More tokens of texts that were read."""
        found = [
            self._forward(self.rows[number], ids, keep, columns)
            for number, ids in zip(caches, rows, strict=True)
        ]
        tensors = {name: torch.stack([each[name] for each in found]) for name in found[0]}
        return {"caches": list(caches)}, tensors

    def copy(self, caches: Sequence[int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Second caches of the same content."""
        first = self.made
        for number in caches:
            self.rows[self.made] = copied(self.rows[number])
            self.made += 1
        return {"caches": list(range(first, self.made))}, {}

    def bytes(self, caches: Sequence[int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Of each row: bytes of its storages, and of those the ones that are not hidden."""
        real = [self.times * cache_bytes(self.rows[number].cache) for number in caches]
        hidden = [self.times * self._hidden_bytes(self.rows[number]) for number in caches]
        return {"real": real, "kept": [r - h for r, h in zip(real, hidden, strict=True)]}, {}

    def _context(self, ids: Sequence[int], kept: int | None) -> Row:
        """A text whose cache the method has compressed to so many tokens."""
        row = Row(self._new_cache())
        if ids:
            press = nullcontext() if kept is None else self._press(len(ids), kept)(self.model)
            self._set_masks([])
            with press, torch.no_grad():
                # Without the head: nobody asks for the logits of a context.
                self.model.model(input_ids=self._ids(ids), past_key_values=row.cache)
            row.seen, row.masks = len(ids), self._masks()
        return row

    def _forward(self, row: Row, ids: Sequence[int], keep: str, columns: int) -> dict[str, Tensor]:
        positions = torch.arange(row.seen, row.seen + len(ids), device=self.model.device)[None]
        self._set_masks(row.masks)
        with self._columns(columns) as taken, torch.no_grad():
            output = self.model(
                input_ids=self._ids(ids),
                position_ids=positions,
                past_key_values=row.cache,
                use_cache=True,
                logits_to_keep=0 if keep == "all" else 1,
            )
        row.seen += len(ids)
        logits = output.logits[0]
        return {"logits": logits, **taken}

    def _press(self, context: int, kept: int) -> Any:
        import kvpress

        own = {}
        if self.method == "snapkv":
            # Its window is always kept, so that a larger one would leave room for nothing else.
            own["window_size"] = max(1, min(SNAPKV_WINDOW, kept // 2))
        # kvpress keeps int(context * (1 - ratio)) tokens; the little more keeps rounding away.
        press = getattr(kvpress, PRESSES[self.method])
        return press(compression_ratio=max(0.0, 1 - (kept + 0.01) / context), **own)

    def _new_cache(self) -> Any:
        if self.method != "quantized":
            return DynamicCache()
        from transformers import QuantizedCache

        unpack_in_torch()
        config = self.model.config
        # A cache of any number of tokens must be whole groups of values.
        group = math.gcd(QUANTIZED_GROUP, config.num_key_value_heads * self._head_dim())
        return QuantizedCache("quanto", config, nbits=self.bits, q_group_size=group)

    def _head_dim(self) -> int:
        return int(self._attentions()[0].head_dim)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.model.device)

    def _attentions(self) -> list[Any]:
        return [layer.self_attn for layer in self.model.model.layers]

    def _masks(self) -> list[Any]:
        return [getattr(module, MASKS, None) for module in self._attentions()]

    def _set_masks(self, masks: Sequence[Any]) -> None:
        """Hide what a row's own compression has hidden: kvpress keeps that on the model."""
        for number, module in enumerate(self._attentions()):
            setattr(module, MASKS, masks[number] if masks else None)

    def _hidden_bytes(self, row: Row) -> int:
        if all(mask is None for mask in row.masks):
            return 0
        pairs = sum(len(mask[0]) for mask in row.masks if mask is not None)
        return int(pairs * 2 * self._head_dim() * self.model.dtype.itemsize)

    @contextmanager
    def _columns(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Fills in, during a forward, the last `count` positions of what layers put out."""
        taken: dict[str, Tensor] = {}
        if count == 0:
            yield taken
            return

        def take(name: str, tensor: Tensor) -> None:
            taken[name] = tensor[0, -count:]

        def output_of(layer: int) -> Any:
            return lambda _module, _args, output: take(
                str(layer), output[0] if isinstance(output, tuple) else output
            )

        with ExitStack() as stack:
            for layer, module in enumerate(self._attentions()):
                stack.callback(module.register_forward_hook(output_of(layer)).remove)
            head = self.model.get_output_embeddings()
            hook = head.register_forward_pre_hook(lambda _module, args: take(HIDDEN, args[0]))
            stack.callback(hook.remove)
            yield taken

    def _check_layers(self) -> None:
        kinds = set(getattr(self.model.config, "layer_types", None) or ["full_attention"])
        inner = getattr(self.model, "model", None)
        if kinds != {"full_attention"} or not hasattr(inner, "layers"):
            raise ValueError(
                "peers are for models whose layers all have full attention, as kvpress takes "
                f"them; {type(self.model).__name__} has {', '.join(sorted(kinds))}"
            )

    def _without_chat_template(self, source: str) -> None:
        """Let KVzip rebuild raw text, as prompts are here: no template's start is left out of it.

        It loads its tokenizer by the model's name, from which a template would come along.
        """
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.chat_template = None
        self.folder = tempfile.TemporaryDirectory(prefix="kvfold-peer-")
        tokenizer.save_pretrained(self.folder.name)
        self.model.config.name_or_path = self.folder.name


def load(source: str, dtype: torch.dtype) -> Any:
    """The model of a folder or hub id; code that comes with it is never run."""
    return AutoModelForCausalLM.from_pretrained(
        source,
        dtype=dtype,
        attn_implementation="sdpa",
        trust_remote_code=False,
        local_files_only=Path(source).is_dir(),
    )


def cache_bytes(cache: Any) -> int:
    """Bytes of the storages of all layers' tensors, each counted once."""
    storages: dict[int, int] = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            for tensor in plain_tensors(value):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def copied(row: Row) -> Row:
    """The same row again. Quantised tensors can't be copied; nothing ever changes them in place."""
    values = (value for layer in row.cache.layers for value in vars(layer).values())
    shared = {id(value): value for value in values if hasattr(value, "__tensor_flatten__")}
    return copy.deepcopy(row, shared)


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors that a value is made of: a quantised one is made of several."""
    if not isinstance(value, Tensor):
        return
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, name))
    elif value.numel():
        yield value


def unpack_in_torch() -> None:
    """Let quanto unpack bits on a CPU with torch's own operations.

    It would compile a kernel for that at first use, which needs a compiler, and wait without end
    for the lock of a compilation that was killed.
    """
    from optimum.quanto.library.extensions.cpp import ext

    ext._lib = SimpleNamespace(unpack=unpacked)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Values of so many bits, uint8: the lowest bits of every byte first, then the next."""
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])


def versions() -> dict[str, str]:
    """Of what is installed here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def send(out: BinaryIO, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A line and the bytes of the tensors that it lists."""
    wide = {name: tensor.float().cpu().contiguous() for name, tensor in tensors.items()}
    listed = [[name, list(tensor.shape)] for name, tensor in wide.items()]
    out.write(json.dumps({**data, "tensors": listed}).encode() + b"\n")
    for tensor in wide.values():
        out.write(tensor.numpy().tobytes())
    out.flush()


def serve(worker: Worker, requests: BinaryIO, out: BinaryIO) -> None:
    """Answer until the input ends; what goes wrong is an answer too."""
    for line in requests:
        try:
            data, tensors = worker.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - told to the other side, which raises it
            traceback.print_exc()
            send(out, {"error": f"{type(error).__name__}: {error}"}, {})
        else:
            send(out, data, tensors)


def main() -> None:
    """Load, say so, and answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("--method", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--only-layers", type=int)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        worker = Worker(
            options.source,
            options.method,
            getattr(torch, options.dtype),
            options.device,
            options.bits,
            options.only_layers,
        )
    except Exception as error:  # noqa: BLE001 - told to the other side, which raises it
        traceback.print_exc()
        send(out, {"error": f"{type(error).__name__}: {error}"}, {})
        return
    send(out, {"versions": versions()}, {})
    serve(worker, sys.stdin.buffer, out)


if __name__ == "__main__":
    main()
