"""The peak of a block is what it took at its highest, also if it was freed before the end."""

from __future__ import annotations

import sys

import pytest
import torch

from kvfold.evaluation.peak import peak_memory

MEGABYTES = 2**20
SLACK = 24 * MEGABYTES
"""What the interpreter and allocator may take or keep on the way."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells the peak")
def test_memory_that_was_freed_within_the_block_counts():
    with peak_memory(torch.device("cpu")) as peak:
        block = torch.ones(64 * MEGABYTES // 4)
        del block
    with peak_memory(torch.device("cpu")) as nothing:
        pass
    assert peak.above_start == pytest.approx(64 * MEGABYTES, abs=SLACK)
    assert nothing.above_start < SLACK


def test_there_is_no_figure_where_it_cannot_be_told():
    with peak_memory(torch.device("meta")) as peak:
        pass
    assert peak.above_start is None or peak.above_start >= 0
