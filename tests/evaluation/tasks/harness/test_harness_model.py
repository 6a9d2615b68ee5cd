"""lm-eval knows the model `kvfold`, which loads, attaches and scores as the plan says."""

from __future__ import annotations

import pytest
import torch

from kvfold.errors import AddOnError, EvaluationError
from kvfold.plan import Plan
from kvfold.runtime.attach import attach, attachment_of

pytestmark = pytest.mark.usefixtures("harness")

FOLDED = {
    "anchors": 2,
    "window": 4,
    "depth": [{"method": "ced", "split": 3, "layers": [3, 4, 5]}],
}
SKIP = {**FOLDED, "prefill": "skip", "replay": 6}
EXACT = {**FOLDED, "prefill_attention": "exact"}
REQUESTS = [
    ("the old miller sold seven sacks of flour to the baker and the baker", " sold ten loaves"),
    ("the miller", " sold"),
    ("", "write a short poem about rain with no commas in lower case"),
    ("how many loaves of bread did the baker and the miller", " sell in all"),
]


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, 0, ("none", n, 1)) for n, given in enumerate(arguments)]


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", dtype=torch.float64)


@pytest.fixture
def lm(words):
    from kvfold.evaluation.tasks.harness_model import KvfoldLM

    return lambda model, **options: KvfoldLM(model, tokenizer=words, **options)


@pytest.mark.parametrize(
    "plan", [None, FOLDED, SKIP, EXACT], ids=["plain", "fold", "skip", "exact"]
)
def test_a_batch_of_unequal_rows_scores_as_single_ones(model, bare_addon, lm, plan):
    def scores(batch):
        return lm(model, batch_size=batch).loglikelihood(
            instances("loglikelihood", REQUESTS), disable_tqdm=True
        )

    if plan is not None:
        attach(model, bare_addon(model, Plan.from_dict(plan)))
    single, batched = scores(1), scores(4)
    for one, other in zip(single, batched, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-9)
        assert one[1] == other[1]


def test_a_folded_prompt_scores_in_one_forward_as_on_its_cache(model, bare_addon, lm, monkeypatch):
    from kvfold.evaluation.tasks import harness_model

    attach(model, bare_addon(model, Plan.from_dict(FOLDED)))
    found = []
    for enough in (True, False):
        monkeypatch.setattr(harness_model, "one_forward_is_enough", lambda _, found=enough: found)
        found.append(lm(model, batch_size=2).loglikelihood(instances("loglikelihood", REQUESTS)))
    for one, other in zip(*found, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-9)
        assert one[1] == other[1]


def test_contexts_too_long_for_the_model_are_cut_from_the_left(model, bare_addon, lm):
    attach(model, bare_addon(model, Plan.from_dict(SKIP)))
    whole, cut = " ".join(["miller"] * 3 + ["the", "baker"] * 10), " ".join(["the", "baker"] * 10)
    short = lm(model, max_length=22)
    found = short.loglikelihood(
        instances("loglikelihood", [(whole, " sold ten loaves"), (cut, " sold ten loaves")])
    )
    assert found[0] == found[1]


@pytest.mark.parametrize("plan", [None, FOLDED, SKIP], ids=["plain", "folded", "skip"])
def test_rows_padded_on_the_left_generate_as_single_ones(model, bare_addon, lm, plan):
    prompts = [
        (context, {"until": ["baker"], "max_gen_toks": 10}) for context, _ in REQUESTS if context
    ]
    if plan is not None:
        attach(model, bare_addon(model, Plan.from_dict(plan)))
    found = [
        lm(model, batch_size=batch).generate_until(
            instances("generate_until", prompts), disable_tqdm=True
        )
        for batch in (1, 3)
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_rolling_windows_score_with_an_attached_model(model, bare_addon, lm):
    texts = [(" ".join(["the", "old", "miller"] * 5),), ("the baker",)]
    plain = lm(model).loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    attach(model, bare_addon(model, Plan.from_dict(SKIP)))
    skip = lm(model).loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    assert plain[1] == pytest.approx(skip[1], abs=1e-9)
    assert abs(plain[0] - skip[0]) > 1e-3


def test_it_is_registered_and_attaches_the_addon_that_model_args_name(harness):
    from lm_eval.api.registry import get_model

    from kvfold.evaluation.tasks.harness_model import KvfoldLM

    assert get_model("kvfold") is KvfoldLM
    made = KvfoldLM.create_from_arg_string(
        "pretrained=tiny-hybrid,addon=tiny-hybrid-card,window=64,prefill_attention=exact",
        {"batch_size": 2},
    )
    attached = attachment_of(made.model)
    assert attached.plan == made.plan
    assert (attached.plan.window, attached.plan.prefill_attention) == (64, "exact")
    assert KvfoldLM.create_from_arg_string("pretrained=tiny-hybrid", {}).plan is None


def test_the_device_that_the_command_line_names_by_itself_need_not_be_there(harness, monkeypatch):
    """Nobody who types `kvfold lm-eval` on a machine without CUDA has asked for cuda:0."""
    from kvfold.evaluation.tasks.harness_model import KvfoldLM

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = KvfoldLM.create_from_arg_obj({"pretrained": "tiny-hybrid"}, {"device": "cuda:0"})
    assert made.model.device.type == "cpu"


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ("peft=some/where", EvaluationError, "got peft"),
        ("window=64", EvaluationError, "window change an add-on's plan"),
        ("dtype=float3", EvaluationError, "dtype must be one of float32"),
        ("dtype=int7", EvaluationError, "dtype must be one of float32"),
        ("addon=smollm2-ced", AddOnError, "base"),
        (
            "addon=tiny-hybrid-card,prefill_attention=exact,batch_size=auto",
            EvaluationError,
            "batch size that is a number",
        ),
    ],
)
def test_arguments_that_can_not_be_are_refused(arguments, error, match):
    from kvfold.evaluation.tasks.harness_model import KvfoldLM

    with pytest.raises(error, match=match):
        KvfoldLM.create_from_arg_string(f"pretrained=tiny-hybrid,{arguments}")


def test_a_loaded_model_needs_its_tokenizer(model):
    from kvfold.evaluation.tasks.harness_model import KvfoldLM

    with pytest.raises(EvaluationError, match="needs its tokenizer"):
        KvfoldLM(model)


def test_the_command_line_is_lm_evals_own(capsys):
    from typer.testing import CliRunner

    from kvfold.cli import build_app

    result = CliRunner().invoke(build_app(), ["lm-eval", "run", "--help"])
    assert result.exit_code == 0
    assert "--model_args" in result.output
    assert result.output.index("Example: kvfold lm-eval") < result.output.index("usage: lm-eval")
