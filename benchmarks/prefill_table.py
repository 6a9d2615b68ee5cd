"""What skipping half of a prompt's layers costs in quality, and what it saves.

Three parts, each with a file of its own. `text`: SmolLM2-135M-Instruct reads 2,048 tokens of a
book and is scored on the 128 after them, for every split and replay. `hybrid`: the tiny hybrid
answers questions about documents of its own language, where the fact was skipped and where it was
replayed, with recurrent states that start from nothing or from what the state projector predicts.
`compute`: the share of a prompt's operations that is left, and of its measured seconds.

Books are Project Gutenberg's 2600 and 1661; everything is fitted in closed form, SmolLM2 on
WikiText-2 `valid.txt`, the hybrid on documents of seeds that no prompt has.

    python benchmarks/prefill_table.py --data DATA   # DATA/wikitext-2/valid.txt, DATA/gutenberg/

Leaves `text.json`, `hybrid.json`, `compute.json`, `prefill.md` and `prefill.png` in
`results/prefill`. A row that is in its file already is not measured again. One file for all parts,
long as it is, since they share their plans and their tables.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold import models
from kvfold.anatomy import Anatomy, anatomy
from kvfold.budget import operations_left
from kvfold.evaluation.candidates import with_plan
from kvfold.evaluation.continuation import continuation_loss, summary
from kvfold.evaluation.plot import Point, quality_plot
from kvfold.evaluation.report import write_atomically
from kvfold.evaluation.rows import Rows
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.speed import SpeedSettings, measure_speed
from kvfold.evaluation.sweep import Method, depth_plan
from kvfold.evaluation.tasks.recall import recall
from kvfold.evaluation.tiny_language import (
    RECALL_KINDS,
    recall_prompt,
    text_document,
    training_document,
)
from kvfold.fitting.corpus import load_text, token_windows
from kvfold.fitting.fit import fit
from kvfold.fitting.together import fit_together
from kvfold.plan import Plan
from kvfold.runtime.attach import AddOnLike, attach
from kvfold.store.addon import AddOn

BOOKS = ("2600-0.txt", "1661.txt")
BEGIN, END = "*** START OF THIS PROJECT GUTENBERG EBOOK", "*** END OF THIS PROJECT GUTENBERG EBOOK"
SPREAD = 8
"""Every so many windows of a book one is read, so that prompts do not follow each other."""
PROMPT, CONTINUATION = 2048, 128
SPLITS = (15, 20, 22, 24)
REPLAYS = (128, 256, 512)
TEXT_READINGS = ((None, 256), (128, 128), (256, 128), (256, 256), (512, 256))
"""Replay (None: nothing is skipped) and window."""
CSA2_SPLIT = 22
WINDOW = 256
KEY_DISPERSION = 0.0
"""Of CED on SmolLM2: least squares as it is. After prompts of 1,024 tokens the default of 0.5
costs a split of 15 another 3% of perplexity, 1 another 17%: the more keys there are, the more it
tells that some of the regenerated ones are larger than they should be."""
HYBRID_SPLITS = (6, 7)
"""Half of the layers, and the layers below the next one that attends."""
HYBRID_LENGTHS = (512, 1024)
HYBRID_REPLAYS = (2, 8, 128, 256, 512)
"""The first two hardly warm a recurrent state, and are the window too."""
HYBRID_CONTINUATION = 64
HYBRID_FIT_DOCUMENTS = 96
METHODS: dict[str, Method] = {"ced": "ced", "ced + csa2": "csa2"}
FULL = "nothing skipped"
TRUNCATED = "the prompt's last tokens alone"


class Case(NamedTuple):
    """One way to read a prompt: a fit, and how many tokens are replayed (None: no skipping)."""

    fit: str
    replay: int | None
    projector: bool = False
    window: int | None = None

    @property
    def name(self) -> str:
        """What its row is called."""
        how = FULL if self.replay is None else f"replay {self.replay}"
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.fit}, {how}{window}{' + state projector' if self.projector else ''}"

    def of(self, addon: AddOnLike) -> AddOnLike:
        """The fitted add-on under this case's plan."""
        if self.replay is None:
            return with_plan(addon, prefill="full", state_projector=False, window=self.window)
        return with_plan(
            addon,
            prefill="skip",
            replay=self.replay,
            window=self.window,
            state_projector=self.projector,
        )


def book_windows(folder: Path, tokenizer: Any, count: int) -> Tensor:
    """Prompts and continuations, equally many of each book: (count, prompt + continuation)."""
    size, each = PROMPT + CONTINUATION, count // len(BOOKS)
    parts = []
    for book in BOOKS:
        text = (folder / book).read_text(encoding="utf-8-sig")
        body = text[text.index("\n", text.index(BEGIN)) : text.index(END)].strip()
        windows = token_windows(body, tokenizer, window=size, tokens=size * SPREAD * each)
        parts.append(windows[SPREAD - 1 :: SPREAD][:each])
    return torch.cat(parts)


