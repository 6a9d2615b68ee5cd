"""However codes are read, rebuilt or summed, turned back or left turned, attention is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvfold import AddOn, attach
from kvfold.plan import Plan
from kvfold.runtime import streaming

LAYERS = [1, 2, 3, 4]
DEPTHS: dict[str, Any] = {
    "joint": {"method": "latent", "layers": LAYERS, "rank": 40},
    "apart": {"method": "latent", "layers": LAYERS, "rank": 24, "value_rank": 20},
    "csa2": {"method": "csa2", "source": 1, "readers": [2, 3, 4]},
    "residual": {"method": "csa2", "source": 1, "readers": [2, 3, 4], "residual_hidden": 6},
}


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("depth", list(DEPTHS))
def test_every_way_to_read_codes_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Callable[..., Any],
    cache_argument: Callable[..., Any],
    depth: str,
    bits: bool,
) -> None:
    """Prompts of two rows and tokens after them; each way is seen to be taken."""
    model = tiny_model("llama", dtype=torch.float64)
    plan = Plan.from_dict(
        {
            "anchors": 2,
            "window": 8,
            "resident": "shared",
            "depth": [DEPTHS[depth]],
            "bits": [{"method": "turboquant", "layers": LAYERS}] if bits else [],
        }
    )
    addon = AddOn.untrained(model, plan)
    torch.manual_seed(3)
    for parameter in addon.parameters():
        parameter.data.normal_(std=0.1)
    prompt, answer = torch.randint(3, 90, (2, 60)), torch.randint(3, 90, (2, 5))
    taken = set()

    plain_reader: Any = streaming._CodeReader

    def logits(sums: bool | None, turns: bool | None) -> torch.Tensor:
        class Reader(plain_reader):
            def _absorbing_pays(self, slots: int) -> bool:
                return super()._absorbing_pays(slots) if sums is None else sums

            def _rotating_pays(self, slots: int) -> bool:
                pays = super()._rotating_pays(10**6)
                made = pays if turns is None else pays and turns
                taken.add((self.sums_codes, made))
                return made

        monkeypatch.setattr(streaming, "_CodeReader", Reader)
        with attach(model, addon) as attachment, torch.no_grad():
            cache = attachment.new_cache()
            made = [model(prompt, **cache_argument(model, cache)).logits]
            made += [
                model(answer[:, n : n + 1], **cache_argument(model, cache)).logits
                for n in range(answer.shape[1])
            ]
        return torch.cat(made, dim=1)

    plain = logits(sums=False, turns=False)
    for sums in (False, True) if depth != "residual" else (False,):
        for turns in (False, True):
            torch.testing.assert_close(logits(sums, turns), plain, rtol=1e-7, atol=1e-7)
    turned = {True, False} if bits and depth != "residual" else {False}
    assert {turns for _, turns in taken} == turned
    assert {sums for sums, _ in taken} == ({True, False} if depth != "residual" else {False})
