"""A base model spread over the processes of a fit, each with a part of every layer's weights.

For models that one device has no room for. PyTorch's `fully_shard` (FSDP) gathers a layer's
weights when it runs and lets them go after it. The base is frozen, so there are no gradients or
optimiser states of it to spread, and an add-on is small and whole on every process. Embeddings,
last norm and head stay whole too: they don't grow with depth, and losses use the head in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

from kvfold.anatomy import text_decoder


def shard(model: Any, device: str) -> None:
    """Spread the weights of the decoder's layers over all processes of the default group.

    model: on the CPU or on `device`, which every process names as its own; what is whole moves
    there. All processes must call this, and from then on run the model at the same times.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = torch.device(device).type
    mesh = init_device_mesh(kind, (distributed.get_world_size(),))
    model.requires_grad_(False)
    for layer in text_decoder(model).layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for _, tensor in own:
            if not _is_spread(tensor):
                tensor.data = tensor.data.to(device)


def is_sharded(model: Any) -> bool:
    """Whether the model's layers are spread over processes."""
    return any(_is_spread(weight) for weight in text_decoder(model).layers.parameters())


@contextmanager
def whole(model: Any, layer: int) -> Iterator[None]:
    """Hold all weights of one layer (0-based) here, for work outside the layer's own forward.

    All processes must come in together.
    """
    module = text_decoder(model).layers[layer]
    if not hasattr(module, "unshard"):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def gathered(weight: Tensor) -> Tensor:
    """A weight with all its parts; all processes must ask together."""
    return weight.full_tensor() if _is_spread(weight) else weight  # type: ignore[attr-defined]


def _is_spread(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")
