"""Files of the first card's shapes are read by shape and name, and never run."""

from __future__ import annotations

import os

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.errors import AddOnError
from kvfold.plan import Plan
from kvfold.store.pt_import import import_card

HIDDEN, WIDTH, INNER = 32, 32, 48
READERS = (4, 5)
PLAN = Plan.from_dict(
    {
        "anchors": 0,
        "window": 0,
        "depth": [
            {"method": "ced", "split": 2, "layers": [3], "bias": False, "normalize": False},
            {
                "method": "csa2",
                "source": 3,
                "readers": list(READERS),
                "form": "separate",
                "residual_hidden": INNER,
                "bias": False,
            },
        ],
    }
)


@pytest.fixture(scope="module")
def shape(tiny_config):
    return anatomy(tiny_config("llama"))


def _random(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def _projector():
    return {"k": _random(WIDTH, HIDDEN), "v": _random(WIDTH, HIDDEN) + 1}


def _adapters():
    return {
        (layer, role): {
            "base": _random(WIDTH, WIDTH) + layer + (role == "v"),
            "up": _random(INNER, WIDTH) + layer + (role == "v"),
            "down": _random(WIDTH, INNER) + layer + (role == "v"),
        }
        for layer in READERS
        for role in "kv"
    }


def _save(data, path):
    torch.save(data, path)
    return path


PROJECTOR_LAYOUTS = {
    "k_proj": lambda p: {"k_proj.weight": p["k"], "v_proj.weight": p["v"]},
    "proj_k in a state dict": lambda p: {
        "state_dict": {"proj_k.weight": p["k"], "proj_v.weight": p["v"]},
        "config": {"k": 20, "split": 16},
        "step": 12,
    },
    "w_k": lambda p: {"W_k": p["k"], "W_v": p["v"]},
    "wk": lambda p: {"module.wk.weight": p["k"], "module.wv.weight": p["v"]},
    "k20": lambda p: {"k20.weight": p["k"], "v20.weight": p["v"]},
    "nested": lambda p: {"key": {"weight": p["k"]}, "value": {"weight": p["v"]}},
}
ADAPTER_LAYOUTS = {
    "by layer, from 1": lambda a: {
        f"layer{layer + 1}": {
            role: {
                "base.weight": a[layer, role]["base"],
                "mlp.0.weight": a[layer, role]["up"],
                "mlp.2.weight": a[layer, role]["down"],
            }
            for role in "kv"
        }
        for layer in READERS
    },
    "integers, from 0": lambda a: (
        {
            layer: {
                f"{role}_adapter.linear.weight": a[layer, role]["base"],
                f"{role}_adapter.fc1.weight": a[layer, role]["up"],
                f"{role}_adapter.fc2.weight": a[layer, role]["down"],
            }
            for layer in READERS
            for _ in range(1)
            for role in "k"
        }
        | {
            f"{layer}.v": {
                "linear.weight": a[layer, "v"]["base"],
                "fc1.weight": a[layer, "v"]["up"],
                "fc2.weight": a[layer, "v"]["down"],
            }
            for layer in READERS
        }
    ),
    "flat": lambda a: {
        "state_dict": {
            f"adapters.{layer + 1}.{role}_map.{part}": tensor
            for (layer, role), parts in a.items()
            for part, tensor in parts.items()
        },
        "epochs": 120,
    },
}


@pytest.mark.parametrize("layout", PROJECTOR_LAYOUTS.values(), ids=PROJECTOR_LAYOUTS)
def test_projector_is_read_in_several_layouts(shape, tmp_path, layout):
    path = _save(layout(_projector()), tmp_path / "projector.pt")
    maps = import_card(path, None, PLAN, shape)[0].depth.ced
    assert torch.equal(maps.keys["3"].base.weight, _projector()["k"])
    assert torch.equal(maps.values["3"].base.weight, _projector()["v"])


@pytest.mark.parametrize("layout", ADAPTER_LAYOUTS.values(), ids=ADAPTER_LAYOUTS)
def test_adapters_are_read_in_several_layouts(shape, tmp_path, layout):
    path = _save(layout(_adapters()), tmp_path / "adapters.pt")
    method = import_card(None, path, PLAN, shape)[0].depth
    for (layer, role), parts in _adapters().items():
        chosen = (method.keys if role == "k" else method.values)[str(layer)]
        assert torch.equal(chosen.base.weight, parts["base"])
        assert torch.equal(chosen.mlp[0].weight, parts["up"])
        assert torch.equal(chosen.mlp[2].weight, parts["down"])


def test_names_that_differ_are_told_with_those_expected(shape, tmp_path):
    data = {"first.weight": _projector()["k"], "second.weight": _projector()["v"]}
    with pytest.raises(AddOnError) as caught:
        import_card(_save(data, tmp_path / "p.pt"), None, PLAN, shape)
    message = str(caught.value)
    assert "Expected: projector.k.base [32, 32], projector.v.base [32, 32]" in message
    assert "Came: first.weight [32, 32], second.weight [32, 32]" in message


def test_shapes_that_differ_are_told(shape, tmp_path):
    data = {"k.weight": _random(WIDTH, 7), "v.weight": _random(WIDTH, HIDDEN)}
    with pytest.raises(AddOnError, match=r"Without a match: projector\.k\.base.*k\.weight"):
        import_card(_save(data, tmp_path / "p.pt"), None, PLAN, shape)


def test_layer_that_is_missing_is_told(shape, tmp_path):
    data = ADAPTER_LAYOUTS["by layer, from 1"](_adapters())
    data.pop("layer6")
    with pytest.raises(
        AddOnError, match=r"Expected: .*layers\.6\.k\.base.*Came: layer5.*Without a match: layers"
    ):
        import_card(None, _save(data, tmp_path / "a.pt"), PLAN, shape)


def test_non_finite_weights_are_refused(shape, tmp_path):
    data = {"k": torch.full((WIDTH, HIDDEN), float("nan")), "v": _random(WIDTH, HIDDEN)}
    with pytest.raises(AddOnError, match="finite"):
        import_card(_save(data, tmp_path / "p.pt"), None, PLAN, shape)


def test_pickle_with_code_is_refused_and_not_run(shape, tmp_path):
    proof = tmp_path / "proof"

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(proof),)

    path = _save({"k": _random(WIDTH, HIDDEN), "v": Attack()}, tmp_path / "p.pt")
    with pytest.raises(AddOnError, match=r"would run code.*not loaded"):
        import_card(path, None, PLAN, shape)
    assert not proof.exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04broken"])
def test_damaged_file_is_refused(shape, tmp_path, content):
    (tmp_path / "p.pt").write_bytes(content)
    with pytest.raises(AddOnError, match=r"p\.pt"):
        import_card(tmp_path / "p.pt", None, PLAN, shape)


def test_missing_file_is_refused(shape, tmp_path):
    with pytest.raises(AddOnError, match="there is none"):
        import_card(tmp_path / "none.pt", None, PLAN, shape)


def test_plan_of_another_kind_is_refused(shape, tmp_path):
    plan = Plan.from_dict({"depth": [{"method": "latent", "layers": [1, 2], "rank": 4}]})
    path = _save(_projector(), tmp_path / "p.pt")
    with pytest.raises(AddOnError, match="one ced entry"):
        import_card(path, None, plan, shape)
    with pytest.raises(AddOnError, match="one csa2 entry"):
        import_card(None, path, plan, shape)
