"""An add-on that was saved and loaded folds as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvfold.runtime.attach import attach
from kvfold.store.addon import AddOn
from kvfold.store.fingerprint import Fingerprint


def test_a_saved_add_on_gives_the_same_logits(
    case: Any, helpers: Any, arch: str, method: str, tmp_path: Path
) -> None:
    """Bit by bit, from files that hold the plan of all axes and every weight."""
    made = case(arch, method, dtype=torch.float32)
    base, lora = Fingerprint.of(made.model), made.addon.lora
    addon = AddOn(made.plan, made.addon.pipelines, base, {}, lora=lora)
    addon.save_pretrained(tmp_path / "addon")
    loaded = AddOn.from_pretrained(tmp_path / "addon")
    assert loaded.plan == made.plan
    ours, theirs = loaded.pipelines.state_dict(), made.addon.pipelines.state_dict()
    assert list(ours) == list(theirs)
    weights = zip(loaded.parameters(), addon.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in weights)
    ids = helpers.tokens(40)
    with made.attach() as attachment:
        before = made.run(ids, attachment.new_cache())
    with attach(made.model, loaded) as attachment:
        assert torch.equal(made.run(ids, attachment.new_cache()), before)
