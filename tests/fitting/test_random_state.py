"""A fit draws by seeds of its own: the caller's random state is as it was, and decides nothing."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from kvfold.anatomy import anatomy
from kvfold.fitting.fit import fit
from kvfold.fitting.gates import GateSettings
from kvfold.fitting.predict import predict
from kvfold.fitting.recipe_checks import check_recipe
from kvfold.fitting.together import fit_together
from kvfold.plan import Plan

from .tiny_recipes import made_recipe, run, same_weights, write_sums

PLAN = {
    "anchors": 2,
    "window": 6,
    "depth": [{"method": "csa2", "source": 1, "readers": [2, 3], "residual_hidden": 8}],
    "sequence": [{"method": "pool", "layers": [4, 5], "group": 2, "gate": "channel"}],
    "lora": {"rank": 2},
}
STAGES = [
    {"stage": "closed-form", "tokens": 1920},
    {"stage": "gates", "steps": 2, "queries": 8},
    {"stage": "refine", "steps": 2, "queries": 8, "look_every": 2},
    {"stage": "distil", "steps": 2, "rows": 1, "look_every": 2},
]
TEXT = [{"source": "${DATA}/sums.jsonl"}, {"source": "self", "tokens": 96}]


@contextmanager
def random_state_kept(seed):
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


def test_looking_at_a_recipe_draws_nothing(model, tmp_path):
    recipe = made_recipe(plan=PLAN, stages=STAGES)
    with random_state_kept(1):
        check_recipe(recipe, anatomy(model), tmp_path)
        few = made_recipe(plan=PLAN, stages=STAGES[:1])
        predict(few, model.config, "cpu", torch.float32)


def test_runs_of_a_recipe_leave_the_random_state_and_do_not_depend_on_it(model, tmp_path):
    write_sums(tmp_path)
    recipe = made_recipe(plan=PLAN, stages=STAGES, text=TEXT)
    made = []
    for seed in (1, 2):
        with random_state_kept(seed):
            made.append(run(model, tmp_path, tmp_path / f"work-{seed}", recipe))
    assert same_weights(*made)


def test_fits_leave_the_random_state_and_do_not_depend_on_it(model):
    tokens = torch.randint(3, 160, (40, 48), generator=torch.Generator().manual_seed(0))
    plan, gates = Plan.from_dict(PLAN), GateSettings(steps=1, queries=8)
    made = []
    for seed in (1, 2):
        with random_state_kept(seed):
            made.append(fit(model, plan, tokens, tokens[:2], gates=gates, progress=False))
            together = fit_together(model, {"a": plan}, tokens, gates=gates, progress=False)
            made.append(together["a"])
    assert same_weights(made[0], made[2])
    assert same_weights(made[1], made[3])
