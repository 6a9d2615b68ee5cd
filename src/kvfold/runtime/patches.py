"""What an attachment puts in place of a model's own parts, on instances, and takes off again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from kvfold.anatomy import ATTACHMENT_MARK
from kvfold.methods import Source
from kvfold.runtime.adapters import Adapters
from kvfold.runtime.forward import DecoderForward
from kvfold.runtime.stand_ins import attention_forward, last_logits_forward, layer_forward

if TYPE_CHECKING:
    from kvfold.runtime.attach import Attachment


class Patches:
    """Forwards, hooks and low-rank terms of one attachment, in place until `undo`."""

    def __init__(self, attachment: Attachment) -> None:
        self._restore: list[tuple[nn.Module, Any]] = []
        self._hooks: list[Any] = []
        lora, model, decoder = attachment.lora, attachment.model, attachment.decoder
        self._adapters = None if lora is None else Adapters(model, lora)
        self._replace(decoder, _decoder_forward(attachment))
        for fold in attachment.folds:
            self._replace(fold.module, attention_forward(attachment, fold))
        if attachment.split is not None:
            for index, layer in enumerate(decoder.layers):
                self._replace(layer, layer_forward(attachment, index, layer.forward))
            if model is not decoder:
                self._replace(model, last_logits_forward(attachment, model.forward))
        for split in attachment.splits:
            hook = _publish_hidden(attachment, split)
            self._hooks.append(
                decoder.layers[split].register_forward_pre_hook(hook, with_kwargs=True)
            )

    def _replace(self, module: nn.Module, forward: Any) -> None:
        self._restore.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def undo(self) -> None:
        """Give everything back as it was. Does nothing if that has happened already."""
        if self._adapters is not None:
            self._adapters.detach()
        for hook in self._hooks:
            hook.remove()
        for module, before in reversed(self._restore):
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before
        self._hooks, self._restore = [], []


def _decoder_forward(attachment: Attachment) -> Any:
    made = DecoderForward(attachment, attachment.decoder.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **kwargs)

    setattr(forward, ATTACHMENT_MARK, attachment)
    return forward


def _publish_hidden(attachment: Attachment, split: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if attachment.runs(max(0, split - 1)):
            hidden = args[0] if args else kwargs["hidden_states"]
            attachment.publish({Source("hidden", split): hidden})

    return hook
