"""The harness's tasks give its own prompts and scores, item by item, whatever the chunks."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from kvfold import attach
from kvfold.anatomy import anatomy
from kvfold.errors import EvaluationError
from kvfold.evaluation.tasks.gsm8k import gsm8k
from kvfold.evaluation.tasks.ifeval import ifeval, without_chance
from kvfold.evaluation.tasks.lambada import lambada
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Answer, Subject
from kvfold.plan import Plan
from kvfold.presets import preset

pytestmark = pytest.mark.usefixtures("harness")

MAKERS = {"lambada": lambada, "gsm8k": gsm8k, "ifeval": ifeval}
GENERATING = ("gsm8k", "ifeval")
FILES = {
    "lambada": ("lambada_openai", {"test": "lambada/lambada_test.jsonl"}),
    "gsm8k": ("gsm8k", {"test": "gsm8k/test.jsonl", "train": "gsm8k/train.jsonl"}),
    "ifeval": ("ifeval", {"train": "ifeval/input_data.jsonl"}),
}
LAYERS = list(range(6))
SKIP = {
    "anchors": 2,
    "window": 4,
    "depth": [{"method": "ced", "split": 3, "layers": [3, 4, 5]}],
    "prefill": "skip",
    "replay": 6,
}


def made(name, settings, **options):
    options |= {"max_gen_toks": 12} if name in GENERATING else {}
    return MAKERS[name](settings, **options)


def answered(task, model, tokenizer, addon=None):
    subject = Subject("it", model, tokenizer, addon)
    items = task.items()
    with nullcontext() if addon is None else attach(model, addon):
        return [
            answer.to_dict()
            for start in range(0, len(items), task.chunk)
            for answer in task.answers(subject, items[start : start + task.chunk])
        ]


@pytest.fixture
def model(tiny_model):
    """Float64, so that what is equal but for rounding says the same words."""
    return tiny_model("llama", dtype=torch.float64)


def of_the_harness(name, data, tmp_path, model, tokenizer, **options):
    """The harness's own run with its own model on the same files, by its own reader of them."""
    import lm_eval.tasks
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    task, files = FILES[name]
    changes = {
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: str(data / file) for split, file in files.items()},
            "cache_dir": str(tmp_path / "cache"),
        },
    }
    folder = Path(lm_eval.tasks.__file__).parent / name
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    tasks = manager.load({"group": "ours", "task": [changes]})
    own = tasks["tasks"][task]
    own.set_fewshot_seed(1234)
    if name in GENERATING:
        own.set_config("generation_kwargs", {"max_gen_toks": 12}, update=True)
    with without_chance():
        found = evaluate(
            HFLM(model, tokenizer=tokenizer, batch_size=1),
            tasks,
            bootstrap_iters=0,
            apply_chat_template=bool(options),
            fewshot_as_multiturn=bool(options),
        )
    return found["results"][task], found["samples"][task]


