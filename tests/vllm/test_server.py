"""`kvfold vllm serve` really started: what OpenAI's client and many at once get from it."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import openai
import pytest
import torch

from kvfold.plan import Plan

from ..openai_cases import OpenAICases
from .talking import asked as asked_of
from .talking import talking_model, talking_tokenizer

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

NAMES = ("plain", "ced", "unicode", "call")
"""What the cases call their models: here all are one, and messages choose what it says."""
PLAN = {
    "anchors": 4,
    "window": 16,
    "depth": [
        {"method": "csa2", "source": 1, "readers": [2]},
        {"method": "latent", "layers": [4, 5], "rank": 48},
    ],
    "sequence": [{"method": "pool", "layers": [6], "group": 4}],
    "bits": [{"method": "turboquant", "layers": [7]}],
}
SETTINGS = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", 512, "--max-num-seqs", 16,
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
)  # fmt: skip
CLIENTS, SECONDS = 16, 6


@pytest.fixture(scope="module")
def soak_script(benchmark):
    return benchmark("vllm_soak")


@pytest.fixture(scope="module")
def live(tiny_model, random_addon, byte_tokenizer, soak_script, tmp_path_factory):
    """A server of a tiny model under every axis; with it the model, its add-on and the plan."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = talking_tokenizer(byte_tokenizer)
    model = talking_model(tiny_model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    plan = Plan.from_dict(PLAN)
    addon, saved = random_addon(model, plan)
    arguments = [str(part) for part in (folder, "--addon", saved, *SETTINGS)]
    server = soak_script.server(arguments, tmp_path_factory.mktemp("log") / "server.log", NAMES)
    try:
        server.start()
        yield SimpleNamespace(server=server, model=model, addon=addon, plan=plan)
    finally:
        if server.running is not None:
            server.stop()


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=live.server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def asked():
    return asked_of


class TestOpenAI(OpenAICases):
    """The cases that kvfold's own server has to pass."""


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["served", *NAMES]


def test_answers_are_the_folded_models(client, live, prompts, folded_reference):
    """In the server's own processes, and not what the plain model would say."""
    (prompt,) = prompts((120,))
    made = client.completions.create(
        model="ced", prompt=prompt, max_tokens=8, temperature=0, logprobs=0
    )
    expected = folded_reference(live.model, live.addon, live.plan, [prompt], 8)
    assert made.choices[0].logprobs.token_logprobs == pytest.approx(expected.logprobs[0], abs=1e-3)
    with torch.no_grad():
        plain = live.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert made.choices[0].logprobs.token_logprobs[0] != pytest.approx(float(plain.max()), abs=1e-2)


def test_many_clients_at_once_are_served_without_error(live, soak_script):
    chosen = argparse.Namespace(
        clients=CLIENTS, seconds=SECONDS, warm_up=0.0, kill=False, prompts=12, longest=40,
        longest_answer=8,
    )  # fmt: skip
    requests = soak_script.prompts(chosen.prompts, chosen.longest, chosen.longest_answer)
    report = soak_script.watched(live.server, requests, chosen)
    del report["grown_bytes"]
    assert soak_script.reasons({**report, "grown_bytes": 0}) == []
    assert report["clients"]["answers"] > CLIENTS
    assert report["most_rows"] > 1