def text_plans(shape: Anatomy) -> dict[str, Plan]:
    """Every fit of the part `text`, by name."""
    return {
        f"{name}, split {split}": depth_plan(shape, method, split, window=WINDOW)
        for name, method in METHODS.items()
        for split in (SPLITS if method == "ced" else (CSA2_SPLIT,))
    }


def text_cases(fits: Mapping[str, Plan]) -> Iterator[Case]:
    """Every measurement of the part `text` with an add-on."""
    for name in fits:
        yield from (Case(name, replay, window=window) for replay, window in TEXT_READINGS)


def text_part(chosen: argparse.Namespace) -> None:
    """Perplexity of what follows prompts from books, plain, truncated, folded and skipped."""
    model, tokenizer = models.load(models.DEFAULT_MODEL, dtype=torch.float32)
    windows = book_windows(chosen.data / "gutenberg", tokenizer, chosen.prompts)
    valid = load_text(chosen.data / "wikitext-2" / "valid.txt", part="all")
    train = token_windows(valid, tokenizer, window=1024, tokens=chosen.tokens)
    settings = {
        "model": models.DEFAULT_MODEL,
        "prompts": len(windows),
        "prompt": PROMPT,
        "continuation": CONTINUATION,
        "key_dispersion": KEY_DISPERSION,
        "fit_tokens": train.numel(),
    }
    table = Rows(chosen.out / "text.json", settings)
    bench = TextBench(model, windows)
    table.shared["base"] = summary(bench.base)
    plans = text_plans(bench.shape)
    cases = [Case(TRUNCATED, replay) for replay in REPLAYS] + list(text_cases(plans))
    missing = [case for case in cases if case.name not in table]
    needed = {name: plan for name, plan in plans.items() if name in {case.fit for case in missing}}
    fitted = fit_together(model, needed, train, key_dispersion=KEY_DISPERSION) if needed else {}
    for case in missing:
        row = bench.measure(case, fitted.get(case.fit))
        table.add(row, [known.name for known in cases])
        print(f"{case.name}: {row['perplexity']:.2f}", flush=True)
    table.save()


class TextBench:
    """A model, its prompts with what follows them, and the plain model's losses.

    windows: (prompts, prompt + continuation) ids.
    """

    def __init__(self, model: Any, windows: Tensor) -> None:
        self.model = model
        self.shape = anatomy(model)
        self.windows = windows
        self.base = continuation_loss(model, windows, PROMPT)

    def measure(self, case: Case, addon: AddOnLike | None) -> dict[str, Any]:
        """One row's figures; no add-on: the plain model on the prompt's last tokens."""
        if addon is None:
            shown = case.replay or PROMPT
            losses = continuation_loss(self.model, self.windows[:, PROMPT - shown :], shown)
            return {"name": case.name, **summary(losses, self.base)}
        read = case.of(addon)
        with attach(self.model, read):
            losses = continuation_loss(self.model, self.windows, PROMPT)
        return {
            "name": case.name,
            "fit": case.fit,
            "split": read.plan.split,
            "replay": case.replay,
            "window": read.plan.window,
            "operations": operations_left(read.plan, self.shape, PROMPT),
            **summary(losses, self.base),
        }


def hybrid_cases(fits: Mapping[str, Plan]) -> Iterator[Case]:
    """Every measurement of the part `hybrid` with an add-on; the window is the replay up to 256."""
    for name in fits:
        yield Case(name, None, window=WINDOW)
        for replay in HYBRID_REPLAYS:
            window = min(replay, WINDOW)
            yield from (Case(name, replay, projector, window) for projector in (False, True))


def hybrid_part(chosen: argparse.Namespace) -> None:
    """Recall of skipped and of replayed facts, and perplexity of tales, on the tiny hybrid."""
    model, tokenizer = models.tiny_hybrid()
    shape = anatomy(model)
    settings = {
        "prompts_of_a_kind": chosen.recall_prompts,
        "continuation": HYBRID_CONTINUATION,
        "fit_documents": HYBRID_FIT_DOCUMENTS,
    }
    table = Rows(chosen.out / "hybrid.json", settings)
    plans = {
        f"{name}, split {split}": depth_plan(shape, method, split, window=WINDOW)
        for split in HYBRID_SPLITS
        for name, method in METHODS.items()
    }
    cases = list(hybrid_cases(plans))
    order = [f"{n}: {name}" for n in HYBRID_LENGTHS for name in (PLAIN, *(c.name for c in cases))]
    fitted: dict[str, AddOnLike] = {}
    for length in HYBRID_LENGTHS:
        exam = Exam(model, tokenizer, length, chosen.recall_prompts)
        name = f"{length}: {PLAIN}"
        if name not in table:
            table.add({"name": name, "replay": None, **exam.sit()}, order)
        for case in cases:
            name = f"{length}: {case.name}"
            if name in table or (case.replay or 0) >= length:
                continue
            fitted = fitted or hybrid_fits(model, tokenizer, plans)
            read = case.of(fitted[case.fit])
            # Prompts skip; what follows may be longer than a small replay and runs through all.
            with attach(model, read, prompt_logits="full"):
                table.add({"name": name, "replay": case.replay, **exam.sit()}, order)
            print(name, flush=True)
    table.save()


