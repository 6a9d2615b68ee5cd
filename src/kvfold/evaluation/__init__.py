"""Measures of a folded model against the plain one, one file each, their runner and report."""

from __future__ import annotations

from kvfold.evaluation.candidates import Candidate, with_plan
from kvfold.evaluation.prompt_runner import PromptEvaluation, PromptResult, evaluate_prompts
from kvfold.evaluation.runner import PLAIN, Evaluation, Result, evaluate

__all__ = [
    "PLAIN",
    "Candidate",
    "Evaluation",
    "PromptEvaluation",
    "PromptResult",
    "Result",
    "evaluate",
    "evaluate_prompts",
    "with_plan",
]
