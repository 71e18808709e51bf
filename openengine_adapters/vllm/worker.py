"""What runs inside vLLM's workers: the end of a lease before its time.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls it by name (`collective_rpc`). Without it
the blocks of a session that nobody fetches would stay until NIXL's lease is over; nothing else in vLLM can free them.
"""

from __future__ import annotations

EXTENSION = f"{__name__}.KvLeases"
END_LEASE = "openengine_end_kv_lease"


class KvLeases:
    """Ends the leases of a prefill engine."""

    def openengine_end_kv_lease(self, request_id: str) -> bool:
        """Let the blocks of a finished prefill go with the next step; False while the lease has not begun."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        nixl = get_kv_transfer_group().connector_worker
        if request_id in nixl._reqs_to_send:
            nixl._reqs_to_send[request_id] = 0.0  # the worker frees what is older than now
            return True
        return request_id not in nixl._reqs_to_process
