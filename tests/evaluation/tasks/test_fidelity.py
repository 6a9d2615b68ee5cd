"""Figures beside the plain model are those of two whole forwards, and the add-on stays attached."""

from __future__ import annotations

import pytest
import torch

from kvfold import attach
from kvfold.anatomy import attention_module
from kvfold.errors import EvaluationError
from kvfold.evaluation.tasks import fidelity
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Subject
from kvfold.plan import Plan
from kvfold.runtime.attach import attachment_of

SAME = 1e-6
LENGTH = 60
CONTINUED = 30


@pytest.fixture
def task(data, characters):
    settings = TaskSettings(data, limit=2, tokenizer=characters, lengths=(LENGTH,))
    return fidelity.make(settings)


@pytest.fixture
def model(endless):
    return endless("llama")


@pytest.fixture
def addon(model, bare_addon):
    plan = {"anchors": 1, "window": 6, "depth": [{"method": "drop", "layers": [2, 3]}]}
    return bare_addon(model, Plan.from_dict(plan))


def forward(model, ids, layers):
    """Log-probabilities and each layer's attention output over a whole text."""
    outputs, hooks = {}, []
    for layer in layers:

        def keep(_module, _args, output, layer=layer):
            outputs[layer] = output[0]

        hooks.append(attention_module(model, layer).register_forward_hook(keep))
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits.log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return scores[0], outputs


def test_the_plain_model_is_wholly_like_itself(task, model, characters):
    for answer in task.answers(Subject("plain", model, characters), task.items()):
        assert answer.scores == {
            "kl": 0.0,
            "top_1_agreement": 1.0,
            "top_5_agreement": 1.0,
            "attention_cosine": pytest.approx(1.0),
            "first_divergence": float(fidelity.GREEDY),
        }
        assert answer.said["text"] == answer.said["plain_text"]


def test_figures_are_those_of_two_whole_forwards(task, model, characters, addon):
    item = task.items()[0]
    places = slice(LENGTH - CONTINUED - 1, LENGTH - 1)
    base, base_outputs = forward(model, item["ids"], range(6))
    with attach(model, addon):
        folded, outputs = forward(model, item["ids"], range(6))
        (answer,) = task.answers(Subject("folded", model, characters), [item])
    kl = (base.exp() * (base - folded)).sum(-1)[places].mean().item()
    assert kl > 1e-3
    assert answer.scores["kl"] == pytest.approx(kl, abs=SAME)
    same = (base.argmax(-1) == folded.argmax(-1))[places].double().mean().item()
    assert answer.scores["top_1_agreement"] == pytest.approx(same)
    last = slice(LENGTH - CONTINUED - 1, LENGTH)
    for layer in range(6):
        cosine = torch.cosine_similarity(outputs[layer], base_outputs[layer], dim=-1)[0, last]
        assert answer.said["cosine"][str(layer)] == pytest.approx(cosine.mean().item(), abs=SAME)
    assert answer.said["cosine"]["0"] == pytest.approx(1.0)
    assert answer.said["cosine"]["2"] < 0.999
    assert task.summary([answer])["cosine/layer 2"] == answer.said["cosine"]["2"]


def test_text_diverges_where_generate_diverges(task, model, characters, addon):
    item = task.items()[0]
    prompt = torch.tensor([item["ids"][:-CONTINUED]])

    def text():
        made = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=fidelity.GREEDY,
            do_sample=False,
            pad_token_id=0,
        )
        return made[0, prompt.shape[1] :].tolist()

    plain = text()
    with attach(model, addon):
        folded = text()
        (answer,) = task.answers(Subject("folded", model, characters), [item])
    first = next(n for n in range(fidelity.GREEDY) if plain[n] != folded[n])
    assert answer.scores["first_divergence"] == first
    assert answer.said["plain_text"] == characters.decode(plain)
    assert answer.said["text"] == characters.decode(folded)


def test_the_plain_model_runs_once_for_all_subjects(task, model, characters, addon, monkeypatch):
    runs = []
    original = fidelity._runs
    monkeypatch.setattr(
        fidelity, "_runs", lambda *a: runs.append(attachment_of(a[0])) or original(*a)
    )
    with attach(model, addon) as attachment:
        first = task.answers(Subject("folded", model, characters), task.items())
        assert runs == [None, attachment]
        again = task.answers(Subject("again", model, characters), task.items())
        assert runs == [None, attachment, attachment]
        assert attachment_of(model) is attachment
    assert [a.scores for a in first] == [a.scores for a in again]
    assert attachment_of(model) is None


def test_a_figure_that_is_not_finite_is_refused(task, tiny_model, characters):
    model = tiny_model("llama", seed=4)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.inf
    with pytest.raises(EvaluationError, match=r"broken gave kl nan on window 60/"):
        task.answers(Subject("broken", model, characters), task.items())
