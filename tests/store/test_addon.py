"""An add-on on disk: whole or not at all, and never another one than was saved."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvfold.anatomy import anatomy
from kvfold.errors import AddOnError
from kvfold.fitting.fit import fit
from kvfold.methods import build_pipelines
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.store import addon as addon_module
from kvfold.store.addon import DESCRIPTION_FILE, WEIGHTS_FILE, AddOn
from kvfold.store.fingerprint import Fingerprint

PLAN = Plan.from_dict(
    {
        "anchors": 2,
        "window": 4,
        "depth": [
            {"method": "latent", "layers": [1, 2], "rank": 6},
            {"method": "csa2", "source": 3, "readers": [4, 5], "residual_hidden": 4},
        ],
    }
)


def _addon(model, plan=PLAN, seed=0):
    pipelines = build_pipelines(plan, anatomy(model))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in pipelines.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return AddOn(plan, pipelines.to(model.dtype), Fingerprint.of(model), {"fit": {"tokens": 3}})


def _assert_same(first, second):
    assert first.plan == second.plan
    assert first.base == second.base
    assert first.report == second.report
    ours, theirs = first.pipelines.state_dict(), second.pipelines.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]) and tensor.dtype == theirs[name].dtype


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def folder(model, tmp_path):
    _addon(model).save_pretrained(tmp_path / "addon")
    return tmp_path / "addon"


def _redigest(folder, **changes):
    """Edit the description and make its digest right again, as a forger would."""
    description = json.loads((folder / DESCRIPTION_FILE).read_text())
    description.update(changes)
    description["sha256"] = addon_module._description_digest(description)
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_saved_addon_comes_back_as_it_was(tiny_model, tmp_path, dtype):
    made = _addon(tiny_model("llama", dtype=dtype))
    made.save_pretrained(tmp_path / "addon")
    loaded = AddOn.from_pretrained(tmp_path / "addon")
    _assert_same(made, loaded)
    assert sorted(p.name for p in (tmp_path / "addon").iterdir()) == [
        DESCRIPTION_FILE,
        WEIGHTS_FILE,
    ]


def test_every_family_comes_back(tiny_model, family, tmp_path):
    model = tiny_model(family)
    layers = list(anatomy(model).foldable_layers)
    plan = Plan.from_dict({"depth": [{"method": "latent", "layers": layers, "rank": 4}]})
    made = _addon(model, plan)
    made.save_pretrained(tmp_path / "addon")
    loaded = AddOn.from_pretrained(tmp_path / "addon")
    _assert_same(made, loaded)
    loaded.check_base(model)


def test_maps_that_entries_share_are_stored_once_and_stay_shared(model, tmp_path):
    plan = Plan.from_dict(
        {
            "depth": [
                {"method": "ced", "split": 2, "layers": [2, 3]},
                {"method": "csa2", "source": 2, "readers": [4]},
                {"method": "csa2", "source": 3, "readers": [5]},
            ]
        }
    )
    made = _addon(model, plan)
    made.save_pretrained(tmp_path / "addon")
    loaded = AddOn.from_pretrained(tmp_path / "addon")
    _assert_same(made, loaded)
    assert loaded.pipelines[0].depth.ced is loaded.pipelines[1].depth.ced
    assert loaded.parameter_bytes() == made.parameter_bytes()


def test_dtype_can_be_chosen_at_loading(folder):
    loaded = AddOn.from_pretrained(folder, dtype=torch.float16)
    assert {p.dtype for p in loaded.pipelines.parameters()} == {torch.float16}
    assert not any(p.requires_grad for p in loaded.pipelines.parameters())


def test_parameter_bytes_are_those_of_the_weights(model, folder):
    count = sum(tensor.numel() for tensor in load_file(folder / WEIGHTS_FILE).values())
    assert AddOn.from_pretrained(folder).parameter_bytes() == 4 * count
    half = AddOn.from_pretrained(folder).to(torch.bfloat16)
    assert half.parameter_bytes() == 2 * count
    assert "latent" in repr(half) and "csa2" in repr(half)


def test_untrained_addon_has_the_models_dtype_and_zero_weights(tiny_model):
    model = tiny_model("qwen2", dtype=torch.float64)
    addon = AddOn.untrained(model, PLAN)
    addon.check_base(model)
    assert {p.dtype for p in addon.pipelines.parameters()} == {torch.float64}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_changed_byte_is_an_error_or_changes_nothing(model, folder, data):
    name = data.draw(st.sampled_from([WEIGHTS_FILE, DESCRIPTION_FILE]))
    path = folder / name
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    value = data.draw(st.integers(0, 255))
    path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
    refused = None
    try:
        _assert_same(AddOn.from_pretrained(folder), _addon(model))
    except AddOnError as error:
        refused = str(error)
    finally:
        path.write_bytes(whole)
    assert refused is None or str(path) in refused


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_truncated_file_is_an_error(folder, data):
    path = folder / data.draw(st.sampled_from([WEIGHTS_FILE, DESCRIPTION_FILE]))
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2))])
    with pytest.raises(AddOnError, match=path.name):
        AddOn.from_pretrained(folder)
    path.write_bytes(whole)


@pytest.mark.parametrize("version", [2, 3])
def test_an_older_add_on_is_read_as_one_that_skips_and_adapts_nothing(folder, version):
    description = json.loads((folder / DESCRIPTION_FILE).read_text())
    plan = {
        key: value
        for key, value in description["plan"].items()
        if key not in ("replay", "state_projector")
    }
    _redigest(folder, format_version=version, plan=plan)
    read = AddOn.from_pretrained(folder)
    assert (read.plan, read.state_projector, read.lora) == (PLAN, None, None)


HYBRID_PLAN = Plan.from_dict(
    {
        "window": 4,
        "depth": [{"method": "ced", "split": 2, "layers": [3, 7]}],
        "prefill": "skip",
        "replay": 8,
        "state_projector": True,
    }
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_projector_is_saved_with_what_was_measured(tiny_model, tmp_path, dtype):
    hybrid = tiny_model("qwen3_5", dtype=dtype)
    tokens = torch.randint(3, 97, (8, 24), generator=torch.Generator().manual_seed(1))
    made = fit(hybrid, HYBRID_PLAN, tokens, progress=False)
    made.save_pretrained(tmp_path / "addon")
    read = AddOn.from_pretrained(tmp_path / "addon")
    ours, theirs = made.state_projector.state_dict(), read.state_projector.state_dict()
    assert list(ours) == list(theirs)
    assert {f"maps.{n}.weight" for n in (2, 4, 5, 6)} < set(ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]) and tensor.dtype == theirs[name].dtype
    assert read.state_projector.measured_replay == 8
    assert read.state_projector.kept == made.state_projector.kept
    assert read.report == made.report
    assert read.parameter_bytes() == made.parameter_bytes()
    with attach(hybrid, read), torch.no_grad():
        assert torch.isfinite(hybrid(tokens[:1], logits_to_keep=1).logits).all()


@pytest.mark.parametrize(
    "states_kept",
    [
        None,
        [],
        {"replay": 8},
        {"replay": 0, "kept": {str(n): [1.0] * 4 for n in (2, 4, 5, 6)}},
        {"replay": 8, "kept": {str(n): [1.0] * 3 for n in (2, 4, 5, 6)}},
        {"replay": 8, "kept": {str(n): [2.0] * 4 for n in (2, 4, 5, 6)}},
        {"replay": 8, "kept": {str(n): ["much"] * 4 for n in (2, 4, 5, 6)}},
        {"replay": 8, "kept": {str(n): [1.0] * 4 for n in (2, 4, 5)}},
    ],
)
def test_decay_that_was_not_measured_is_refused(tiny_model, tmp_path, states_kept):
    AddOn.untrained(tiny_model("qwen3_5"), HYBRID_PLAN).save_pretrained(tmp_path / "addon")
    _redigest(tmp_path / "addon", states_kept=states_kept)
    with pytest.raises(AddOnError, match="states_kept is not as kvfold writes it"):
        AddOn.from_pretrained(tmp_path / "addon")


@pytest.mark.parametrize("name", [WEIGHTS_FILE, DESCRIPTION_FILE])
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(AddOnError, match=name):
        AddOn.from_pretrained(folder)


def test_unknown_format_version_says_which_is_read(folder):
    _redigest(folder, format_version=99)
    with pytest.raises(AddOnError, match=r"reads add-ons of format versions 2 to 4; .* version 99"):
        AddOn.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": {"window": 3, "wrong": 1}}, "unknown key wrong"),
        ({"plan": {"depth": [{"method": "latent", "layers": [77], "rank": 2}]}}, "layer 77"),
        ({"base": {"name": "x"}}, "base model"),
        ({"base": None}, "base model"),
        (
            {"plan": {"depth": [{"method": "latent", "layers": [1, 2], "rank": 7}]}},
            "belong together",
        ),
    ],
)
def test_description_that_does_not_fit_is_refused(folder, changes, message):
    _redigest(folder, **changes)
    with pytest.raises(AddOnError, match=message):
        AddOn.from_pretrained(folder)


def test_sizes_that_no_machine_has_are_refused_before_any_memory_is_taken(folder):
    description = json.loads((folder / DESCRIPTION_FILE).read_text())
    base = description["base"]
    base["hidden_size"] = 10**9
    for layer in base["layers"]:
        layer["head_dim"] = 10**8
    plan = {"depth": [{"method": "latent", "layers": [1, 2], "rank": 10**8}]}
    _redigest(folder, base=base, plan=plan)
    with pytest.raises(AddOnError, match="must be those of the plan"):
        AddOn.from_pretrained(folder)


def _replace_weights(folder, weights):
    save_file(weights, folder / WEIGHTS_FILE)
    digest = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    _redigest(folder, weights_sha256=digest)


def test_names_and_shapes_that_differ_are_listed(folder):
    weights = load_file(folder / WEIGHTS_FILE)
    weights["stranger"] = torch.zeros(2)
    weights.pop("0.depth.encoder.weight")
    weights["0.depth.keys.1.bias"] = torch.zeros(3)
    _replace_weights(folder, weights)
    with pytest.raises(AddOnError) as caught:
        AddOn.from_pretrained(folder)
    message = str(caught.value)
    assert "missing: 0.depth.encoder.weight [6, 128]" in message
    assert "not expected: stranger [2]" in message
    assert "0.depth.keys.1.bias [3] instead of [32]" in message


def test_integers_for_weights_are_refused(folder):
    weights = {name: t.to(torch.int8) for name, t in load_file(folder / WEIGHTS_FILE).items()}
    _replace_weights(folder, weights)
    with pytest.raises(AddOnError, match="floating"):
        AddOn.from_pretrained(folder)


def test_pickle_in_place_of_the_weights_is_never_executed(folder, tmp_path):
    proof = tmp_path / "proof"

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(proof),)

    torch.save(Attack(), folder / WEIGHTS_FILE)
    digest = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    _redigest(folder, weights_sha256=digest)
    with pytest.raises(AddOnError, match="must be a safetensors file"):
        AddOn.from_pretrained(folder)
    assert not proof.exists()


@pytest.mark.parametrize("step", ["save_file", "_file_digest"])
def test_interruption_while_writing_leaves_the_old_one(model, folder, monkeypatch, step):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(addon_module, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            _addon(model, seed=1).save_pretrained(folder)
    _assert_same(AddOn.from_pretrained(folder), _addon(model))
    assert [p.name for p in folder.parent.iterdir()] == ["addon"]


def test_kill_between_the_two_renames_still_leaves_the_old_one(model, folder):
    os.rename(folder, folder.with_name(".addon.previous"))
    _assert_same(AddOn.from_pretrained(folder), _addon(model))
    _addon(model, seed=1).save_pretrained(folder)
    _assert_same(AddOn.from_pretrained(folder), _addon(model, seed=1))


def test_saving_again_replaces_and_keeps_what_lies_beside(model, folder):
    (folder / "README.md").write_text("mine")
    _addon(model, seed=1).save_pretrained(folder)
    _assert_same(AddOn.from_pretrained(folder), _addon(model, seed=1))
    assert (folder / "README.md").read_text() == "mine"
    assert [p.name for p in folder.parent.iterdir()] == ["addon"]


def test_folder_of_something_else_is_not_replaced(model, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(AddOnError, match="holds other files"):
        _addon(model).save_pretrained(tmp_path)
    with pytest.raises(AddOnError, match="is a file"):
        _addon(model).save_pretrained(tmp_path / "photo.jpg")
    assert (tmp_path / "photo.jpg").read_bytes() == b"x"


def test_path_that_is_not_there_says_what_an_addon_is(tmp_path):
    with pytest.raises(AddOnError, match="there is none such as"):
        AddOn.from_pretrained(tmp_path / "none")


def test_hub_id_fetches_only_the_two_files(folder, monkeypatch):
    asked = {}

    def snapshot_download(name, **keys):
        asked.update(keys, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    AddOn.from_pretrained("owner/addon", revision="v1")
    assert asked == {
        "name": "owner/addon",
        "revision": "v1",
        "allow_patterns": [DESCRIPTION_FILE, WEIGHTS_FILE],
    }


def test_hub_failure_is_explained(monkeypatch):
    def snapshot_download(name, **keys):
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(AddOnError, match=r"offline.*check its spelling and your connection"):
        AddOn.from_pretrained("owner/addon")
