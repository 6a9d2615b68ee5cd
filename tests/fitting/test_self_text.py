"""What a model writes: sampled as it should be, the same every time, resumed where stopped."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvfold.errors import AttachError, CorpusError
from kvfold.fitting.self_text import PROMPT_TOKENS, self_generated
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.store.addon import AddOn

BEGIN, END = 1, 2


class Letters:
    """A tokenizer of one token a character, from id 3 on."""

    eos_token_id = END

    def __init__(self, bos_token_id=BEGIN, adds_begin=False):
        self.bos_token_id = bos_token_id
        self.adds_begin = adds_begin

    def __call__(self, text, *, verbose, add_special_tokens=True):
        head = [BEGIN] if self.adds_begin and add_special_tokens else []
        return {"input_ids": head + [3 + (ord(c) % 90 if ord(c) < 128 else ord(c)) for c in text]}


class StoppedError(Exception):
    """What a run is stopped by."""


def stop_after(model, batches, monkeypatch):
    """Let the model write so many batches and then fail; returns the list of what it was asked."""
    asked, own = [], model.generate

    def generate(**options):
        if len(asked) == batches:
            raise StoppedError
        asked.append(options["input_ids"])
        return own(**options)

    monkeypatch.setattr(model, "generate", generate, raising=False)
    return asked


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


def made(model, tokenizer=None, **options):
    defaults = {"tokens": 60, "window": 12, "seed": 0, "batch": 2}
    return self_generated(model, tokenizer or Letters(), **{**defaults, **options})


def test_rows_are_full_and_begin_with_the_begin_token(model):
    rows = made(model, tokens=71)
    assert rows.shape == (5, 12)
    assert rows.dtype == torch.int64
    assert (rows[:, 0] == BEGIN).all()
    assert 0 <= int(rows.min()) <= int(rows.max()) < 97
    assert len({tuple(row) for row in rows.tolist()}) == 5


def test_the_new_line_is_the_prompt_where_there_is_no_begin_token(model):
    rows = made(model, Letters(bos_token_id=None))
    assert (rows[:, 0] == 3 + ord("\n") % 90).all()


def test_a_hybrid_writes_too(tiny_model):
    hybrid = tiny_model("qwen3_5")
    assert torch.equal(made(hybrid, tokens=24), made(hybrid)[:2])


def test_the_same_settings_write_the_same_and_others_do_not(model):
    first = made(model)
    assert torch.equal(first, made(model))
    for other in ({"seed": 1}, {"temperature": 0.5}, {"top_p": 0.3}, {"batch": 1}):
        assert not torch.equal(first, made(model, **other))


def test_more_tokens_only_add_rows(model):
    assert torch.equal(made(model, tokens=36), made(model, tokens=96)[:3])


def test_prompts_take_turns_and_are_cut_to_the_shortest_of_their_batch(model):
    prompts = ["abcdefghijklmnop", "bcd", "cdefghijk"]
    rows = made(model, prompts=prompts, window=16, tokens=16 * 6)
    letters = {text: Letters()(text, verbose=False)["input_ids"] for text in prompts}
    long, short, middle = (letters[text] for text in prompts)
    expected = [long[:3], short[:3], middle[:8], long[:8], short[:3], middle[:3]]
    for row, prompt in zip(rows.tolist(), expected, strict=True):
        assert row[: len(prompt)] == prompt
    assert PROMPT_TOKENS == 8
    assert rows[2, 8] != middle[8]


def test_a_begin_token_stands_before_prompts_if_the_tokenizer_puts_it_there(model):
    rows = made(model, Letters(adds_begin=True), prompts=["abc"])
    assert rows[0, :4].tolist() == [BEGIN, *Letters()("abc", verbose=False)["input_ids"]]


def distribution_after(model, prompt, temperature):
    with torch.no_grad():
        scores = model(torch.tensor([[prompt]])).logits[0, -1].double()
    return (scores / temperature).softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_are_drawn_with_the_models_own_probabilities(model, temperature):
    count = 20_000
    rows = made(model, tokens=2 * count, window=2, batch=count, temperature=temperature)
    counts = torch.bincount(rows[:, 1], minlength=97).double()
    expected = count * distribution_after(model, BEGIN, temperature)
    often = expected > 5
    chi_square = ((counts - expected)[often].square() / expected[often]).sum()
    freedom = int(often.sum())
    # Mean and variance of a chi-square are its degrees of freedom and twice that.
    assert float(chi_square) < freedom + 5 * (2 * freedom) ** 0.5
    assert freedom > 20


def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it(model):
    rows = made(model, tokens=2 * 4000, window=2, batch=4000, top_p=0.6)
    shares, order = distribution_after(model, BEGIN, 1.0).sort(descending=True)
    kept = order[: int((shares.cumsum(0) < 0.6).sum()) + 1]
    assert set(rows[:, 1].tolist()) == set(kept.tolist())
    only = made(model, tokens=2 * 50, window=2, batch=50, top_p=1e-6)
    assert set(only[:, 1].tolist()) == {int(order[0])}


def test_rows_go_on_after_end_of_text(tiny_model):
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[END] = 0  # as likely as a token of middling score
    model.generation_config.eos_token_id = [END, 5, 6, 7]
    rows = made(model, tokens=12 * 40, batch=40)
    ends = rows[:, 1:-1] == END
    assert ends.any()
    after = rows[:, 2:][ends]
    assert (after != END).any()
    assert (after != model.config.pad_token_id).any()
    assert model.generation_config.eos_token_id == [END, 5, 6, 7]


def test_what_the_models_configuration_wants_of_generation_changes_nothing(tiny_model):
    model = tiny_model("llama")
    expected = made(model)
    own = model.generation_config
    own.repetition_penalty, own.top_k, own.suppress_tokens = 3.0, 2, list(range(3, 60))
    assert torch.equal(made(model), expected)
    assert model.generation_config is own
    assert own.top_k == 2


def test_the_model_and_every_global_random_state_are_left_as_they_were(tiny_model):
    model = tiny_model("llama").train()
    states = torch.get_rng_state(), random.getstate()
    rows = made(model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    torch.manual_seed(99)
    assert torch.equal(made(model), rows)


def test_the_generation_settings_come_back_after_a_failure(tiny_model, monkeypatch):
    model = tiny_model("llama")
    own = model.generation_config
    stop_after(model, 1, monkeypatch)
    with pytest.raises(StoppedError):
        made(model)
    assert model.generation_config is own


def test_a_stopped_run_goes_on_from_its_file(tiny_model, tmp_path, monkeypatch):
    model = tiny_model("llama")
    expected = made(model)
    path = tmp_path / "new" / "self.safetensors"
    with monkeypatch.context() as patch:
        stop_after(model, 2, patch)
        with pytest.raises(StoppedError):
            made(model, file=path)
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("rows").long(), expected[:4])
    with monkeypatch.context() as patch:
        asked = stop_after(model, 1, patch)
        assert torch.equal(made(model, file=path), expected)
        assert len(asked) == 1
    with monkeypatch.context() as patch:
        stop_after(model, 0, patch)
        assert torch.equal(made(model, file=path), expected)
        assert torch.equal(made(model, file=path, tokens=24), expected[:2])
    assert torch.equal(made(model, file=path, tokens=96), made(model, tokens=96))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_file_of_the_model_in_another_dtype_is_taken(tiny_model, tmp_path, monkeypatch):
    path = tmp_path / "self.safetensors"
    expected = made(tiny_model("llama"), file=path)
    other = tiny_model("llama", dtype=torch.bfloat16)
    stop_after(other, 0, monkeypatch)
    assert torch.equal(made(other, file=path), expected)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"window": 10}, "window"),
        ({"batch": 3}, "batch"),
        ({"prompts": ["abc"]}, "prompts"),
    ],
)
def test_a_file_of_other_settings_is_refused_and_kept(model, tmp_path, other, name):
    path = tmp_path / "self.safetensors"
    made(model, file=path)
    before = path.read_bytes()
    with pytest.raises(CorpusError, match=f"its {name} is different") as caught:
        made(model, file=path, **other)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_a_file_of_another_model_is_refused(model, tiny_model, tmp_path):
    path = tmp_path / "self.safetensors"
    made(model, file=path)
    for other in (tiny_model("llama", seed=1), tiny_model("llama", num_hidden_layers=5)):
        with pytest.raises(CorpusError, match="another model or other weights"):
            made(other, file=path)


def test_a_damaged_or_foreign_file_is_refused(model, tmp_path):
    path = tmp_path / "self.safetensors"
    made(model, file=path)
    with safe_open(path, framework="pt") as file:
        about, rows = file.metadata(), file.get_tensor("rows")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(CorpusError, match="can't be read"):
        made(model, file=path)
    for tensors, metadata in (
        ({"other": rows}, about),
        ({"rows": rows}, None),
        ({"rows": rows}, {**about, "settings": "{}"}),
        ({"rows": rows}, {**about, "settings": json.dumps([1])}),
        ({"rows": rows}, {**about, "base": "{}"}),
    ):
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(CorpusError, match="can't be read"):
            made(model, file=path)
    for wrong in (rows[:3], rows[:, :5].contiguous(), rows + 90, rows - 50, rows[0]):
        save_file({"rows": wrong}, path, metadata=about)
        with pytest.raises(CorpusError, match="whole batches of 2 rows of 12"):
            made(model, file=path)


def test_a_file_that_cannot_be_written_or_has_another_ending_is_refused(model, tmp_path):
    with pytest.raises(CorpusError, match=r"\.safetensors file; got"):
        made(model, file=tmp_path / "self.pt")
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(CorpusError, match=r"can't be: .*name another file"):
        made(model, file=tmp_path / "folder" / "self.safetensors")


def test_a_model_with_an_add_on_is_refused(tiny_model):
    model = tiny_model("llama")
    plan = Plan.from_dict({"anchors": 0, "window": 4, "depth": []})
    with (
        attach(model, AddOn.untrained(model, plan)),
        pytest.raises(AttachError, match="detach it first"),
    ):
        made(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tokens": 11}, "11 tokens, a window of 12"),
        ({"window": 1}, "a window of 1"),
        ({"batch": 0}, "a batch of 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"window": 513, "tokens": 513}, "at most 512 tokens"),
        ({"prompts": []}, "there are no prompts"),
        ({"prompts": ["a", ""]}, "a prompt has none"),
        ({"prompts": [chr(180)]}, "ids from 0 to 96; got 183"),
    ],
)
def test_settings_that_make_no_row_are_refused(model, options, reason):
    with pytest.raises(CorpusError, match=reason):
        made(model, **options)
