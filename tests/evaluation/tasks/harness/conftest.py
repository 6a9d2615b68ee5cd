"""A handful of records of each of the harness's tasks, and a tokenizer of few words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold.evaluation.tasks.settings import TaskSettings

TEXT = (
    "the old miller sold seven sacks of flour to the baker and the baker sold ten loaves of bread "
    "to the miller how many did they sell in all Question: Answer: is are have more than 3 4 7 17 "
    "so #### 12 He She write a short poem about rain with no commas in lower case ."
)
PASSAGES = [
    {"text": "the baker sold ten loaves of bread to the old miller and seven sacks of flour"},
    {"text": "the miller sold flour"},
    {"text": "the old baker and the old miller have more than the poem about rain and bread"},
    {"text": "how many loaves of bread did the baker and the miller sell in all of the rain"},
    {"text": "so they are old"},
]
QUESTIONS = [
    {"question": f"the baker sold {n} loaves how many", "answer": f"He sold {n} so #### {n}"}
    for n in (3, 4, 7, 12, 17, 3)
]
PROMPTS = [
    {
        "key": 1,
        "prompt": "write a short poem about rain with no commas",
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{}, {"keywords": ["rain"]}],
    },
    {
        "key": 2,
        "prompt": "write a poem",
        "instruction_id_list": ["length_constraints:number_sentences"],
        "kwargs": [{"num_sentences": 2, "relation": "at least"}],
    },
    {
        "key": 3,
        "prompt": "write about bread in lower case",
        "instruction_id_list": ["change_case:english_lowercase"],
        "kwargs": [{}],
    },
]
FILES = {
    "lambada/lambada_test.jsonl": PASSAGES,
    "gsm8k/test.jsonl": QUESTIONS[:3],
    "gsm8k/train.jsonl": QUESTIONS,
    "ifeval/input_data.jsonl": PROMPTS,
}


@pytest.fixture
def harness() -> Any:
    """lm-eval, or a skip."""
    return pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'kvfold[eval]'")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder of few records."""
    for name, records in FILES.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path / "data"


@pytest.fixture
def settings(data: Path) -> TaskSettings:
    """For that folder, with a batch of two."""
    return TaskSettings(data, batch=2)


@pytest.fixture(scope="session")
def words() -> Any:
    """A tokenizer of one token a word, for a vocabulary of 97."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", *dict.fromkeys(TEXT.split())]
    vocabulary = {word: n for n, word in enumerate(names)}
    vocabulary |= {f"word{n}": n for n in range(len(names), 97)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}<s> {{ m.role }} {{ m.content }} {% endfor %}Answer:",
    )
