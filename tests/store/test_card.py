"""Model cards: what an add-on's report says, escaped, and nobody else's README overwritten."""

from __future__ import annotations

import re

import pytest
import yaml

from kvfold.budget import history_bytes, plain_history_bytes
from kvfold.models import DEFAULT_MODEL, TINY_HYBRID, base_licence
from kvfold.plan import Plan
from kvfold.store.addon import AddOn
from kvfold.store.card import MARKER, PLOT_FILE, card, fenced, plain, save_with_card

PLAN = Plan.from_dict({"window": 6, "depth": [{"method": "ced", "split": 2, "layers": [3, 4]}]})
HOSTILE = "x` | <script>alert(1)</script> ![a](http://b) [c](d) **e**\n\n# f ``` --> \u202e @g $h$"


def quality(kl):
    return {"loss": 2 + kl, "perplexity": 8 + kl, "kl": kl, "top_1_agreement": 1 - kl}


def report(**keys):
    stages = [
        {
            "name": name,
            "settings": {},
            "seconds": 61.4,
            "kl_before": before,
            "kl_after": after,
            "perplexity_after": 8.5,
            "kept": kept,
            "why": None if kept else "held-out KL got worse",
            "report": {},
        }
        for name, before, after, kept in (
            ("closed-form", 0.9, 0.25, True),
            ("gates", 0.25, 0.3, False),
        )
    ]
    recipe = {"name": "my-recipe", "model": "owner/base", "stages": [{"stage": "closed-form"}]}
    return {
        "stages": stages,
        "held_out": {
            "base": quality(0.0),
            "dropped": quality(0.5),
            "folded": quality(0.25),
            "recovery": 0.5,
        },
        "data": {
            "parts": [{"source": "${DATA}/a.txt", "weight": 2.0, "tokens": 12345}],
            "seq": 64,
            "held_out_tokens": 6400,
            "digest": "0",
        },
        "recipe": recipe,
        **keys,
    }


@pytest.fixture
def addon(tiny_model):
    made = AddOn.untrained(tiny_model("llama"), PLAN)
    made.report = report()
    return made


def front(text):
    return yaml.safe_load(text.split("---")[1])


def test_a_card_has_quality_bytes_stages_data_recipe_and_licence(addon):
    text = card(addon, licence="apache-2.0", plot_file=PLOT_FILE)
    shape = addon.base.anatomy
    whole, folded = plain_history_bytes(shape), history_bytes(PLAN, shape)
    smaller = f"{whole / folded:.1f}x"
    assert f"| no compression | 8.00 | 0.0000 | 100.0% | - | {whole:,} | 1.0x |" in text
    row = f"| **this add-on** | 8.25 | 0.2500 | 75.0% | 0.500 | {folded:,.0f} | {smaller} |"
    assert row in text
    assert "| history dropped | 8.50 | 0.5000 | 50.0% | 0.000 |" in text
    assert "| closed-form | 61 s | 0.9000 | 0.2500 | 8.50 | yes |" in text
    assert "| gates | 61 s | 0.2500 | 0.3000 | 8.50 | no: held-out KL got worse |" in text
    assert r"- \${DATA}/a.txt: weight 2, 12,345 tokens" in text
    assert "6,400 held-out tokens in rows of 64" in text
    assert f"]({PLOT_FILE})" in text
    block = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert yaml.safe_load(block[1]) == addon.report["recipe"]
    assert front(text) == {
        "library_name": "kvfold",
        "tags": ["kvfold", "kv-cache"],
        "base_model": "owner/base",
        "license": "apache-2.0",
    }
    assert "licence: apache-2.0" in text


def test_what_is_not_known_is_not_claimed(addon):
    addon.report["recipe"]["model"] = "/home/me/model"
    addon.report["held_out"].update(folded=None, recovery=None)
    text = card(addon)
    assert set(front(text)) == {"library_name", "tags"}
    assert "see the base model" in text
    assert "| **this add-on** | - | - | - | - |" in text
    assert "![" not in text


