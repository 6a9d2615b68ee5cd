"""Whether the suite tells what lm-eval's own `hf` model tells, and that folding nothing is plain.

SmolLM2-135M answers the first items of LAMBADA, GSM8K and IFEval through the suite, and through
lm-eval's own model on the same files, one item in a pass: prompts, answers and scores are compared
item by item. Answers to GSM8K and IFEval end after `--tokens` new tokens at the latest, in both.
And all tasks are answered by the plain model and with add-ons that fold nothing: the preset
`identity`, whose slots are exact, and `8x` with a window longer than any prompt. So is `recall` by
the tiny hybrid.

    python benchmarks/harness_table.py --data DATA

Leaves `harness.json` and `harness.md` in `results/harness`, and the run that they are made of in
`--work`, where a run that was broken off goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvfold.anatomy import anatomy
from kvfold.evaluation.answer_files import codes
from kvfold.evaluation.environment import environment
from kvfold.evaluation.predictions import Predictions, description_path
from kvfold.evaluation.report import read_json, write_json
from kvfold.evaluation.suite import Suite, run_suite
from kvfold.evaluation.tasks.gsm8k import gsm8k
from kvfold.evaluation.tasks.ifeval import ifeval, without_chance
from kvfold.evaluation.tasks.registry import make_task
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.models import load, tiny_hybrid
from kvfold.presets import preset
from kvfold.store.addon import AddOn

FILES = {
    "lambada": ("lambada_openai", {"test": "lambada/lambada_test.jsonl"}),
    "gsm8k": ("gsm8k", {"test": "gsm8k/test.jsonl", "train": "gsm8k/train.jsonl"}),
    "ifeval": ("ifeval", {"train": "ifeval/input_data.jsonl"}),
}
"""lm-eval's name of each task, and the files of its splits."""

OURS = ("perplexity", "needle", "ruler", "turns", "fidelity")
TINY = "recall"
"""Asked of the tiny hybrid, in whose language it is."""
SHOTS_SEED = 1234
"""lm-eval's own default."""

ABOUT = ("task", "items", "answered_by")
"""What a row of the second table says beside its subjects."""

LONGER_THAN_ALL = 4096
CLOSE = 1e-3
"""Nats between log-probabilities of one target that rounding explains."""


def by_the_harness(
    name: str, data: Path, model: Any, tokenizer: Any, limit: int, tokens: int
) -> list[Any]:
    """lm-eval's own samples, by its own model and its own reader of the files."""
    import lm_eval.tasks
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    task, files = FILES[name]
    changes = {
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(data / f) for split, f in files.items()}},
    }
    folder = Path(lm_eval.tasks.__file__).parent / name
    tasks = TaskManager(include_path=str(folder), include_defaults=False).load(
        {"group": "compared", "task": [changes]}
    )
    own = tasks["tasks"][task]
    own.set_fewshot_seed(SHOTS_SEED)
    if own.OUTPUT_TYPE == "generate_until":
        own.set_config("generation_kwargs", {"max_gen_toks": tokens}, update=True)
    with without_chance():
        found = evaluate(
            HFLM(model, tokenizer=tokenizer, batch_size=1), tasks, limit=limit, bootstrap_iters=0
        )
    samples: list[Any] = found["samples"][task]
    return samples


def compared(items: Sequence[Any], answers: Sequence[Any], samples: Sequence[Any]) -> Any:
    """How many of lm-eval's samples have the same prompt, text and scores here."""
    filters = {sample["filter"] for sample in samples}
    equal = dict.fromkeys(("prompts", "answers", "scores"), 0)
    farthest = 0.0
    for sample in samples:
        number = sample["doc_id"]
        answer, said = answers[number], sample["resps"][0][0]
        equal["prompts"] += items[number]["prompt"] == sample["arguments"][0][0]
        if "text" in answer.said:
            equal["answers"] += answer.said["text"] == said
        else:
            apart = abs(answer.said["log_probability"] - said[0])
            farthest = max(farthest, apart)
            equal["answers"] += answer.said["greedy"] == said[1] and apart < CLOSE
        equal["scores"] += all(
            answer.scores[m if len(filters) == 1 else f"{m},{sample['filter']}"] == sample[m]
            for m in sample["metrics"]
            if m != "perplexity"
        )
    return {"compared": len(samples), **equal, "log_probability_apart": farthest}


