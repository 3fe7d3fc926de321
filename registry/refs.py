"""What a name was before something is made for it, and the change of it afterwards."""

from __future__ import annotations

from dsec_layers.digest import Digest
from dsec_layers.errors import Conflict, DsecError, NotFound
from dsec_layers.registry.objects import hold, load_layer, load_object
from dsec_layers.store.base import Store

__all__ = ["current", "layer_before", "swap_ref"]


def current(store: Store, name: str) -> Digest | None:
    """What ``name`` is now; None if it is nothing."""
    try:
        return store.get_ref(name).digest
    except NotFound:
        return None


def layer_before(store: Store, before: Digest | None) -> Digest | None:
    """``before`` if it names a layer that can be read: its chunks are looked up first."""
    if before is None:
        return None
    try:
        load_layer(store, before)
    except DsecError:
        return None
    return before


def swap_ref(store: Store, name: str, digest: Digest, before: Digest | None) -> None:
    """Point ``name`` at ``digest`` if it still is what it was when the work began. Conflict if another build of the same name was faster."""
    if before == digest and current(store, name) == digest:
        return
    hold(store, load_object(store, digest))  # touched, so that a collector running beside leaves it alone until the ref stands
    store.touch(digest)
    try:
        store.set_ref(name, digest, expected=before)
    except Conflict as error:
        if current(store, name) == digest:
            return
        raise Conflict(
            f"{name} was changed by somebody else while this build ran; the layer is stored as {digest}",
            hint="build again to replace theirs; nothing needs to be stored twice",
        ) from error
