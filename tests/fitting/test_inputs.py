"""What a fit can't work on is told in its own words, whoever asks for it."""

from __future__ import annotations

import pytest
import torch

from kvfold.errors import CorpusError, FitError
from kvfold.fitting.fit import fit
from kvfold.fitting.mixture import Mixture, MixturePart
from kvfold.fitting.stage_table import STAGES
from kvfold.fitting.together import fit_together
from kvfold.plan import Plan
from kvfold.store.addon import AddOn

from .tiny_recipes import PLAN, made_recipe, run, write_sums

GOOD = torch.randint(3, 97, (40, 48), generator=torch.Generator().manual_seed(0))


def changed(place, value):
    ids = GOOD.clone()
    ids[place] = value
    return ids


WRONG = [
    (changed((3, 5), 97), r"must be ids from 0 to 96; got 3 to 97"),
    (changed((0, 0), -1), r"must be ids from 0 to 96; got -1 to 96"),
]


def whole_fit(model, tokens, held_out):
    fit(model, Plan.from_dict(PLAN), tokens, held_out, progress=False)


def stage(name):
    def run_stage(model, tokens, held_out):
        addon = AddOn.untrained(model, Plan.from_dict(PLAN))
        mixture = Mixture([MixturePart("a text", tokens, 1.0)], 0)
        kind = STAGES[name]
        kind.run(model, addon, mixture, held_out, kind.settings(), progress=False)

    return run_stage


CALLS = {"fit": whole_fit, **{name: stage(name) for name in STAGES}}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("ids", "words"), WRONG)
def test_ids_that_are_no_tokens_of_the_model_are_told(tiny_model, call, ids, words):
    model = tiny_model("llama")
    with pytest.raises(CorpusError, match=words):
        call(model, ids, GOOD)
    with pytest.raises(CorpusError, match=f"held_out {words}"):
        call(model, GOOD, ids)


def test_what_is_no_whole_number_is_no_token(tiny_model):
    for tokens, held_out in ((GOOD.float(), GOOD), (GOOD, GOOD.double())):
        with pytest.raises(CorpusError, match="must be token ids, int64; got float"):
            whole_fit(tiny_model("llama"), tokens, held_out)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_inference_mode_is_told(tiny_model, call):
    model = tiny_model("llama")
    with torch.inference_mode(), pytest.raises(FitError, match="outside of that"):
        call(model, GOOD, GOOD)


def test_many_plans_at_once_are_told_too(tiny_model):
    model, plans = tiny_model("llama"), {"a": Plan.from_dict(PLAN)}
    with pytest.raises(CorpusError, match="must be ids from 0 to 96"):
        fit_together(model, plans, GOOD + 90)
    with torch.inference_mode(), pytest.raises(FitError, match="outside of that"):
        fit_together(model, plans, GOOD)


def test_a_recipes_text_of_another_vocabulary_is_told_before_any_stage(tiny_model, tmp_path):
    write_sums(tmp_path)
    model = tiny_model("llama")
    with pytest.raises(CorpusError, match=r"the text \$\{DATA\}/sums.jsonl must be ids"):
        run(model, tmp_path, tmp_path / "work")
    with torch.inference_mode(), pytest.raises(FitError, match="outside of that"):
        run(model, tmp_path, tmp_path / "work", made_recipe(stages=["closed-form"]))
    assert not (tmp_path / "work").exists()
