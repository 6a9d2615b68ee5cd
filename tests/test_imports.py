"""How the package hangs together: imports one way, and nothing heavy until it is used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvfold

PACKAGE = Path(kvfold.__file__).parent
LEVELS = (
    ("errors",),
    ("folder_lock",),
    ("anatomy",),
    ("plan_entries",),
    ("plan_checks",),
    ("plan",),
    ("plan_overrides",),
    ("models", "methods"),
    ("budget",),
    ("presets", "describe"),
    ("runtime",),
    ("fitting", "evaluation", "store", "serving"),
    ("vllm",),
    ("cli",),
    ("__main__",),
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
SAME_LEVEL_ALLOWED = {
    ("fitting", "store"),
    ("fitting", "evaluation"),
    ("evaluation", "store"),
    ("serving", "store"),
}
CALLED_LATER = {("plan", "budget")}
"""`Plan.for_budget` asks a part above it, inside the call: importing plan doesn't bring it."""
HEAVY = ("torch", "transformers", "pydantic", "matplotlib", "typer", "rich", "numpy")


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path, *, at_import=False):
    """The parts of kvfold that a file imports, also inside functions; types alone don't count.

    at_import: leave out what functions import when they are called.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
        if at_import and isinstance(node, ast.FunctionDef):
            node.body = []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            module = node.module or ""
            is_package = module == "kvfold"
            names += [f"kvfold.{a.name}" for a in node.names] if is_package else [module]
    parts = (name.split(".") for name in names)
    return {p[1] for p in parts if p[0] == "kvfold" and len(p) > 1 and not p[1].startswith("_")}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    part = part_of(path)
    if part == "__init__":
        return
    for other in imported_parts(path) - {part}:
        allowed = LEVEL_OF[other] < LEVEL_OF[part] or (part, other) in SAME_LEVEL_ALLOWED
        if (part, other) in CALLED_LATER:
            assert other not in imported_parts(path, at_import=True)
            allowed = True
        assert allowed, f"{part} must not import {other}"


def test_every_part_has_a_level():
    assert {part_of(path) for path in modules()} <= {*LEVEL_OF, "__init__"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_anatomy_names_architectures(path):
    if part_of(path) in ("anatomy", "models"):
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    model_types = {t for family in kvfold.anatomy.FAMILIES for t in family.model_types}
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
    ]
    assert not model_types & set(strings)


def in_new_process(code):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_loads_nothing_heavy():
    code = f"import sys, kvfold; print([m for m in {HEAVY} if m in sys.modules])"
    assert in_new_process(code).strip() == "[]"


def test_the_help_page_needs_no_torch():
    code = (
        "import sys; from kvfold.cli import build_app; build_app();"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    assert in_new_process(code).strip() == "[]"


@pytest.mark.parametrize(
    "order",
    [
        "import kvfold",
        "from kvfold import anatomy",
        "import kvfold.anatomy",
        "from kvfold.anatomy import Anatomy",
        "import kvfold.plan; from kvfold import Plan, preset",
        "import kvfold; kvfold.Plan; import kvfold.anatomy as module; module.Anatomy",
    ],
)
def test_anatomy_is_a_function_and_a_module_in_every_import_order(order):
    code = f"""
{order}
import kvfold
from types import SimpleNamespace
config = SimpleNamespace(model_type="llama", num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, hidden_size=32, vocab_size=97)
described = kvfold.anatomy(config)
from kvfold.anatomy import Anatomy, anatomy
from kvfold import anatomy as public
import kvfold.anatomy as module
assert isinstance(described, Anatomy) and described.num_layers == 3
assert described == anatomy(config) == public(config)
assert module.Anatomy is Anatomy and kvfold.anatomy.FAMILIES
"""
    in_new_process(code)


@pytest.mark.parametrize("name", kvfold.__all__)
def test_every_public_name_is_there(name):
    assert getattr(kvfold, name) is not None
    assert name in dir(kvfold)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kvfold.nonsense  # noqa: B018


def test_the_version_is_the_installed_one():
    text = (PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{kvfold.__version__}"' in text
