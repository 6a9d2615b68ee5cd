"""The loss that a student is held to, its gradient, and that logits never exist all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from kvfold.errors import FitError
from kvfold.fitting import distil_loss
from kvfold.fitting.distil_loss import LossSettings, distance, distance_and_gradient


def _states(model: Any, rows: int = 2, seq: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (rows, seq, model.config.hidden_size)
    teacher = torch.randn(shape, generator=generator, dtype=model.dtype)
    noise = torch.randn(shape, generator=generator, dtype=model.dtype)
    return teacher + 0.3 * noise, teacher


@pytest.mark.parametrize("reverse", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_and_gradient_are_those_written_out(
    tiny_model: Any, reverse: float, temperature: float
) -> None:
    model = tiny_model("llama", dtype=torch.float64).requires_grad_(False)
    student, teacher = _states(model)
    settings = LossSettings(temperature=temperature, hidden_weight=0.5, reverse=reverse)
    found, gradient = distance_and_gradient(model, student, teacher, settings)

    ours = student.clone().requires_grad_(True)
    head = model.get_output_embeddings()
    q = (head(ours) / temperature).log_softmax(-1).flatten(0, 1)
    p = (head(teacher) / temperature).log_softmax(-1).flatten(0, 1)
    forward = functional.kl_div(q, p, log_target=True, reduction="batchmean")
    backward = functional.kl_div(p, q, log_target=True, reduction="batchmean")
    divergence = (1 - reverse) * forward + reverse * backward
    error = (ours - teacher).pow(2).sum() / teacher.pow(2).sum()
    loss = temperature**2 * divergence + 0.5 * error
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()))
    assert found.hidden == pytest.approx(float(error.detach()))
    torch.testing.assert_close(gradient, ours.grad)


def test_distance_to_itself_is_nothing(tiny_model: Any) -> None:
    model = tiny_model("qwen3")
    student, teacher = _states(model)
    same = distance(model, teacher, teacher)
    assert same.loss == pytest.approx(0, abs=1e-5)
    assert distance(model, student, teacher).kl > 0.01


def test_logits_are_made_for_a_few_rows_at_a_time(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = tiny_model("llama"), []
    real = distil_loss.logits

    def watched(*args: Any) -> torch.Tensor:
        made: torch.Tensor = real(*args)
        seen.append(made.shape[0])
        return made

    monkeypatch.setattr(distil_loss, "logits", watched)
    distance_and_gradient(model, *_states(model), LossSettings())
    assert max(seen) == distil_loss.CHUNK_ROWS
    assert sum(seen) == 2 * 2 * 150


def test_a_share_of_positions_gives_the_gradient_in_the_mean(tiny_model: Any) -> None:
    model = tiny_model("llama", dtype=torch.float64).requires_grad_(False)
    student, teacher = _states(model)
    _, whole = distance_and_gradient(model, student, teacher, LossSettings())
    half = LossSettings(logits_share=0.5)
    drawn = [distance_and_gradient(model, student, teacher, half, seed=n)[1] for n in range(64)]
    assert not torch.equal(drawn[0], drawn[1])
    mean = torch.stack(drawn).mean(dim=0)
    assert float((mean - whole).norm() / whole.norm()) < 0.2


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 0.0}, {"hidden_weight": -1.0}, {"reverse": 1.5}, {"logits_share": 0.0}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(FitError, match=next(iter(wrong))):
        LossSettings(**wrong)
