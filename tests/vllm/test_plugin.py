"""The entry point: quiet, harmless, and only for releases that were tested."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points

import pytest

from kvfold.vllm import plugin


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.0", "none"])
def test_an_untested_release_is_warned_about_and_nothing_registered(monkeypatch, caplog, version):
    def fail():
        raise AssertionError("nothing must be registered")

    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    monkeypatch.setattr(plugin, "_register", fail)
    monkeypatch.setattr(plugin.log, "propagate", True)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert f"this is {version}, so kvfold's models are not registered" in caplog.text


def test_a_failure_is_told_and_not_raised(monkeypatch, caplog):
    def fail():
        raise ImportError("a part has moved")

    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(plugin, "_register", fail)
    monkeypatch.setattr(plugin.log, "propagate", True)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "could not be registered (ImportError: a part has moved)" in caplog.text


def test_the_entry_point_that_vllm_finds_is_this_one():
    found = [
        point for point in entry_points(group="vllm.general_plugins") if point.name == "kvfold"
    ]
    if not found:
        pytest.skip("kvfold was installed before it had this entry point: install it again")
    assert found[0].load() is plugin.register