def same_scores(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[bool, float]:
    """Whether all that is right or wrong is the same, and how far numbers are apart at most."""
    right, apart = one.keys() == other.keys(), 0.0
    for name, value in one.items():
        if isinstance(value, float):
            apart = max(apart, abs(value - other[name]))
        else:
            right &= value == other[name]
    return right, apart


def folding_nothing(task: str, answers: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Item by item, each subject against the plain model."""
    plain, *others = answers
    found: dict[str, Any] = {"task": task, "items": len(answers[plain])}
    for name in others:
        pairs = [
            same_scores(one.scores, other.scores)
            for one, other in zip(answers[plain], answers[name], strict=True)
        ]
        found[name] = {
            "same": sum(right for right, _ in pairs),
            "numbers_apart": max(apart for _, apart in pairs),
        }
    return found


def made(name: str, settings: TaskSettings, tokens: int) -> Any:
    """A task of the suite, whose answers have so many new tokens at most."""
    cut = {"gsm8k": gsm8k, "ifeval": ifeval}.get(name)
    return make_task(name, settings) if cut is None else cut(settings, max_gen_toks=tokens)


def folds_nothing(model: Any) -> dict[str, AddOn]:
    """Add-ons that change no token's keys and values, by what they are called here."""
    shape = anatomy(model)
    wide = preset("8x", shape).replace(window=LONGER_THAN_ALL)
    return {
        "identity": AddOn.untrained(model, preset("identity", shape)),
        "8x, all in the window": AddOn.untrained(model, wide),
    }


def answered_by(folder: Path, task: str, subjects: Sequence[str]) -> list[str]:
    """The commits that made a run's answers, and not that which compares them now."""
    made = (code for name in subjects for code in codes(description_path(folder, name, task)))
    return list(dict.fromkeys(code["commit"] or "no commit" for code in made))


def markdown(lines: Mapping[str, Sequence[Mapping[str, Any]]], tokens: int, command: str) -> str:
    """Both tables."""
    by_commit: dict[str, list[str]] = {}
    for row in lines["folding_nothing"]:
        by_commit.setdefault(", ".join(row["answered_by"]), []).append(row["task"])
    made = "; ".join(f"{', '.join(tasks)}: {commits}" for commits, tasks in by_commit.items())
    text = [
        "# The suite beside lm-eval's own model, and folding that folds nothing",
        "",
        f"SmolLM2-135M in float32 ({TINY}: the tiny hybrid), one item in a pass; answers to GSM8K",
        f"and IFEval end after {tokens} new tokens; [harness.json](harness.json), made by",
        f"`{command}`. The suite's answers were made by the commits {made}.",
        "",
        "## The plain model: suite and lm-eval's `hf`, item by item",
        "",
        "| task | compared (each filter) | same prompt | same answer | same scores |",
        "|---|--:|--:|--:|--:|",
        *(
            f"| {row['task']} | {row['compared']} | {row['prompts']} | {row['answers']} | "
            f"{row['scores']} |"
            for row in lines["harness"]
        ),
        "",
        "## Folding nothing: items whose judgements are those of the plain model",
        "",
        "In brackets how far the items' other numbers (losses, cosines) are apart at most.",
        "",
    ]
    names = [n for n in (lines["folding_nothing"] or [{}])[0] if n not in ABOUT]
    text += [f"| task | items | {' | '.join(names)} |", f"|---|{'--:|' * (1 + len(names))}"]
    for row in lines["folding_nothing"]:
        cells = (f"{row[name]['same']} ({row[name]['numbers_apart']:.1e})" for name in names)
        text.append(f"| {row['task']} | {row['items']} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def answers_of(folder: Path, task: Any, subjects: Sequence[str]) -> dict[str, list[Any]]:
    """What stands in the run folder, by subject."""
    ids = [item["id"] for item in task.items()]
    return {name: Predictions(folder, name, task.name, {}, ids, 1).read() for name in subjects}


def main() -> None:
    """Answer, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--lambada", type=int, default=100)
    parser.add_argument("--gsm8k", type=int, default=6)
    parser.add_argument("--ifeval", type=int, default=4)
    parser.add_argument("--own", type=int, default=2, help="items of each of kvfold's own tasks")
    parser.add_argument("--tokens", type=int, default=256, help="most new tokens of an answer")
    parser.add_argument("--work", type=Path, default=Path("results/harness/run"))
    parser.add_argument("--out", type=Path, default=Path("results/harness"))
    chosen = parser.parse_args()
    lines: dict[str, list[Any]] = {"harness": [], "folding_nothing": []}
    model, tokenizer = load(dtype=torch.float32)
    for name in (*FILES, *OURS, TINY):
        if name == TINY:
            model, tokenizer = tiny_hybrid()
        limit = getattr(chosen, name) if name in FILES else chosen.own
        settings = TaskSettings(chosen.data, limit=limit, batch=1, tokenizer=tokenizer)
        task = made(name, settings, chosen.tokens)
        folder = chosen.work / name
        run_suite(Suite(model, tokenizer, folds_nothing(model), [task]), folder)
        answers = answers_of(folder, task, read_json(folder / "metrics.json")["subjects"])
        if name in FILES:
            samples = by_the_harness(name, chosen.data, model, tokenizer, limit, chosen.tokens)
            (plain, *_) = answers.values()
            lines["harness"].append({"task": name, **compared(task.items(), plain, samples)})
            print(lines["harness"][-1], flush=True)
        commits = answered_by(folder, task.name, list(answers))
        nothing = folding_nothing(name, answers)
        lines["folding_nothing"].append({**nothing, "answered_by": commits})
        print(lines["folding_nothing"][-1], flush=True)
        here = environment()
        write_json(chosen.out / "harness.json", {**here, "answer_tokens": chosen.tokens, **lines})
        told = markdown(lines, chosen.tokens, here["command"])
        (chosen.out / "harness.md").write_text(told)


if __name__ == "__main__":
    main()