@pytest.mark.parametrize("options", [{}, {"chat_template": True}], ids=["text", "chat"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_plain_model_scores_as_the_harness_has_it(
    settings, data, tmp_path, model, words, name, options
):
    task = made(name, TaskSettings(data, batch=2, tokenizer=words), **options)
    answers = answered(task, model, words)
    results, samples = of_the_harness(name, data, tmp_path, model, words, **options)
    filters = {sample["filter"] for sample in samples}
    for sample in samples:
        answer = answers[sample["doc_id"]]
        assert task.items()[sample["doc_id"]]["prompt"] == sample["arguments"][0][0]
        assert answer["item"] == str(sample["doc_id"])
        for metric in sample["metrics"]:
            if metric == "perplexity":
                found = answer["scores"]["log_probability"]
                assert found == pytest.approx(sample["perplexity"], abs=1e-9)
                continue
            key = metric if len(filters) == 1 else f"{metric},{sample['filter']}"
            assert answer["scores"][key] == sample[metric]
        if name in GENERATING:
            assert answer["said"]["text"] == sample["resps"][0][0]
    summary = task.summary([Answer(**answer) for answer in answers])
    given = {k.split(",")[0]: v for k, v in results.items() if k.startswith("perplexity,")}
    assert summary == pytest.approx(given)


@pytest.mark.parametrize("name", MAKERS)
def test_settings_that_fold_nothing_answer_as_the_plain_model(
    settings, model, words, bare_addon, name
):
    task = made(name, settings)
    plan = preset("identity", anatomy(model)).replace(anchors=2, window=400)
    plain, same = (answered(task, model, words, addon) for addon in (None, bare_addon(model, plan)))
    for one, other in zip(plain, same, strict=True):
        if name == "lambada":
            pair = [answer["scores"].pop("log_probability") for answer in (one, other)]
            assert pair[0] == pytest.approx(pair[1], abs=1e-9)
            assert one["scores"] == other["scores"]
        else:
            assert one == other


@pytest.mark.parametrize("plan", ["drop", "skip"])
@pytest.mark.parametrize("name", MAKERS)
def test_answers_feel_the_fold_and_are_those_of_single_items(
    data, model, words, bare_addon, name, plan
):
    drop = {"anchors": 0, "window": 3, "depth": [{"method": "drop", "layers": LAYERS}]}
    addon = bare_addon(model, Plan.from_dict(SKIP if plan == "skip" else drop))
    alone, together = (
        answered(made(name, TaskSettings(data, batch=batch)), model, words, addon)
        for batch in (1, 4)
    )
    plain = answered(made(name, TaskSettings(data, batch=4)), model, words)
    assert [answer["item"] for answer in together] == [answer["item"] for answer in plain]
    if name == "lambada":
        scores = [[a["scores"]["log_probability"] for a in run] for run in (alone, together, plain)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-9)
        assert all(abs(a - b) > 1e-3 for a, b in zip(scores[0][2:4], scores[2][2:4], strict=True))
    else:
        assert alone == together
        assert [answer["said"] for answer in alone] != [answer["said"] for answer in plain]


@pytest.mark.parametrize(
    ("chosen", "count"),
    [({}, 5), ({"limit": 2}, 2), ({"fraction": 0.5}, 3), ({"fraction": 0.5, "limit": 3}, 2)],
)
def test_a_fraction_or_a_limit_takes_the_first_items(data, chosen, count):
    task = lambada(TaskSettings(data, **chosen))
    every = lambada(TaskSettings(data)).items()
    assert list(task.items()) == list(every[:count])
    assert task.settings()["items"] == count


def test_examples_in_a_prompt_do_not_depend_on_the_limit(data):
    every = gsm8k(TaskSettings(data)).items()
    assert gsm8k(TaskSettings(data, limit=2)).items()[1] == every[1]
    assert every[0]["prompt"].count("Question:") == 6


def test_settings_are_plain_and_tell_of_data_template_and_length(data, words):
    def told(**options):
        task = gsm8k(TaskSettings(data, tokenizer=words), **options)
        return json.loads(json.dumps(task.settings()))

    before = told()
    assert before["shots"] == 5 and before["generation"]["until"][0] == "Question:"
    assert told(chat_template=True) != before
    assert told(max_gen_toks=3) != before
    (data / "gsm8k/train.jsonl").write_text((data / "gsm8k/train.jsonl").read_text() + "\n")
    after = told()
    assert after["files"]["train"] != before["files"]["train"]
    assert after["files"]["test"] == before["files"]["test"]


BAD = [
    ("lambada", "lambada/lambada_test.jsonl", {"text": "word"}, "at least two words"),
    ("lambada", "lambada/lambada_test.jsonl", {"txt": "a b"}, "text is missing"),
    ("gsm8k", "gsm8k/test.jsonl", {"question": "how many"}, "answer is missing"),
    ("gsm8k", "gsm8k/train.jsonl", {"question": "a", "answer": "4"}, "ends in #### and a number"),
    ("gsm8k", "gsm8k/test.jsonl", {"question": "a", "answer": "#### ..,"}, "#### and a number"),
    ("gsm8k", "gsm8k/test.jsonl", {"question": " ", "answer": "#### 4"}, "must have a question"),
    ("ifeval", "ifeval/input_data.jsonl", {"key": 7, "prompt": "a"}, "id_list is missing"),
]
INSTRUCTED = {"key": 7, "prompt": "write", "instruction_id_list": ["punctuation:no_comma"]}


@pytest.mark.parametrize(("name", "file", "record", "match"), BAD)
def test_a_bad_record_is_refused_by_its_line_before_any_model_runs(data, name, file, record, match):
    path = data / file
    with path.open("a") as lines:
        lines.write("\n" + json.dumps(record))
    number = len(path.read_text().splitlines())
    with pytest.raises(EvaluationError, match=rf"{path.name}:{number} .*{match}"):
        made(name, TaskSettings(data))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kwargs": []}, "one object in kwargs for each of its 1 instructions"),
        ({"kwargs": [3]}, "one object in kwargs for each of its 1 instructions"),
        ({"kwargs": [{}], "prompt": " "}, "must have a prompt"),
        ({"kwargs": [], "instruction_id_list": []}, "at least one instruction"),
        ({"kwargs": [{}], "instruction_id_list": ["no:such"]}, "that the scorer knows"),
        ({"kwargs": [{"num_words": 4}]}, "that the scorer knows"),
    ],
)
def test_instructions_that_the_scorer_can_not_judge_are_refused_by_their_line(data, changes, match):
    path = data / "ifeval/input_data.jsonl"
    with path.open("a") as lines:
        lines.write(json.dumps({**INSTRUCTED, **changes}) + "\n")
    with pytest.raises(EvaluationError, match=rf"input_data.jsonl:4 .*{match}"):
        ifeval(TaskSettings(data))