@pytest.mark.parametrize("model", ["a/b", "../a", "a/..", "default", "tiny-hybrid", "smollm2-135m"])
def test_a_folder_is_not_told_as_a_model_of_the_hub(addon, model, tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    addon.report["recipe"]["model"] = model
    assert "base_model" not in front(card(addon))
    addon.report["recipe"]["model"] = "a/c"
    assert front(card(addon))["base_model"] == "a/c"


def test_hostile_text_stays_text(addon):
    addon.report["recipe"].update(name=HOSTILE, model=HOSTILE)
    addon.report["data"]["parts"][0]["source"] = HOSTILE
    addon.report["stages"][1].update(name=HOSTILE, why=HOSTILE)
    text = card(addon, licence=HOSTILE)
    blocks = re.compile(r"^(`{3,})\w+\n.*?\n\1$", re.DOTALL | re.MULTILINE)
    assert len(blocks.findall(text)) == 2
    outside = blocks.sub("", text).split("---\n", 2)[2].replace(MARKER, "")
    for bad in (
        "<script",
        "http://",
        "\u202e",
        "![a]",
        "[c](",
        "**e**",
        "-->",
        "@g",
        "$h$",
        "\n# f",
    ):
        assert bad not in outside
    assert front(text)["license"] == HOSTILE
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 2  # two tables


@pytest.mark.parametrize("text", ["", "``", "a\n````\nb", "`" * 9])
def test_a_block_is_fenced_by_more_backticks_than_it_holds(text):
    first, *inside, last = fenced(text, "yaml").splitlines()
    assert first == f"{last}yaml"
    assert all(last not in line for line in inside)


def test_plain_text_reads_as_it_was():
    assert plain("latent, rank 64 (2.0x): 1,024 bytes") == "latent, rank 64 (2.0x): 1,024 bytes"
    assert plain("  a \n b ") == "a b"


def test_the_code_of_a_card_runs(addon, tmp_path, monkeypatch, tiny_model):
    import torch
    from transformers import BatchEncoding

    import kvfold

    class Words:
        def __call__(self, text, return_tensors):
            return BatchEncoding({"input_ids": torch.arange(3, 23)[None]})

        def decode(self, ids):
            return f"{len(ids)} tokens"

    save_with_card(addon, tmp_path / "a")
    code = re.search(r"```python\n(.*?)```", (tmp_path / "a" / "README.md").read_text(), re.DOTALL)
    printed = []
    monkeypatch.chdir(tmp_path / "a")
    monkeypatch.setattr(kvfold, "load", lambda name: (tiny_model("llama"), Words()), raising=False)
    exec(code[1], {"print": lambda *words: printed.append(words)})
    assert printed == [("220 tokens",)]


def test_a_card_and_its_plot_are_saved_with_the_addon_and_replaced_by_the_next(addon, tmp_path):
    assert save_with_card(addon, tmp_path / "a", plot=b"picture")
    assert (tmp_path / "a" / PLOT_FILE).read_bytes() == b"picture"
    addon.report["recipe"]["name"] = "another"
    assert save_with_card(addon, tmp_path / "a", licence="mit", plot=b"new")
    assert "# another" in (tmp_path / "a" / "README.md").read_text()
    assert (tmp_path / "a" / PLOT_FILE).read_bytes() == b"new"
    assert AddOn.from_pretrained(tmp_path / "a").report == addon.report
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("content", [b"# mine", b"", b"\xff\xfe"])
def test_a_readme_that_kvfold_did_not_write_is_kept(addon, tmp_path, content):
    addon.save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "README.md").write_bytes(content)
    assert not save_with_card(addon, tmp_path / "a", plot=b"picture")
    assert (tmp_path / "a" / "README.md").read_bytes() == content
    assert not (tmp_path / "a" / PLOT_FILE).exists()
    assert AddOn.from_pretrained(tmp_path / "a").report == addon.report


def test_licences_of_kvfolds_own_models_are_known():
    assert base_licence(DEFAULT_MODEL) in ("apache-2.0", None)  # None where it is not installed
    assert base_licence(TINY_HYBRID) == "apache-2.0"


def test_a_folders_licence_is_what_its_card_says(tmp_path):
    assert base_licence(tmp_path) is None
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    assert base_licence(tmp_path) == "mit"
    (tmp_path / "README.md").write_text("---\nlicense: [broken\n---\n")
    assert base_licence(tmp_path) is None
