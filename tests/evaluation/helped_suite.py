"""A small suite that any process can make for itself, with faults to order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvfold.errors import EvaluationError
from kvfold.evaluation.suite import Suite
from kvfold.evaluation.tasks.task import Answer, Item, Subject
from kvfold.plan import Plan
from kvfold.store.addon import AddOn

from .suite_tasks import NextTokenTask

PLAN = {"anchors": 2, "window": 4, "depth": [{"method": "csa2", "source": 2, "readers": [3]}]}


class Faulty(NextTokenTask):
    """raises, dies: instead of answering for the add-on."""

    def __init__(self, raises: bool, dies: bool, **more: Any) -> None:
        super().__init__(**more)
        self.raises, self.dies = raises, dies

    def answers(self, subject: Subject, items: Sequence[Item]) -> Sequence[Answer]:
        if subject.addon is not None and self.raises:
            raise EvaluationError("no answer to that")
        if subject.addon is not None and self.dies:
            os._exit(3)
        return super().answers(subject, items)


def helped_suite(*, items: int = 6, raises: bool = False, dies: bool = False) -> Suite:
    """A tiny model, plain and with an untrained add-on, and two tasks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    addon = AddOn.untrained(model, Plan.from_dict(PLAN))
    tasks = [
        Faulty(raises, dies, name="even", items=items),
        NextTokenTask("other", items=4, chunk=2),
    ]
    return Suite(model, None, {"folds": addon}, tasks)
