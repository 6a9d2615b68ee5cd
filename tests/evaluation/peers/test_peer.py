"""A peer stands in a run like any other subject: answered item by item, and resumed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvfold.errors import PeerError
from kvfold.evaluation.cost import CostSettings, write_cost
from kvfold.evaluation.page.html import render_page
from kvfold.evaluation.page.markdown import render_markdown
from kvfold.evaluation.page.runs import read_run
from kvfold.evaluation.peers.peer import check_choices, logits_apart, make_peers
from kvfold.evaluation.peers.spec import parse_peers
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.suite import Suite, run_suite
from kvfold.evaluation.tasks import fidelity, needle, perplexity, turns
from kvfold.evaluation.tasks.settings import TaskSettings

from ..suite_tasks import NextTokenTask, Told


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder with one text, as both the book and the text to predict."""
    folder = tmp_path_factory.mktemp("data")
    prose = "\n".join(f"Line {n} of {n * n}: {n % 7} sheep and {n % 13} goats." for n in range(300))
    for name in ("wikitext-2/test.txt", "gutenberg/1661.txt"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(prose)
    return folder


@pytest.fixture(scope="module")
def finished(tiny, byte_tokenizer, peer_of, data, tmp_path_factory):
    """A run of four tasks with the plain peer, and what was said."""
    folder, told = tmp_path_factory.mktemp("runs") / "run", Told()

    def settings(*lengths):
        return TaskSettings(data, limit=2, batch=2, lengths=lengths, tokenizer=byte_tokenizer)

    tasks = [
        needle.make(settings(128)),
        perplexity.make(settings(48)),
        fidelity.make(settings(64)),
        turns.make(settings(150)),
    ]
    peers = {"plain": peer_of("plain")}
    made = run_suite(Suite(tiny, byte_tokenizer, {}, tasks, peers=peers), folder, watcher=told)
    return folder, made, told.lines


def test_the_plain_peer_answers_as_the_plain_model_does(finished):
    results = finished[1]["results"]
    assert results["plain"]["needle"]["accuracy"]["difference"]["differing"] == 0
    for task, metric in (
        ("perplexity", "continuation_perplexity"),
        ("fidelity", "top_1_agreement"),
        ("fidelity", "attention_cosine"),
        ("fidelity", "first_divergence"),
    ):
        ours, theirs = (results[name][task][metric]["value"] for name in (PLAIN, "plain"))
        assert theirs == pytest.approx(ours, rel=1e-5), metric
    assert results["plain"]["fidelity"]["kl"]["value"] < 1e-7
    assert "loss" not in results["plain"]["perplexity"]  # nothing before the compression is scored


def test_what_a_peer_is_not_asked_is_told_with_the_reason(finished):
    folder, made, _ = finished
    assert "turns" not in made["results"]["plain"] and "turns" in made["results"][PLAIN]
    assert "no later turn" in made["unanswered"]["plain"]["turns"]
    run = read_run(folder)
    page, markdown = render_page([run]), render_markdown([run])
    assert "plain: not asked turns" in page and "plain: not asked turns" in markdown
    assert ("turns", "recalled") in run.headlines()


@pytest.mark.slow
def test_a_peer_has_bytes_as_measured_and_no_times(tiny, peer_of, finished):
    write_cost(finished[0], tiny, {}, CostSettings((32, 64), ()), peers={"plain": peer_of("plain")})
    cost = json.loads((finished[0] / "cost.json").read_text())["subjects"]
    for ours, theirs in zip(cost[PLAIN]["memory"], cost["plain"]["memory"], strict=True):
        assert theirs["stored_bytes"] == theirs["resident_bytes"] == ours["stored_bytes"]
    assert cost["plain"]["speed"] == []
    assert read_run(finished[0]).sizes()[1].keys() == {PLAIN, "plain"}


def test_how_far_the_other_releases_logits_are_is_said(finished):
    assert any("differ from ours by at most" in line for line in finished[2])


def test_run_json_describes_the_peer(finished, here):
    run = json.loads((finished[0] / "run.json").read_text())
    assert run["peers"]["plain"]["versions"] == dict(here.versions)
    assert run["peers"]["plain"]["method"] == "plain"


class _Dies(NextTokenTask):
    """Kills the worker after some answers."""

    left = 2

    def answers(self, subject, items):
        if subject.peer is not None:
            self.left -= 1
            if self.left < 0:
                subject.peer.worker.process.kill()
        return super().answers(subject, items)


def test_a_run_goes_on_after_a_worker_died(tiny, peer_of, tmp_path):
    peers = {"plain": peer_of("plain")}
    task = _Dies(items=6, chunk=2)
    with pytest.raises(PeerError, match="killed by SIGKILL"):
        run_suite(Suite(tiny, None, {}, [task], peers=peers), tmp_path / "run")
    (answers,) = (tmp_path / "run/predictions").glob("plain-*/even.jsonl")
    assert len(answers.read_text().splitlines()) == 4
    again = NextTokenTask(items=6, chunk=2)
    made = run_suite(Suite(tiny, None, {}, [again], peers=peers), tmp_path / "run")
    assert again.asked == [("plain", "even-4"), ("plain", "even-5")]
    assert made["results"]["plain"]["even"]["acc"]["difference"]["verdict"] == "same"


def test_another_model_than_the_workers_is_refused(tiny, tiny_model, plain_peer):
    assert logits_apart(tiny, plain_peer.worker) < 1e-5
    other = tiny_model("llama", seed=1, vocab_size=tiny.config.vocab_size)
    with pytest.raises(PeerError, match="gives other logits"):
        logits_apart(other, plain_peer.worker)


@pytest.mark.slow
def test_a_method_that_is_not_installed_says_so_before_any_answer(tiny, peer_of, ids):
    with (
        peer_of("streaming-llm@4x").open(tiny, lambda _: None) as peer,
        pytest.raises(PeerError, match="No module named 'kvpress'"),
    ):
        peer(input_ids=ids)


@pytest.mark.slow
def test_a_model_with_other_than_full_attention_is_refused(hybrid_source, peer_of, tiny):
    with (
        pytest.raises(PeerError, match="full attention"),
        peer_of("plain", folder=hybrid_source).open(tiny, lambda _: None),
    ):
        pass


def test_such_a_model_is_refused_before_a_worker_is_started(here, tiny_model):
    with pytest.raises(PeerError, match=r"full attention, .*has linear_attention"):
        make_peers(parse_peers("plain"), here, "somewhere", tiny_model("qwen3_5"), {})


@pytest.fixture(scope="module")
def hybrid_source(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers") / "hybrid"
    tiny_model("qwen3_5").save_pretrained(folder)
    return folder


def test_a_peer_of_other_versions_is_another_subject(peer_of):
    peer = peer_of("plain")
    newer = replace(peer, environment=replace(peer.environment, versions={"torch": "9.9"}))
    assert peer.describe() != newer.describe()


def test_generation_settings_that_peers_do_not_follow_are_refused(tiny_model):
    model = tiny_model("llama")
    check_choices(model)
    model.generation_config.repetition_penalty = 1.1
    with pytest.raises(PeerError, match=r"repetition_penalty=1.1.*gsm8k, ifeval"):
        check_choices(model)
