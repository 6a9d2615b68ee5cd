"""`kvfold fit`."""

from __future__ import annotations

import pytest

from kvfold.cli.fit import report_table
from kvfold.store.addon import AddOn


def fit(kvfold, model, text, output, *more):
    return kvfold(
        "fit", model, "--corpus", text, "--tokens", 1024, "--held-out-tokens", 128,
        "--window", 64, "-o", output, *more,
    )  # fmt: skip


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
        (("--preset", "ced", "--plan", "p.yaml"), "not both"),
        (("--plan", "no-such-plan.yaml"), "no-such-plan.yaml"),
        (("--corpus", "no-such-corpus.txt"), "no-such-corpus.txt"),
        (("--window", "1"), "window"),
        (("--device", "moon"), "moon"),
        (("--dtype", "int8"), "dtype"),
    ],
)
def test_bad_values_are_explained_and_leave_nothing(
    kvfold, tiny_folder, text_file, tmp_path, options, words
):
    done = fit(kvfold, tiny_folder, text_file, tmp_path / "a", *options)
    assert done.exit_code == 2
    assert words in done.output
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
