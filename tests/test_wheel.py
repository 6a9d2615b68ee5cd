"""What `pip install` brings is the whole package: pages, add-ons, weights, sources to compile."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    reason = "hatchling builds the wheel: pip install hatchling"
    builder = pytest.importorskip("hatchling.builders.wheel", reason=reason)
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = builder.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(built)


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file()]
    made = {path for path in files if "__pycache__" in path.parts or path.suffix == ".so"}
    expected = {path.relative_to(ROOT / "src").as_posix() for path in set(files) - made}
    assert held == expected
    for name in (
        "py.typed",
        "serving/page/index.html",
        "evaluation/page/page.html.jinja",
        "addons/smollm2-ced/addon.safetensors",
        "tiny_hybrid/model.safetensors",
        "runtime/quantised_reading.cpp",
    ):
        assert f"kvfold/{name}" in held


ALONE = """
import sys
from pathlib import Path
from typer.testing import CliRunner
import kvfold
from kvfold.cli import build_app
from kvfold.models import load_config
from kvfold.store.shipped import shipped

assert Path(kvfold.__file__).is_relative_to(sys.argv[1]), kvfold.__file__
for command in ([], ["demo"], ["serve"], ["snapshot", "make"]):
    done = CliRunner().invoke(build_app(), [*command, "--help"])
    assert done.exit_code == 0 and "Usage: " in done.output, done.output
assert load_config("tiny-hybrid").num_hidden_layers == 12
print(*shipped())
"""


def test_an_installed_wheel_needs_nothing_of_the_clone(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = sorted(folder.name for folder in (ROOT / "src/kvfold/addons").iterdir())
    assert done.stdout.split() == expected
