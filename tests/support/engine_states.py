"""States of engines that do not exist, for what judges and shows them."""

from __future__ import annotations

from typing import Any

from efa_kv.observe.state import EngineState, LastTransfers, PeerView, RailState


def rail(name: str = "nic0", **changes: Any) -> RailState:
    values = dict.fromkeys(RailState.__struct_fields__, 0)
    return RailState(**{**values, "name": name, "provider": "efa", "down": False, **changes})


def peer(state: str, reason: str = "") -> PeerView:
    return PeerView(session=f"10.0.0.9:{len(state)}", state=state, reason=reason)


def state(**changes: Any) -> EngineState:
    values: dict[str, Any] = {
        "session": "10.0.0.1:5000",
        "protocol": "efa",
        "process": 7,
        "version": "0",
        "started": True,
        "control_answered": True,
        "rails": (rail("nic0"), rail("nic1")),
        "peers": (),
        "regions": 1,
        "registered_bytes": 4096,
        "transfers": LastTransfers(),
    }
    return EngineState(**{**values, **changes})
