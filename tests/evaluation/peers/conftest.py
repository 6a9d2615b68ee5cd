"""A tiny model on disk, and peers that run it in this very environment: only `plain` needs no more.

The environment with kvpress is found by KVFOLD_PEERS_ENV, or where `kvfold evaluate --peers` keeps
it; tests that need it are slow, and say so when it is not there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.evaluation.peers.budget import Budget
from kvfold.evaluation.peers.environment import PINNED, PeerEnvironment, default_folder
from kvfold.evaluation.peers.peer import Peer
from kvfold.evaluation.peers.spec import parse_peers


@pytest.fixture(scope="session")
def tiny(tiny_model: Any, byte_tokenizer: Any) -> Any:
    """A tiny Llama of 261 tokens whose texts have no end."""
    model = tiny_model("llama", vocab_size=len(byte_tokenizer), max_position_embeddings=2048)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def source(tiny: Any, byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("peers") / "tiny"
    tiny.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def here() -> PeerEnvironment:
    """This environment, which has no kvpress."""
    return PeerEnvironment.of(Path(sys.executable))


@pytest.fixture(scope="session")
def peer_of(tiny: Any, source: Path, here: PeerEnvironment) -> Callable[..., Peer]:
    """`peer_of("plain")`: the peer of that name on the tiny model, in this environment."""

    def make(name: str, environment: PeerEnvironment = here, folder: Path = source) -> Peer:
        (spec,) = parse_peers(name)
        return Peer(spec, environment, str(folder), None, Budget(spec, anatomy(tiny)))

    return make


@pytest.fixture(scope="session")
def plain_peer(peer_of: Callable[..., Peer], tiny: Any) -> Iterator[Any]:
    """The plain peer's model, opened once: loading takes seconds."""
    with peer_of("plain").open(tiny, lambda _: None) as model:
        yield model


@pytest.fixture(scope="session")
def kvpress_environment() -> PeerEnvironment:
    """The environment with kvpress, or a skip."""
    folder = Path(os.environ.get("KVFOLD_PEERS_ENV", default_folder()))
    python = folder / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no peers' environment in {folder}; make it with kvfold evaluate --peers")
    found = PeerEnvironment.of(python)
    if any(found.versions.get(name) != version for name, version in PINNED.items()):
        pytest.skip(f"the peers' environment in {folder} has {dict(found.versions)}, not {PINNED}")
    return found


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    """Two rows of 60 tokens."""
    return torch.randint(5, 261, (2, 60), generator=torch.Generator().manual_seed(2))