def test_fields_that_are_not_of_one_type_are_refused_by_the_first_line_that_differs(data):
    path = data / "ifeval/input_data.jsonl"
    sentences = {**INSTRUCTED, "instruction_id_list": ["length_constraints:number_sentences"]}
    with path.open("a") as lines:
        for count in (3, "3", 4):
            kwargs = [{"num_sentences": count, "relation": "at least"}]
            lines.write(json.dumps({**sentences, "kwargs": kwargs}) + "\n")
    with pytest.raises(EvaluationError, match=r"input_data.jsonl:5 must have values of the same"):
        ifeval(TaskSettings(data))


@pytest.mark.parametrize("name", MAKERS)
def test_a_task_in_another_language_than_the_tokenizers_is_refused_at_once(data, name):
    from kvfold.models import load_tokenizer

    tokenizer = load_tokenizer("tiny-hybrid")
    passage = {"text": "whoever speaks another tongue understands hardly anything whatever"}
    (data / "lambada/lambada_test.jsonl").write_text(json.dumps(passage))
    with pytest.raises(EvaluationError, match=rf"task {name} must be in the model's language"):
        made(name, TaskSettings(data, tokenizer=tokenizer))


def test_a_tokenizer_without_an_end_token_can_not_generate_until_the_end(data, words):
    endless = copy.deepcopy(words)
    endless.eos_token = None
    assert made("lambada", TaskSettings(data, tokenizer=endless)).items()
    for name in GENERATING:
        with pytest.raises(EvaluationError, match=rf"task {name} .* an end token"):
            made(name, TaskSettings(data, tokenizer=endless))


def test_the_folder_may_be_named_by_the_environment(harness, data, monkeypatch):
    monkeypatch.setenv("KVFOLD_DATA", str(data))
    assert gsm8k(TaskSettings(None)).files == gsm8k(TaskSettings(data)).files


def test_one_file_may_be_named_in_the_folders_place_where_a_task_has_no_more(data):
    for name in ("lambada/lambada_test.jsonl", "ifeval/input_data.jsonl"):
        task = name.partition("/")[0]
        whole, alone = (made(task, TaskSettings(place)) for place in (data, data / name))
        assert alone.items() == whole.items() and alone.settings() == whole.settings()
    with pytest.raises(EvaluationError, match=r"needs 2 files, gsm8k/train\.jsonl, .*one file"):
        made("gsm8k", TaskSettings(data / "gsm8k/test.jsonl"))


