"""The benchmark's plans are possible, and its targets belong to rows that it measures."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from kvfold.anatomy import anatomy
from kvfold.evaluation.environment import code_state
from kvfold.evaluation.peers.spec import check_likes, parse_peers
from kvfold.evaluation.predictions import Predictions
from kvfold.evaluation.tasks.registry import task_names
from kvfold.presets import PRESETS

FOLDER = Path(__file__).parents[1] / "benchmarks"


def _loaded(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def depth_table():
    yield _loaded("depth_table")
    del sys.modules["depth_table"]


@pytest.fixture(scope="module")
def axes_table():
    yield _loaded("axes_table")
    del sys.modules["axes_table"]


@pytest.fixture(scope="module")
def prefill_table():
    yield _loaded("prefill_table")
    del sys.modules["prefill_table"]


@pytest.fixture(scope="module")
def card_table():
    yield _loaded("card_table")
    del sys.modules["card_table"]


@pytest.fixture(scope="module")
def distil_table(card_table):
    yield _loaded("distil_table")
    del sys.modules["distil_table"]


@pytest.fixture(scope="module")
def hybrid_shape(tiny_config):
    """The shape of the tiny hybrid: attention in layers 3, 7 and 11 of 12."""
    pattern = ["linear_attention"] * 3 + ["full_attention"]
    return anatomy(tiny_config("qwen3_5", num_hidden_layers=12, layer_types=pattern * 3))


@pytest.fixture(scope="module")
def shape(tiny_config):
    """The shape of SmolLM2-135M."""
    return anatomy(
        tiny_config(
            "llama",
            num_hidden_layers=30,
            hidden_size=576,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
        )
    )


def test_every_plan_fits_the_model(depth_table, shape):
    for plan in depth_table.fits(shape).values():
        plan.check(shape)


def test_every_target_is_a_row_that_is_measured(depth_table, shape):
    names = [row.name for row in depth_table.rows(depth_table.fits(shape))]
    assert len(names) == len(set(names))
    assert set(depth_table.TARGETS) <= set(names)


def test_codes_of_all_layers_at_once_and_of_every_group_size_are_in_it(depth_table, shape):
    names = set(depth_table.fits(shape))
    smallest = depth_table.TIMES_SMALLER[-1]
    assert {f"all latent groups of {size}, {smallest}x" for size in (2, 3, 5, 10, 30)} <= names


def test_every_axis_alone_each_pair_and_all_three_are_measured(axes_table, shape):
    plans = axes_table.fits(shape)
    for plan in plans.values():
        plan.check(shape)
    used = {
        name: tuple(axis for axis in ("depth", "sequence", "bits") if getattr(plan, axis))
        for name, plan in plans.items()
    }
    for names in ("depth", "sequence", "bits"):
        assert used[names] == (names,)
    assert used["depth + sequence"] == ("depth", "sequence")
    assert used["depth + bits"] == ("depth", "bits")
    assert used["sequence + bits"] == ("sequence", "bits")
    assert used["depth + sequence + bits"] == ("depth", "sequence", "bits")


def test_every_row_of_the_axes_has_its_plan_and_a_name_of_its_own(axes_table, shape):
    plans = axes_table.fits(shape)
    rows = list(axes_table.rows(plans))
    assert len({row.name for row in rows}) == len(rows)
    assert {axes_table.plan_name(row) for row in rows} == set(plans)


def test_the_tables_show_every_row_and_speed(axes_table, tmp_path):
    table = axes_table.Rows(
        tmp_path / "axes.json",
        dict.fromkeys(("model", "windows", "long_windows", "fit_tokens", "gate_steps"), 8),
    )
    base = {"perplexity": 20.0}
    table.shared.update(
        base={"1024": base, "4096": base},
        speed={"bits": {"prefill_of_plain": 0.5, "decode_of_plain": 0.75}},
    )
    for kind in ("axes", "pooling", "card", "bits"):
        table.add(
            {
                "name": kind,
                "table": kind,
                "fit": "bits",
                "window": 128,
                "tokens_in_a_row": 1024,
                "perplexity": 21.0,
                "perplexity_rise": 0.05,
                "kl": 0.1,
                "top_1_agreement": 0.9,
                "top_5_agreement": 0.8,
                "recovery": None,
                "dropped_perplexity": 30.0,
                "times_smaller": {"1024": 1.5, "4096": 2.0, "16384": 2.5},
                "resident": {"shared": 30},
                "resident_times_smaller": {"16384": 2.2},
            },
            [],
        )
    text = axes_table.markdown(table)
    quality = "21.00 | 0.1000 | 90.0% | 80.0% | -"
    assert f"| bits | shared | {quality} | 1.5x | 2.0x | 2.5x | 2.2x | 0.50 | 0.75 |" in text
    assert text.count(f"| bits | 128 | {quality} | 5.00% | 2.5x |") == 3
    assert text.count("| dropped | 128 | 30.00") == 3


def test_every_skipped_prompt_has_a_plan_that_fits_and_a_name_of_its_own(prefill_table, shape):
    plans = prefill_table.text_plans(shape)
    cases = list(prefill_table.text_cases(plans))
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        plan = plans[case.fit].replace(window=case.window)
        if case.replay is not None:
            plan = plan.replace(prefill="skip", replay=case.replay)
        plan.check(shape)


def test_the_hybrids_rows_show_the_unrepaired_state_beside_the_repaired(prefill_table):
    cases = list(prefill_table.hybrid_cases(prefill_table.METHODS))
    for replay in prefill_table.HYBRID_REPLAYS:
        both = {case.projector for case in cases if case.replay == replay}
        assert both == {False, True}
        assert {case.window for case in cases if case.replay == replay} == {min(replay, 256)}


def test_the_cards_rows_differ_in_settings_alone(card_table, hybrid_shape):
    for row in card_table.ROWS:
        card, ours = (card_table.plan_of(row, s) for s in (card_table.CARD, card_table.OURS))
        for plan in (card, ours):
            plan.check(hybrid_shape)
        assert (card.anchors, card.window, ours.anchors, ours.window) == (0, 0, 4, 128)
        assert [e.method for e in card.depth] == [e.method for e in ours.depth]
        assert card.bits == ours.bits


def test_tables_are_written_of_what_was_measured(prefill_table, card_table):
    share = {"right": 9, "count": 10, "share": 0.9, "interval": [0.6, 0.98]}
    found = {"overall": share, "by_kind": dict.fromkeys(prefill_table.RECALL_KINDS, share)}
    places = {str(replay): [share, share] for replay in prefill_table.HYBRID_REPLAYS}
    row = {**found, "length": 512, "places": places, "tale_perplexity": 5.0}
    data = {
        "settings": {"prompts_of_a_kind": 10, "continuation": 64},
        "rows": [
            {"name": f"512: {prefill_table.PLAIN}", "replay": None, **row},
            {"name": "512: ced, replay 256", "replay": 256, **row},
        ],
    }
    text = prefill_table.markdown({"hybrid": data})
    assert "| 512: ced, replay 256 | 90% (60-98) |" in text
    rows = [
        {"name": f"{name}, {settings}", "perplexity": 5.5, "kl": 0.1, **found}
        for name in card_table.ROWS
        for settings in (card_table.CARD, card_table.OURS)
    ]
    made = {"documents": 2, "length": 8, "recall_length": 8, "prompts_of_a_kind": 1}
    settings = {**made, "fit_documents": 2}
    base = {"perplexity": 5.0, **found}
    text = card_table.markdown({"shared": {"base": base}, "settings": settings, "rows": rows})
    assert (
        text.count("| 5.500 (+10.00%) | 5.500 (+10.00%) | 0.1000 | 0.1000 | 90.0% | 90.0% |") == 4
    )


def test_distilled_rows_are_of_recipes_and_their_closed_forms_are_published(distil_table):
    root = FOLDER.parent
    published = distil_table.closed_forms(root / "results" / "depth" / "depth.json")
    published |= distil_table.closed_forms(root / "results" / "prefill" / "card.json")
    for row in distil_table.ROWS:
        name = "smollm2-8x" if row.addon == distil_table.EIGHT else row.addon
        assert (root / "training" / "recipes" / f"{name}.yaml").is_file()
        assert not row.closed_form or row.closed_form in published
    names = [row.name for row in distil_table.ROWS]
    assert len(set(names)) == len(names)


def test_an_add_on_that_does_not_come_along_is_taken_from_a_folder(distil_table, tmp_path):
    (tmp_path / "smollm2-ced-w128").mkdir()
    assert not distil_table.is_at_hand("smollm2-ced-w128", tmp_path)
    (tmp_path / "smollm2-ced-w128" / "addon.json").write_text("{}")
    assert distil_table.is_at_hand("smollm2-ced-w128", tmp_path)
    assert not distil_table.is_at_hand("smollm2-ced-w128", None)
    assert distil_table.is_at_hand("smollm2-ced", None)
    assert distil_table.is_at_hand(distil_table.EIGHT, None)


@pytest.fixture(scope="module")
def report():
    yield _loaded("full_report")
    del sys.modules["full_report"]


def test_the_full_report_asks_what_there_is(report):
    tasks = {*report.TASKS, *report.TINY_TASKS}
    assert tasks <= set(task_names())
    assert set(report.LIMITS) == set(report.TASKS)
    assert {*report.SLOW, *report.SHORT} <= set(report.TASKS)
    assert {*report.SMOLLM2, *report.TINY_HYBRID} <= set(PRESETS)
    check_likes(parse_peers(report.PEERS), report.SMOLLM2)


def test_the_full_report_says_how_long_it_took_and_why_peers_are_not_asked(report):
    chosen = argparse.Namespace(peers="snapkv=4x,quantized-4bit", fraction=1.0)
    time, alike, packed = report.remarks(chosen, report.TASKS, 61 * 60.0, [])
    assert f"was made in 61 minutes on {os.cpu_count()} core" in time
    assert alike.startswith("snapkv=4x: not asked lambada and ifeval")
    assert packed.startswith("quantized-4bit: not asked") and "would be packed" in packed
    chosen.peers = ""
    (time,) = report.remarks(chosen, report.TASKS, 120.0, ["answers", "fits"])
    assert "went on from an earlier run (answers, fits) for 2 minutes" in time


def test_the_full_report_knows_what_an_earlier_run_left(report, tmp_path):
    out, addons = tmp_path / "out", tmp_path / "addons"
    assert report.found_before(out, addons) == []
    run = out / report.MODELS[0]
    answers = run / "predictions" / "plain" / "needle.jsonl"
    answers.parent.mkdir(parents=True)
    cost = {"digest": "", "machine": {}, "settings": {}, "subjects": {}}
    other = {"commit": None, "sources": "0" * 64}
    (run / "cost.json").write_text(json.dumps({**cost, "code": other}))
    assert report.found_before(out, addons) == []
    (run / "cost.json").write_text(json.dumps({**cost, "code": code_state()}))
    answers.write_text("")
    assert report.found_before(out, addons) == ["answers", "costs"]
    (addons / "tiny-hybrid" / "4x").mkdir(parents=True)
    (addons / "tiny-hybrid" / "4x" / "addon.json").write_text("{}")
    assert report.found_before(out, addons)[-1] == "fits"


def test_the_harness_table_names_the_commits_that_answered(tmp_path):
    table = _loaded("harness_table")
    del sys.modules["harness_table"]
    for name, commit in (("a", "c0ffee"), ("b", None)):
        code = {"commit": commit, "sources": "0" * 64}
        made = Predictions(tmp_path, name, "needle", {}, ["1"], 1, code)
        made.open()
    assert table.answered_by(tmp_path, "needle", ["a", "b"]) == ["c0ffee", "no commit"]
    row = {"task": "needle", "items": 1, "answered_by": ["c0ffee"]}
    row["identity"] = {"same": 1, "numbers_apart": 0.0}
    text = table.markdown({"harness": [], "folding_nothing": [row]}, 8, "command")
    assert "made by the commits needle: c0ffee." in text
    assert "| task | items | identity |" in text
