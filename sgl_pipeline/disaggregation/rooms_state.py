"""A server's rooms as an operator sees them, from either side."""

from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.prefill_rooms import PrefillRooms
from sgl_pipeline.pipeline.pipeline_state import RoomsState
from sgl_pipeline.scheduling.kv_tier import KvTier


def prefill_state(rooms: PrefillRooms, tier: KvTier) -> RoomsState:
    """The state of a prefill server."""
    counts = rooms.counts
    return RoomsState(
        mode="prefill",
        num_peers=rooms.num_peers,
        bootstrap_requests=rooms.num_unwanted,
        transfer_requests=tier.held.num_rooms,
        wanted_requests=rooms.num_rooms - rooms.num_unwanted,
        held_pages=tier.held.num_pages,
        transferred=counts.num_transferred,
        transfer_s=counts.transfer_s,
        bootstrap_failed=counts.num_bootstrap_failed,
        transfer_failed=counts.num_transfer_failed,
    )


def decode_state(rooms: DecodeRooms, tier: KvTier) -> RoomsState:
    """The state of a decode server."""
    counts, loaded = rooms.counts, tier.arrivals.counts
    num_transfers = tier.arrivals.num_loading + tier.arrivals.num_found
    return RoomsState(
        mode="decode",
        num_peers=rooms.num_peers,
        bootstrap_requests=rooms.num_rooms - num_transfers,
        transfer_requests=num_transfers,
        promised_pages=tier.loads.promised_pages,
        pending_pages=tier.arrivals.num_pending_pages,
        transferred=counts.num_transferred,
        transfer_s=counts.transfer_s,
        bootstrap_s=counts.bootstrap_s,
        alloc_s=counts.alloc_s,
        bootstrap_failed=counts.num_bootstrap_failed,
        transfer_failed=counts.num_transfer_failed,
        computed_here=counts.num_computed_here,
        loaded_pages=loaded.loaded_pages,
        loaded_bytes=loaded.loaded_bytes,
        load_s=loaded.load_s,
    )
