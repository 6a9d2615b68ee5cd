"""Block lengths for rows of different widths."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.vllm.pages import UNIT, RowSize, fit_pages

sizes = st.dictionaries(
    st.sampled_from(["exact", "history-4", "recent", "whole"]),
    st.builds(RowSize, st.integers(64, 50_000).map(lambda n: 4 * n), st.sampled_from([1, 2, 4])),
    min_size=1,
)


@settings(deadline=None, max_examples=30)
@given(sizes)
def test_every_block_fits_on_a_page_and_is_whole_slots(given_sizes):
    pages = fit_pages(given_sizes)
    for name, size in given_sizes.items():
        tokens = pages.tokens[name]
        assert tokens > 0
        assert tokens % UNIT == 0
        assert tokens % size.tokens == 0
        assert tokens * size.bytes_per_token <= pages.page_bytes


def test_a_model_in_six_groups_wastes_nothing():
    """SmolLM2's 30 layers of 384 values, and six codes of 384."""
    widths = {"exact": RowSize(30 * 384 * 4), "history-1": RowSize(6 * 384 * 4)}
    pages = fit_pages(widths)
    assert pages.tokens == {"exact": 16, "history-1": 80}
    assert pages.wasted_fraction(widths) == 0


def test_recurrent_states_set_the_page_where_they_are_larger():
    """Qwen3.5-4B: states of 2 MiB, 8 layers of 2,048 values, two codes of 2,048."""
    state = 32 * 128 * 128 * 4 + 8192 * 3 * 2
    widths = {"exact": RowSize(8 * 2048 * 2), "history-1": RowSize(2 * 2048 * 2)}
    pages = fit_pages(widths, state_bytes=state)
    assert pages.page_bytes == state
    assert pages.tokens == {"exact": 64, "history-1": 256}
    small = fit_pages(widths, state_bytes=1000)
    assert small.page_bytes >= 16 * 8 * 2048 * 2


@settings(deadline=None, max_examples=30)
@given(sizes, st.integers(1, 3_000_000), st.sampled_from([16, 48]))
def test_states_fit_on_every_page_too(given_sizes, state_bytes, unit):
    pages = fit_pages(given_sizes, state_bytes=state_bytes, unit=unit)
    assert pages.page_bytes >= state_bytes
    for name, size in given_sizes.items():
        assert pages.tokens[name] % unit == 0
        assert pages.tokens[name] * size.bytes_per_token <= pages.page_bytes


def test_of_many_kinds_of_rows_not_every_combination_is_tried():
    """Of these there would be two million on each page."""
    widths = {"exact": RowSize(46_080, 1, grows=False), "whole": RowSize(3_072)}
    for group in (1, 2, 4, 8, 16):
        widths[f"history-{group}"] = RowSize(768 + 4 * group, group)
    pages = fit_pages(widths)
    assert pages.wasted_fraction(widths) < 0.25
    assert all(pages.tokens[name] % size.tokens == 0 for name, size in widths.items())
