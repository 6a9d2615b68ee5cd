"""`kvfold fit`."""

from __future__ import annotations

import dataclasses

import pytest

from kvfold.anatomy import anatomy
from kvfold.cli.fit import EXAMPLE_PLAN, calibration_window
from kvfold.cli.fit_report import report_table, scanned_heads
from kvfold.describe import describe
from kvfold.models import load_config
from kvfold.plan import Plan
from kvfold.store.addon import AddOn


def fit(kvfold, model, text, output, *more):
    return kvfold(
        "fit", model, "--corpus", text, "--tokens", 1024, "--held-out-tokens", 128,
        "--window", 64, "-o", output, *more,
    )  # fmt: skip


def flat(done):
    """What a command printed, without the frames and line breaks of the terminal."""
    return " ".join(done.output.replace("│", " ").split())


def test_a_fit_leaves_an_addon_and_nothing_else(addon_folder):
    assert sorted(path.name for path in addon_folder.iterdir()) == [
        "addon.json",
        "addon.safetensors",
    ]
    assert [path.name for path in addon_folder.parent.iterdir()] == [addon_folder.name]
    addon = AddOn.from_pretrained(addon_folder)
    assert addon.plan.folded_layers == (3, 4, 5)
    assert addon.report["held_out_tokens"] == 128


def test_the_report_is_shown_layer_by_layer(kvfold, tiny_folder, text_file, tmp_path):
    done = fit(kvfold, tiny_folder, text_file, tmp_path / "a", "--preset", "latent")
    assert done.exit_code == 0, done.output
    for words in ("R² of keys", "attention cosine", "128 held-out tokens", "Next: kvfold evaluate"):
        assert words in done.output


