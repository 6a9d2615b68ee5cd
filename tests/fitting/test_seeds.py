"""Seeds: the same for the same names, another for any other."""

from __future__ import annotations

import torch

from kvfold.fitting.seeds import derived_seed, drawn_order


def test_a_seed_follows_from_all_its_names_and_never_changes():
    assert derived_seed(0, "turns", 3) == 3434251216964240823
    made = [(0, "a", 1), (1, "a", 1), (0, "a1"), (0, "a", 11), (0, "a1", 1), (0, 1, "a"), (0,)]
    assert len({derived_seed(*names) for names in made}) == len(made)
    assert all(0 <= derived_seed(n) < 2**63 for n in range(200))


def test_an_order_has_every_number_once_and_is_drawn_by_its_seed():
    first, second = drawn_order(50, 1), drawn_order(50, 2)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(50))
    assert not torch.equal(first, second)
    assert torch.equal(first, drawn_order(50, 1))


def test_drawing_an_order_leaves_the_global_state_alone():
    before = torch.get_rng_state()
    drawn_order(50, derived_seed(3))
    assert torch.equal(before, torch.get_rng_state())
