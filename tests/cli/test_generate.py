"""`kvfold generate`."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from kvfold.cli.generate import Answer, answer_all, encode_prompt, side_by_side
from kvfold.evaluation.runner import PLAIN
from kvfold.models import load
from kvfold.store.addon import AddOn


@pytest.fixture
def generate(kvfold, tiny_folder, addon_folder):
    def run(*more):
        return kvfold(
            "generate", tiny_folder, "--addon", addon_folder, "--max-new-tokens", 6, *more
        )

    return run


def test_both_answers_stand_side_by_side_with_their_cost(generate):
    done = generate("--prompt", "What is the capital of France?")
    assert done.exit_code == 0, done.output
    heading = next(line for line in done.stdout.splitlines() if "no compression" in line)
    assert "my-addon" in heading
    assert done.output.count("tok/s") == 2
    assert done.output.count("cache ") == 2
    assert "my-addon: csa2 (joint), 1 group of 3 layers" in done.output


def test_a_prompt_file_is_read_and_overrides_are_taken(generate, text_file):
    done = generate("--prompt-file", text_file, "--keep-window", 4, "--resident", "shared", "--raw")
    assert done.exit_code == 0, done.output
    assert f"{len(text_file.read_bytes())} prompt tokens" in done.output


def test_equal_seeds_sample_equal_answers(generate):
    def answer(seed):
        done = generate("--prompt", "Hello", "--temperature", 1.5, "--seed", seed)
        assert done.exit_code == 0, done.output
        return [line for line in done.stdout.splitlines() if "tok/s" not in line]

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_the_chat_template_is_used_unless_raw(tiny_folder):
    _, tokenizer = load(tiny_folder)
    chat = tokenizer.decode(encode_prompt(tokenizer, "Hi", raw=False)[0])
    assert chat == "<user>Hi<answer>"
    assert tokenizer.decode(encode_prompt(tokenizer, "Hi", raw=True)[0]) == "Hi"
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_prompt(tokenizer, "Hi", raw=False)[0]) == "Hi"


def test_answers_are_those_of_the_model_itself(tiny_folder, addon_folder):
    model, tokenizer = load(tiny_folder)
    addon = AddOn.from_pretrained(addon_folder)
    ids = encode_prompt(tokenizer, "A prompt that fits into the window", raw=True)
    answers = answer_all(
        model, tokenizer, {"a": addon}, ids, max_new_tokens=5, temperature=0.0, seed=0
    )
    with torch.no_grad():
        expected = model.generate(ids, do_sample=False, max_new_tokens=5, pad_token_id=0)
    text = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert list(answers) == [PLAIN, "a"]
    assert answers[PLAIN].text == answers["a"].text == text
    assert answers[PLAIN].cache_bytes == 6 * 2 * 2 * 16 * 4 * (ids.shape[1] + 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "exactly one of"),
        (("--prompt", "a", "--prompt-file", "b"), "exactly one of"),
        (("--prompt", "  "), "empty"),
        (("--prompt-file", "no-such-file"), "no-such-file"),
        (("--prompt", "a", "--temperature", "-1"), "temperature"),
        (("--prompt", "a", "--resident", "elsewhere"), "resident"),
        (("--prompt", "a", "--prefill", "half"), "prefill"),
        (("--prompt", "a", "--replay", "0"), "replay"),
        (("--prompt", "a", "--prefill", "skip"), "prefill: skip needs a depth entry"),
    ],
)
def test_bad_values_are_explained(generate, options, words):
    done = generate(*options)
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output


def test_control_characters_of_an_answer_never_reach_the_terminal():
    answer = Answer("a\x1b[2Jb\x0f\x7fc\nd", 4, 1.0, 10)
    console = Console(width=60, file=io.StringIO())
    console.print(side_by_side({"m": answer}, width=60))
    shown = console.file.getvalue()
    assert not {"\x1b", "\x0f", "\x7f"} & set(shown)
    assert "a\ufffd[2Jb\ufffd\ufffdc" in shown


@pytest.fixture
def generate_skipping(kvfold, tiny_folder, skip_folder, tmp_path):
    def run(prompt, *more):
        (tmp_path / "prompt.txt").write_text(prompt)
        return kvfold(
            "generate", tiny_folder, "--addon", skip_folder, "--max-new-tokens", 4, "--raw",
            "--prompt-file", tmp_path / "prompt.txt", *more,
        )  # fmt: skip

    return run


def test_how_many_tokens_a_prompt_skipped_and_replayed_is_shown(generate_skipping):
    done = generate_skipping("a prompt of 50 tokens in all, counted and found so")
    assert done.exit_code == 0, done.output
    assert "50 prompt tokens" in done.output
    assert done.output.count("prompt: 30 tokens skipped, 16 replayed") == 1
    fewer = generate_skipping("a prompt of 50 tokens in all, counted and found so", "--replay", 40)
    assert "prompt: 6 tokens skipped, 40 replayed" in fewer.output


def test_a_prompt_too_short_to_skip_anything_is_told_of(generate_skipping):
    done = generate_skipping("just twenty tokens..")
    assert done.exit_code == 0, done.output
    assert "tokens skipped" not in done.output
    assert "skipping: the prompt was too short to skip anything: its last 16" in flat(done)


def test_an_addon_that_skips_can_run_without_skipping(generate_skipping):
    done = generate_skipping(
        "a prompt of 50 tokens in all, counted and found so", "--prefill", "full"
    )
    assert done.exit_code == 0, done.output
    assert "skipped" not in done.output
    assert "too short" not in done.output


def test_a_replay_shorter_than_the_window_is_refused(generate_skipping):
    done = generate_skipping("a prompt", "--replay", 7)
    assert done.exit_code == 2
    assert "replay must be at least the window's 8 tokens" in flat(done)


def flat(done):
    """What a command printed, without line breaks."""
    return " ".join(done.output.split())
