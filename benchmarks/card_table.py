"""The first model card's ablation on the tiny hybrid: its settings, and kvfold's beside them.

Rows: CED alone (the first upper attention layer from H_6), CSA2 alone (the last attention layer
reads the first upper one), both, and both with k8v4. The card's settings: no anchors, no window,
maps without bias, H_6 as it is, the separate form (K from K, V from V). kvfold's: 4 anchors, a
window of 128, bias, H_6 normalised, the joint form. Everything in closed form on the same text;
the card's residual MLPs are trained by gradient descent and left out on both sides.

Perplexity of documents with questions (all words, and those of answers alone), divergence from
the plain model, and recall of facts from prompts of 512 words; documents and prompts are of seeds
that neither training nor the fit has seen.

    python benchmarks/card_table.py

Leaves `card.json` and `card.md` in `results/prefill`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold import models
from kvfold.evaluation.report import write_atomically
from kvfold.evaluation.rows import Rows
from kvfold.evaluation.runner import PLAIN, Scorer
from kvfold.evaluation.tasks.recall import recall
from kvfold.evaluation.tiny_language import RECALL_KINDS, recall_prompt, training_document
from kvfold.fitting.together import fit_together
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.runtime.logits import plain_hidden_states

SPLIT, SOURCE, READER = 6, 7, 11
FIT_DOCUMENTS, TEST_DOCUMENTS, LENGTH = 96, 16, 1024
RECALL_LENGTH = 512
CARD, OURS = "card", "kvfold"
ROWS = ("CED", "CSA2", "CED + CSA2", "CED + CSA2 + k8v4")


def plan_of(row: str, settings: str) -> Plan:
    """One row's plan under the card's or kvfold's settings."""
    plain = settings == CARD
    ced: dict[str, Any] = {"method": "ced", "split": SPLIT, "layers": [SOURCE]}
    csa2: dict[str, Any] = {"method": "csa2", "source": SOURCE, "readers": [READER]}
    if plain:
        ced |= {"bias": False, "normalize": False}
        csa2 |= {"bias": False, "form": "separate"}
    depth = [entry for name, entry in (("CED", ced), ("CSA2", csa2)) if name in row]
    bits = {"method": "turboquant", "layers": [SOURCE, READER], "key_bits": 8, "value_bits": 4}
    window = {"anchors": 0, "window": 0} if plain else {"anchors": 4, "window": 128}
    return Plan.from_dict({"depth": depth, "bits": [bits] if "k8v4" in row else [], **window})


def documents(seed: str, count: int, tokenizer: Any) -> Tensor:
    """Documents with questions, as ids: (count, LENGTH)."""
    made = (training_document(f"{seed} {n}", LENGTH)[0] for n in range(count))
    return torch.tensor([tokenizer.convert_tokens_to_ids(list(words)) for words in made])


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Every row under both settings, beside the plain model."""
    model, tokenizer = models.tiny_hybrid()
    texts = documents("card test", TEST_DOCUMENTS, tokenizer)
    batches = list(texts.split(1))
    hidden = [plain_hidden_states(model, ids) for ids in batches]
    scorer = Scorer(model, batches, hidden)
    prompts = [
        recall_prompt(f"card {number}", kind, RECALL_LENGTH)
        for kind in RECALL_KINDS
        for number in range(chosen.recall_prompts)
    ]
    settings = {
        "documents": TEST_DOCUMENTS,
        "length": LENGTH,
        "fit_documents": FIT_DOCUMENTS,
        "recall_length": RECALL_LENGTH,
        "prompts_of_a_kind": chosen.recall_prompts,
    }
    table = Rows(chosen.out / "card.json", settings)
    base = scorer.score(PLAIN, hidden)
    table.shared["base"] = {
        "perplexity": base.perplexity,
        **recall(model, prompts, tokenizer).to_dict(),
    }
    plans = {
        f"{row}, {settings}": plan_of(row, settings) for row in ROWS for settings in (CARD, OURS)
    }
    missing = {name: plan for name, plan in plans.items() if name not in table}
    train = documents("card fit", FIT_DOCUMENTS, tokenizer)
    fitted = fit_together(model, missing, train, progress=False) if missing else {}
    for name, addon in fitted.items():
        quality, _ = scorer.measure(name, addon, "folded")
        with attach(model, addon):
            found = recall(model, prompts, tokenizer).to_dict()
        row = {"name": name, "perplexity": quality.perplexity, "kl": quality.kl, **found}
        table.add(row, list(plans))
        print(f"{name}: {quality.perplexity:.3f} {found['overall']}", flush=True)
    table.save()
    return json.loads((chosen.out / "card.json").read_text())


def markdown(data: Mapping[str, Any]) -> str:
    """One line a row, the card's settings and kvfold's side by side."""
    base, made = data["shared"]["base"], data["settings"]
    rows = {row["name"]: row for row in data["rows"]}
    head = [
        "",
        "PPL, card",
        "PPL, kvfold",
        "KL, card",
        "KL, kvfold",
        "recall, card",
        "recall, kvfold",
    ]
    lines = [
        "## The first card's ablation on the tiny hybrid",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        f"| {PLAIN} | {base['perplexity']:.3f} | | | | {_percent(base)} | |",
    ]
    for name in ROWS:
        both = [rows[f"{name}, {settings}"] for settings in (CARD, OURS)]
        cells = [f"{row['perplexity']:.3f} ({_rise(row, base)})" for row in both]
        cells += [f"{row['kl']:.4f}" for row in both] + [_percent(row) for row in both]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    note = (
        f"Folded prefill of {made['documents']} documents of {made['length']:,} words; recall at "
        f"{made['recall_length']} words, {made['prompts_of_a_kind']} prompts of each of "
        f"{len(RECALL_KINDS)} kinds; fitted on {made['fit_documents']} documents."
    )
    return "\n".join([*lines, "", note, ""])


def _percent(row: Mapping[str, Any]) -> str:
    return f"{100 * row['overall']['share']:.1f}%"


def _rise(row: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    return f"{100 * (row['perplexity'] / base['perplexity'] - 1):+.2f}%"


def main() -> None:
    """Measure what is missing, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/prefill"))
    parser.add_argument("--recall-prompts", type=int, default=50, help="of each kind")
    chosen = parser.parse_args()
    write_atomically(chosen.out / "card.md", markdown(measure(chosen)).encode())


if __name__ == "__main__":
    main()