def test_a_plan_file_is_fitted(kvfold, tiny_folder, text_file, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("window: 16\ndepth:\n  - {method: ced, split: 2, layers: [4, 5]}\n")
    done = fit(kvfold, tiny_folder, text_file, tmp_path / "a", "--plan", plan)
    assert done.exit_code == 0, done.output
    assert AddOn.from_pretrained(tmp_path / "a").plan.window == 16


def test_an_existing_addon_is_only_replaced_by_force(kvfold, tiny_folder, text_file, tmp_path):
    assert fit(kvfold, tiny_folder, text_file, tmp_path / "a").exit_code == 0
    refused = fit(kvfold, tiny_folder, text_file, tmp_path / "a", "--preset", "ced")
    assert refused.exit_code == 2
    assert "--force" in refused.output
    forced = fit(kvfold, tiny_folder, text_file, tmp_path / "a", "--preset", "ced", "--force")
    assert forced.exit_code == 0, forced.output
    assert AddOn.from_pretrained(tmp_path / "a").plan.depth[0].method == "ced"


def test_force_does_not_replace_what_is_no_addon(kvfold, tiny_folder, text_file, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("precious")
    done = fit(kvfold, tiny_folder, text_file, tmp_path / "a", "--force")
    assert done.exit_code == 2
    assert "something else" in done.output
    assert (tmp_path / "a" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--preset", "nonsense"), "nonsense"),
        (("--preset", "ced", "--plan", "p.yaml"), "only one of --preset, --plan"),
        (("--preset", "8x", "--times-smaller", "8"), "only one of --preset, --plan"),
        (("--times-smaller", "8", "--bytes-per-token", "9"), "only one of --preset, --plan"),
        (("--times-smaller", "many"), "times-smaller"),
        (("--times-smaller", "1000"), "up to 64 times smaller"),
        (("--bytes-per-token", "768"), "below the plain cache's 768 bytes a token"),
        (("--gate-steps", "0"), "gate-steps"),
        (("--gate-steps", "5"), "this one has none"),
        (("--preset", "k8v4", "--gate-steps", "5"), "this one has none"),
        (("--preset", "pool"), "take a --window of 1024 or more"),
        (("--plan", "no-such-plan.yaml"), "no-such-plan.yaml"),
        (("--corpus", "no-such-corpus.txt"), "no-such-corpus.txt"),
        (("--window", "1"), "window"),
        (("--device", "moon"), "moon"),
        (("--dtype", "int8"), "dtype"),
        (("--replay", "0"), "replay"),
        (("--prefill", "some"), "prefill"),
        (("--prefill", "skip", "--preset", "balanced"), "prefill: skip needs a depth entry"),
        (("--prefill", "skip", "--replay", "100"), "replay must be at least the window's 128"),
        (("--state-projector",), "this model has none from layer 3 on"),
    ],
)
def test_bad_values_are_explained_and_leave_nothing(
    kvfold, tiny_folder, text_file, tmp_path, options, words
):
    done = fit(kvfold, tiny_folder, text_file, tmp_path / "a", *options)
    assert done.exit_code == 2
    assert words in flat(done)
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_another_model_is_refused(kvfold, tiny_folder, text_file, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("depth:\n  - {method: drop, layers: [99]}\n")
    done = fit(kvfold, tiny_folder, text_file, tmp_path / "a", "--plan", plan)
    assert done.exit_code == 2
    assert "layer 99" in done.output


def test_too_short_a_corpus_says_how_long_it_is(kvfold, tiny_folder, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.")
    done = fit(kvfold, tiny_folder, tmp_path / "short.txt", tmp_path / "a")
    assert done.exit_code == 2
    assert "window of 64" in " ".join(done.output.split())


def test_an_interrupted_fit_can_be_resumed_and_a_new_one_starts_anew(
    kvfold, tiny_folder, text_file, tmp_path
):
    checkpoint = tmp_path / "a.checkpoint"
    checkpoint.write_bytes(b"of another job")
    resumed = fit(kvfold, tiny_folder, text_file, tmp_path / "a", "--resume")
    assert resumed.exit_code == 2
    assert "checkpoint" in resumed.output
    assert checkpoint.exists()
    anew = fit(kvfold, tiny_folder, text_file, tmp_path / "a")
    assert anew.exit_code == 0, anew.output
    assert not checkpoint.exists()


def test_a_report_of_a_plan_without_weights_is_an_empty_table():
    assert report_table({}).row_count == 0


@pytest.mark.parametrize("budget", [("--times-smaller", 8), ("--bytes-per-token", 96)])
def test_a_budget_is_fitted_and_what_it_picked_is_said(
    kvfold, tiny_folder, text_file, tmp_path, budget
):
    done = fit(kvfold, tiny_folder, text_file, tmp_path / "a", *budget)
    assert done.exit_code == 0, done.output
    plan = AddOn.from_pretrained(tmp_path / "a").plan
    shape = anatomy(load_config(tiny_folder))
    assert plan == Plan.for_budget(shape, times_smaller=8)
    assert f"Plan: {describe(plan, shape)}" in flat(done)
    assert "rank 144 (2.7x), codes in 5 bits: 92 bytes a token, 8.3x smaller" in flat(done)


def pooled(kvfold, model, text, output, *more):
    return kvfold(
        "fit", model, "--corpus", text, "--tokens", 4096, "--held-out-tokens", 1024, "-o", output,
        *more,
    )  # fmt: skip


def test_gates_are_trained_on_long_windows_and_shown_beside_the_maps(
    kvfold, tiny_folder, long_text_file, tmp_path
):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "depth: [{method: latent, layers: [0, 1, 2], rank: 64}]\n"
        "sequence: [{method: pool, layers: [0, 1, 2, 5], gate: head}]\n"
        "bits: [{method: turboquant, layers: [0, 1, 2]}]\n"
    )
    more = ("--plan", plan, "--gate-steps", 12)
    done = pooled(kvfold, tiny_folder, long_text_file, tmp_path / "a", *more)
    assert done.exit_code == 0, done.output
    report = AddOn.from_pretrained(tmp_path / "a").report
    assert report["gates"]["steps"] == 12
    assert report["held_out_tokens"] == 1024  # one window of the length that gates need
    for words in ("R² of keys", "gate error", "gates trained for 12 steps"):
        assert words in flat(done)
    rows = [line.split() for line in done.output.splitlines() if line.split()[:1] == ["0"]]
    first, last = (report["gates"]["error"][part]["0"] for part in ("first", "last"))
    assert rows[0][-2:] == [f"{first:.4f}", f"{last:.4f}"]
    assert rows[0][2] == f"{report['layers']['0']['keys_r2']:.4f}"
    own = next(line.split() for line in done.output.splitlines() if line.split()[:1] == ["5"])
    assert own[1:4] == ["identity", "-", "-"]
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_short_windows_for_gates_are_warned_of(kvfold, tiny_folder, text_file, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("window: 16\nsequence: [{method: pool, layers: [5]}]\n")
    done = fit(kvfold, tiny_folder, text_file, tmp_path / "a", "--plan", plan, "--gate-steps", 2)
    assert done.exit_code == 0, done.output
    assert "Windows of 64 tokens give gates little history" in flat(done)


@pytest.mark.parametrize(
    ("keys", "named", "window"),
    [
        ({}, None, 512),
        ({}, 64, 64),
        ({"sequence": [{"method": "pool", "layers": [1]}]}, None, 1024),
        ({"sequence": [{"method": "pool", "layers": [1]}]}, 200, 200),
        ({"sequence": [{"method": "pool", "layers": [1]}], "window": 1024}, None, 2048),
        (
            {"sequence": [{"method": "pool", "layers": [1], "gate": "mean", "mass_bias": False}]},
            None,
            512,
        ),
    ],
)
def test_windows_are_long_enough_for_what_is_fitted(tiny_config, keys, named, window):
    shape = anatomy(tiny_config("llama"))
    assert calibration_window(Plan.from_dict(keys), shape, named, None) == window


def test_a_plan_without_weights_needs_no_fit_and_says_so(kvfold, tiny_folder, text_file, tmp_path):
    done = fit(kvfold, tiny_folder, text_file, tmp_path / "a", "--preset", "k8v4")
    assert done.exit_code == 0, done.output
    assert "no weights, so there was nothing to fit" in flat(done)
    assert "0.0 MB of weights" in flat(done)
    addon = AddOn.from_pretrained(tmp_path / "a")
    assert addon.plan.bits[0].layers == (0, 1, 2, 3, 4, 5)
    assert addon.parameter_bytes() == 0


def test_the_plan_in_the_help_is_one_that_can_be_fitted(tiny_config):
    shape = anatomy(tiny_config("llama", num_hidden_layers=8, num_key_value_heads=4))
    plan = Plan.from_yaml(EXAMPLE_PLAN)
    assert plan.depth and plan.sequence and plan.bits
    wide = dataclasses.replace(
        shape, layers=tuple(dataclasses.replace(layer, head_dim=64) for layer in shape.layers)
    )
    plan.check(wide)


def test_the_help_shows_the_plan_line_by_line(kvfold):
    shown = [line.strip() for line in kvfold("fit", "--help").output.splitlines()]
    assert set(map(str.strip, EXAMPLE_PLAN.splitlines())) <= set(shown)


def test_prefill_replay_and_state_projector_override_the_plans_keys(
    kvfold, hybrid_folder, text_file, tmp_path
):
    plan = tmp_path / "plan.yaml"
    plan.write_text("window: 8\ndepth: [{method: ced, split: 4, layers: [7]}]\nreplay: 99\n")
    more = ("--plan", plan, "--prefill", "skip", "--replay", 16, "--state-projector")
    done = fit(kvfold, hybrid_folder, text_file, tmp_path / "a", *more)
    assert done.exit_code == 0, done.output
    addon = AddOn.from_pretrained(tmp_path / "a")
    assert (addon.plan.prefill, addon.plan.replay, addon.plan.state_projector) == ("skip", 16, True)
    assert "prompts skip layers 4-7 but for the last 16 tokens" in flat(done)
    assert scanned_heads(addon.report["state_projector"]) in flat(done)
    assert "--continuation 128" in flat(done)


def test_a_plans_state_projector_can_be_left_out(kvfold, hybrid_folder, text_file, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "window: 8\nprefill: skip\nstate_projector: true\n"
        "depth: [{method: ced, split: 4, layers: [7]}]\n"
    )
    more = ("--plan", plan, "--prefill", "full", "--no-state-projector")
    done = fit(kvfold, hybrid_folder, text_file, tmp_path / "a", *more)
    assert done.exit_code == 0, done.output
    addon = AddOn.from_pretrained(tmp_path / "a")
    assert addon.state_projector is None
    assert (addon.plan.prefill, addon.plan.state_projector) == ("full", False)
    assert "States over skipped tokens" not in flat(done)
    assert "--continuation" not in flat(done)


def test_skipping_takes_the_preset_ced_where_no_plan_is_named(
    kvfold, tiny_folder, text_file, tmp_path
):
    done = fit(kvfold, tiny_folder, text_file, tmp_path / "a", "--prefill", "skip")
    assert done.exit_code == 0, done.output
    plan = AddOn.from_pretrained(tmp_path / "a").plan
    assert (plan.prefill, plan.depth[0].method, plan.split) == ("skip", "ced", 3)


def test_a_plan_that_cant_be_is_refused_before_weights_are_read(
    kvfold, tiny_folder, sliding_folder, text_file, tmp_path, monkeypatch
):
    def unexpected(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr("kvfold.cli.fit.load_model", unexpected)
    sliding = fit(kvfold, sliding_folder, text_file, tmp_path / "a", "--prefill", "skip")
    assert sliding.exit_code == 2
    assert "layers [3] attend to a sliding window" in flat(sliding)
    dense = fit(kvfold, tiny_folder, text_file, tmp_path / "a", "--state-projector")
    assert dense.exit_code == 2
    assert "leave it out" in flat(dense)


def test_scanned_heads_are_told_by_layers_with_equally_many():
    scanned = {"4": 3, "5": 3, "6": 4, "8": 3}
    assert scanned_heads({"heads": 4, "scanned": scanned}).startswith(
        "States over skipped tokens: of 4 heads a layer, scanned are 3 in layers 4-5, 8; 4 in "
        "layer 6."
    )
