"""The real peers, in the environment that `kvfold evaluate --peers` makes; skipped without it."""

from __future__ import annotations

import json

import pytest
import torch

from kvfold.evaluation.continuation import continued
from kvfold.evaluation.greedy import read, says
from kvfold.evaluation.tasks.gsm8k import gsm8k
from kvfold.evaluation.tasks.lambada import lambada
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Subject

pytestmark = pytest.mark.slow

SMALLER = ["snapkv@4x", "expected-attention@4x", "kvzip@4x", "streaming-llm@4x"]
PROMPT = 320


@pytest.fixture(scope="module")
def long_ids():
    return torch.randint(5, 261, (1, PROMPT), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def opened(peer_of, kvpress_environment, tiny):
    """`opened(name)`: the model of that peer; every one is opened once."""
    from contextlib import ExitStack

    models = {}
    with ExitStack() as stack:

        def get(name):
            if name not in models:
                peer = peer_of(name, kvpress_environment)
                models[name] = stack.enter_context(peer.open(tiny, lambda _: None))
            return models[name]

        yield get


def plain_bytes(model, tokens):
    shape = model.config
    each = 2 * shape.num_key_value_heads * shape.head_dim * 4 * shape.num_hidden_layers
    return each * tokens


@pytest.mark.parametrize("name", SMALLER)
def test_a_quarter_of_the_bytes_is_kept(opened, tiny, long_ids, name):
    _, cache = read(opened(name).asking([12]), long_ids)
    quarter = plain_bytes(tiny, PROMPT // 4)
    assert cache.kept_bytes()[0] == pytest.approx(quarter, rel=0.01)
    hidden_only = name.startswith("kvzip")
    assert cache.nbytes()[0] == plain_bytes(tiny, PROMPT) if hidden_only else quarter


@pytest.mark.parametrize("name", SMALLER)
def test_compression_is_felt_by_the_question_and_not_by_the_context(opened, tiny, long_ids, name):
    ours, _ = read(tiny, long_ids)
    theirs, _ = read(opened(name), long_ids)
    assert (ours - theirs).abs().max() > 1e-3


@pytest.mark.parametrize("chunk", [1, 16])
def test_dropped_tokens_are_those_that_nothing_later_sees(opened, tiny, long_ids, chunk):
    """StreamingLLM drops known tokens, so that a mask on the plain model tells what is right."""
    question, follow = 5, 32
    ids = torch.cat([long_ids, long_ids[:, :follow]], dim=1)
    context, kept = PROMPT - question, PROMPT // 4 - question
    mask = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
    mask[context:, 4 : context - (kept - 4)] = False
    expected = tiny(input_ids=ids, attention_mask=mask[None, None]).logits[:, PROMPT - 1 :]
    model = opened("streaming-llm@4x")
    scores, cache = read(model.asking([question]), long_ids)
    pieces = [scores[:, None], *continued(model, ids[:, PROMPT:], cache, chunk=chunk)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SMALLER)
def test_no_compression_is_the_plain_model(opened, tiny, long_ids, byte_tokenizer, name):
    model = opened(name.replace("@4x", "@1x"))
    ours, _ = read(tiny, long_ids)
    theirs, cache = read(model, long_ids)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert cache.nbytes() == [plain_bytes(tiny, PROMPT)]
    prompts = long_ids.tolist()
    assert says(model, prompts, byte_tokenizer, 8) == says(tiny, prompts, byte_tokenizer, 8)


def test_what_kvzip_hides_of_one_text_stays_hidden_beside_another(opened, long_ids):
    model = opened("kvzip@4x")
    scores, alone = read(model, long_ids)
    follow = scores.argmax(dim=-1)[:, None]
    expected, _ = read(model, follow, alone)
    _, first = read(model, long_ids)
    read(model, long_ids.flip(1))
    torch.testing.assert_close(read(model, follow, first)[0], expected)


@pytest.mark.parametrize(("name", "least"), [("quantized-4bit", 3.0), ("quantized-2bit", 5.0)])
def test_a_quantised_cache_counts_codes_scales_and_what_is_still_exact(
    opened, tiny, long_ids, name, least
):
    import copy

    model = opened(name)
    _, cache = read(model, long_ids)
    before = cache.nbytes()[0]
    assert plain_bytes(tiny, PROMPT) / before > least
    second = copy.deepcopy(cache)
    one, _ = read(model, long_ids[:, :5], cache)
    assert cache.nbytes()[0] - before == plain_bytes(tiny, 5)
    torch.testing.assert_close(read(model, long_ids[:, :5], second)[0], one)


@pytest.mark.parametrize("name", ["snapkv@4x", "kvzip@4x", "quantized-4bit"])
def test_sizes_at_lengths_are_those_of_real_caches(peer_of, kvpress_environment, name):
    memory = peer_of(name, kvpress_environment).memory((256, 512), 0)
    assert [entry.tokens for entry in memory] == [256, 512]
    for entry in memory:
        assert entry.stored_bytes <= entry.resident_bytes
        if "@4x" in name:
            assert entry.times_smaller == pytest.approx(4, rel=0.01)
    if name == "kvzip@4x":
        assert memory[0].resident_bytes == memory[0].plain_bytes


def test_harness_tasks_score_the_uncompressed_peer_as_the_plain_model(
    opened, tiny, byte_tokenizer, tmp_path
):
    pytest.importorskip("lm_eval")
    question = {"question": "Two and two?", "answer": "It is 4 #### 4"}
    passage = {"text": "one two three four five six seven eight nine ten eleven"}
    for name, records in {
        "gsm8k/train.jsonl": [question] * 6,
        "gsm8k/test.jsonl": [question] * 2,
        "lambada/lambada_test.jsonl": [passage] * 2,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = TaskSettings(tmp_path, batch=2, tokenizer=byte_tokenizer)
    peer = opened("plain")
    for task in (gsm8k(settings, max_gen_toks=12), lambada(settings)):
        ours = task.answers(Subject("ours", tiny, byte_tokenizer), task.items())
        theirs = task.answers(Subject("peer", peer, byte_tokenizer, peer=peer), task.items())
        for one, other in zip(ours, theirs, strict=True):
            assert other.said.get("text") == one.said.get("text")
            assert other.scores.get("acc") == one.scores.get("acc")
            if "log_probability" in one.scores:
                expected = pytest.approx(one.scores["log_probability"], abs=1e-3)
                assert other.scores["log_probability"] == expected