def hybrid_fits(model: Any, tokenizer: Any, plans: Mapping[str, Plan]) -> dict[str, AddOnLike]:
    """Each plan's add-on, with a state projector that cases may leave out."""
    documents = (training_document(f"fit {n}", 1024)[0] for n in range(HYBRID_FIT_DOCUMENTS))
    train = word_ids(documents, tokenizer)
    return {
        name: fit(model, plan.replace(prefill="skip", state_projector=True), train, progress=False)
        for name, plan in plans.items()
    }


class Exam:
    """Questions and tales of one length, the same for every case."""

    def __init__(self, model: Any, tokenizer: Any, length: int, prompts: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.length = length
        self.prompts = [
            recall_prompt(f"exam {number}", kind, length)
            for kind in RECALL_KINDS
            for number in range(prompts)
        ]
        size = length + HYBRID_CONTINUATION
        self.tales = word_ids((text_document(f"exam {n}", size) for n in range(32)), tokenizer)

    def sit(self) -> dict[str, Any]:
        """Recall, overall and for every replay by where the fact stood, and the tales' perplexity.

        places: by replay, the shares of facts before and in the prompt's last tokens.
        """
        report = recall(self.model, self.prompts, self.tokenizer)
        losses = continuation_loss(self.model, self.tales, self.length, batch=8)
        places = {
            str(replay): [share.to_dict() for share in report.split_at(self.length - replay)]
            for replay in HYBRID_REPLAYS
        }
        perplexity = math.exp(float(losses.mean()))
        return {
            "length": self.length,
            **report.to_dict(),
            "places": places,
            "tale_perplexity": perplexity,
        }


def word_ids(documents: Iterator[list[str]], tokenizer: Any) -> Tensor:
    """Documents of one length as ids: (documents, words) int64."""
    return torch.tensor([tokenizer.convert_tokens_to_ids(list(words)) for words in documents])


def compute_part(chosen: argparse.Namespace) -> None:
    """Operations that are left of a prompt's, beside measured seconds.

    Weights do not matter to the time that a prompt takes, so they are left untrained.
    """
    model, _ = models.load(models.DEFAULT_MODEL, dtype=torch.float32)
    shape = anatomy(model)
    settings = {"model": models.DEFAULT_MODEL, "prompt": PROMPT, "repeats": chosen.repeats}
    table = Rows(chosen.out / "compute.json", settings)
    cases = {f"split {s}, replay {t}": (s, t) for s in SPLITS for t in REPLAYS}
    if all(name in table for name in cases):
        return
    plans = {
        name: depth_plan(shape, "ced", split, window=WINDOW, prefill="skip", replay=replay)
        for name, (split, replay) in cases.items()
    }
    addons: dict[str, AddOnLike | None] = {PLAIN: None}
    addons |= {name: AddOn.untrained(model, plan) for name, plan in plans.items()}
    ids = torch.randint(shape.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    timing = SpeedSettings(history=PROMPT, decode_tokens=1, repeats=chosen.repeats)
    speeds = measure_speed(model, addons, ids, timing)
    plain = speeds[PLAIN].prefill_tokens_per_second
    table.shared["seconds"] = PROMPT / plain
    for name, plan in plans.items():
        seconds = PROMPT / speeds[name].prefill_tokens_per_second
        figures = {
            "operations": operations_left(plan, shape, PROMPT),
            "seconds": seconds,
            "seconds_of_plain": seconds * plain / PROMPT,
        }
        table.add({"name": name, **figures}, list(cases))


PARTS = {"text": text_part, "hybrid": hybrid_part, "compute": compute_part}


def markdown(found: Mapping[str, dict[str, Any]]) -> str:
    """The tables of all parts that were measured."""
    writers = {"text": _text_table, "hybrid": _hybrid_table, "compute": _compute_table}
    return "\n\n".join(writers[part](data) for part, data in found.items()) + "\n"


def _table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str]], note: str) -> str:
    head = ["prompt", *headings]
    lines = [f"## {title}", "", _line(head), "|" + "---|" * len(head), *map(_line, rows)]
    return "\n".join([*lines, "", note])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _text_table(data: dict[str, Any]) -> str:
    made, base = data["settings"], data["shared"]["base"]
    rows = [[PLAIN, "1.00", f"{base['perplexity']:.2f}", "0"]]
    for row in data["rows"]:
        error = row["loss_rise_error"]
        rise = f"{row['loss_rise']:.4f}" + ("" if error is None else f" ± {error:.4f}")
        figures = _figure(row.get("operations"), ".2f"), f"{row['perplexity']:.2f}", rise
        rows.append([row["name"], *figures])
    return _table(
        f"{made['model']}: the {made['continuation']} tokens after {made['prompt']:,} of a book",
        ("operations", "PPL", "loss rise"),
        rows,
        f"{made['prompts']} prompts from two books; loss in nats, ± the standard error of the "
        f"prompts' differences; 4 anchors; fitted on "
        f"{made['fit_tokens']:,} tokens of WikiText-2 valid.",
    )


