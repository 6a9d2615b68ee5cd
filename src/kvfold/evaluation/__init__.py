"""Measures of a folded model against the plain one, one file each, their runner and report."""

from __future__ import annotations

from kvfold.evaluation.candidates import Candidate, with_plan
from kvfold.evaluation.runner import PLAIN, Evaluation, Result, evaluate

__all__ = [
    "PLAIN",
    "Candidate",
    "Evaluation",
    "Result",
    "evaluate",
    "with_plan",
]