def test_too_few_examples_are_refused(data):
    path = data / "gsm8k/train.jsonl"
    path.write_text(path.read_text().splitlines()[0])
    with pytest.raises(EvaluationError, match=r"at least 5 records, .* got 1"):
        gsm8k(TaskSettings(data))


def test_without_a_folder_the_records_are_the_hubs(data, monkeypatch):
    import datasets

    local = {name: MAKERS[name](TaskSettings(data)) for name in MAKERS}
    monkeypatch.delenv("KVFOLD_DATA", raising=False)
    asked = []

    def of_the_hub(path, name, **_):
        asked.append(path)
        task = {"EleutherAI/lambada_openai": "lambada", "openai/gsm8k": "gsm8k"}.get(path, "ifeval")
        return local[task]._dataset()

    monkeypatch.setattr(datasets, "load_dataset", of_the_hub)
    for name, make in MAKERS.items():
        task = make(TaskSettings(None, limit=2))
        assert list(task.items()) == list(local[name].items()[:2])
        told = task.settings()["files"]
        assert told["hub"] == asked[-1] and len(told["asked"]) == 64
        assert told != make(TaskSettings(None, limit=1)).settings()["files"]


def test_a_hub_that_gives_nothing_is_told_with_what_to_name_instead(monkeypatch):
    import datasets

    def refuse(path, name, **_):
        raise ConnectionError("no way there")

    monkeypatch.delenv("KVFOLD_DATA", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(EvaluationError, match=r"no way there.*--data FOLDER"):
        gsm8k(TaskSettings(None))


def test_a_chat_template_needs_a_tokenizer_that_has_one(data):
    with pytest.raises(EvaluationError, match="needs a tokenizer that has one; got NoneType"):
        lambada(TaskSettings(data), chat_template=True)


def test_the_scorer_judges_alike_every_time_and_leaves_chance_as_it_was():
    import random

    from langdetect import DetectorFactory, detect

    random.seed(5)
    expected = random.random()
    random.seed(5)
    found = set()
    for _ in range(5):
        with without_chance():
            found.add((detect("no so la"), random.random()))
    assert len(found) == 1
    assert random.random() == expected
    assert DetectorFactory.seed is None


def test_smollm2_scores_lambada_as_lm_evals_own_model(smollm2, data_folder):
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = smollm2
    task = lambada(TaskSettings(data_folder, limit=3, batch=1))
    answers = answered(task, model, tokenizer)
    requests = [
        task.harness.construct_requests(
            doc=item["doc"], ctx=item["prompt"], metadata=("lambada_openai", n, 1)
        )
        for n, item in enumerate(task.items())
    ]
    own = HFLM(model, tokenizer=tokenizer, batch_size=1).loglikelihood(requests)
    said = [(answer["said"]["log_probability"], answer["said"]["greedy"]) for answer in answers]
    assert said == own
    assert answers[1]["said"]["target"] == f" {task.items()[1]['doc']['text'].split(' ')[-1]}"


def test_answers_that_leave_no_room_for_their_prompt_are_refused(data, words):
    settings = TaskSettings(data, tokenizer=words, positions=64)
    assert gsm8k(settings, max_gen_toks=63)
    for task, number in (("gsm8k", 64), ("ifeval", None)):
        with pytest.raises(EvaluationError, match=f"this model holds 64 .*{task}=32"):
            MAKERS[task](settings, max_gen_toks=number)


@pytest.mark.parametrize("chat", [False, True])
def test_a_peers_question_is_the_end_of_a_prompt_that_asks(data, words, chat):
    task = gsm8k(TaskSettings(data, tokenizer=words, chat_template=chat))
    for item in task.items():
        question = task._question(item)
        assert item["prompt"].endswith(question)
        assert question.count("Question:") == 1
        assert item["doc"]["question"] in question
    whole = ifeval(TaskSettings(data, tokenizer=words, chat_template=chat))
    assert {whole._question(item) for item in whole.items()} == {""}