def _hybrid_table(data: dict[str, Any]) -> str:
    made, rows = data["settings"], []
    plain = {row["length"]: row for row in data["rows"] if row["name"].endswith(PLAIN)}
    for row in data["rows"]:
        shares = [row["overall"], *(row["by_kind"][kind] for kind in RECALL_KINDS)]
        cells = [*map(_share, shares), "-", "-"]
        if row["replay"]:
            own, base = (r["places"][str(row["replay"])] for r in (row, plain[row["length"]]))
            cells[-2:] = [f"{_share(a)}; {_share(b)}" for a, b in zip(own, base, strict=True)]
        rows.append([row["name"], *cells, f"{row['tale_perplexity']:.3f}"])
    return _table(
        "Tiny hybrid: recall of facts, and perplexity of tales",
        ("recall", *RECALL_KINDS, "fact skipped", "fact replayed", "PPL of tales"),
        rows,
        f"{made['prompts_of_a_kind']} prompts of each kind and length, share of whole answers "
        "with 95% interval; fact skipped, replayed: after it the plain model's on the same "
        f"prompts; 4 anchors; PPL of {made['continuation']} words after a tale.",
    )


def _share(share: dict[str, Any] | None) -> str:
    if share is None or not share["count"]:
        return "-"
    low, high = (round(100 * bound) for bound in share["interval"])
    return f"{100 * share['share']:.0f}% ({low}-{high})"


def _compute_table(data: dict[str, Any]) -> str:
    made, keys = data["settings"], ("operations", "seconds", "seconds_of_plain")
    rows = [[PLAIN, "1.00", f"{data['shared']['seconds']:.2f}", "1.00"]]
    rows += [[row["name"], *(f"{row[key]:.2f}" for key in keys)] for row in data["rows"]]
    return _table(
        f"{made['model']}: a prompt of {made['prompt']:,} tokens",
        ("operations", "seconds", "of the plain model's"),
        rows,
        "Operations: s/L + (T/n)(1 - s/L), of the layers. Seconds: interleaved medians.",
    )


def plot(data: dict[str, Any]) -> bytes:
    """Perplexity of continuations over the operations that are left of a prompt's."""
    points = [
        Point(str(row["replay"]), row["operations"], row["perplexity"], row["fit"])
        for row in data["rows"]
        if row.get("replay") and "fit" in row
    ]
    return quality_plot(
        points,
        base_size=1.0,
        base_perplexity=data["shared"]["base"]["perplexity"],
        title="SmolLM2-135M-Instruct, books: tokens replayed after a prompt of 2,048 was skipped",
        size_label="share of the layers' operations on the prompt",
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext-2/ in it")
    parser.add_argument("--out", type=Path, default=Path("results/prefill"))
    parser.add_argument("--part", choices=tuple(PARTS), action="append", help="this part only")
    parser.add_argument("--tokens", type=int, default=57_344, help="tokens to fit on")
    parser.add_argument("--prompts", type=int, default=8, help="prompts from books")
    parser.add_argument("--recall-prompts", type=int, default=50, help="of each kind and length")
    parser.add_argument("--repeats", type=int, default=3, help="of each timing")
    return parser.parse_args()


def main() -> None:
    """Measure the parts that are asked for, and write tables and plot of all that were ever."""
    chosen = arguments()
    for part in chosen.part or PARTS:
        PARTS[part](chosen)
    files = {part: chosen.out / f"{part}.json" for part in PARTS}
    found = {part: json.loads(path.read_text()) for part, path in files.items() if path.exists()}
    write_atomically(chosen.out / "prefill.md", markdown(found).encode())
    if "text" in found:
        write_atomically(chosen.out / "prefill.png", plot(found["text"]))
    print(json.dumps({part: len(data["rows"]) for part, data in found.items()}))


if __name__ == "__main__":
    main()
