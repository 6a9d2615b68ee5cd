"""From a model and its add-ons to lanes, one set of weights for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from kvfold.errors import RequestError
from kvfold.runtime.attach import AddOnLike, Attachment, attach
from kvfold.runtime.sharing import sharing_weights
from kvfold.serving.lane import Lane, LaneSettings
from kvfold.serving.plain_rows import folding_nothing
from kvfold.serving.prefix import PrefixCaches


class StoreOf(Protocol):
    """Gives the store of what an attachment makes; plain: see `StoredPrefixes`."""

    def __call__(self, attachment: Attachment, *, plain: bool = False) -> PrefixCaches:
        """One of an attachment's own."""


def make_lanes(
    model: Any,
    tokenizer: Any,
    addons: Mapping[str, AddOnLike],
    *,
    plain: str | None,
    settings: LaneSettings,
    store_of: StoreOf | None = None,
    store_plain: bool = False,
) -> dict[str, Lane]:
    """Lanes by name: one for each add-on, and one for the model without any.

    plain: the name of the latter, None to leave it out. store_plain: whether its caches are kept
    too, where there is a store. `close_lanes` takes the add-ons off again.
    Raises what `attach` does, and `RequestError` for a name twice or no lane at all.
    """
    if plain in addons or not (addons or plain):
        raise RequestError(
            "every served model needs a name of its own, and there must be one; got add-ons "
            f"{sorted(addons)} and the plain model as {plain!r}"
        )
    made: dict[str, Lane] = {}
    if plain is not None:
        store = None
        if store_of is not None and store_plain:
            store = store_of(folding_nothing(model), plain=True)
        made[plain] = Lane(plain, model, tokenizer, store=store, settings=settings)
    for name, addon in addons.items():
        own = model if not made else sharing_weights(model)
        # With codes kept a stored prompt need not hold what layers make of them.
        attachment = attach(own, addon, keep_codes=store_of is not None)
        store = None if store_of is None else store_of(attachment)
        made[name] = Lane(name, own, tokenizer, attachment, store, settings)
    return made


def close_lanes(lanes: Iterable[Lane]) -> None:
    """Detach every add-on, once what its store still writes is written.

    No engine may run on the lanes any more: it would step rows of a model without its add-on.
    """
    for lane in lanes:
        if lane.store is not None:
            lane.store.close()
        if lane.attachment is not None:
            lane.attachment.detach()
