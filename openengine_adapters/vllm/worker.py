"""What runs inside vLLM's workers: a lease that lasts as long as its session, neither longer nor shorter.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls it by name (`collective_rpc`). Without it
the blocks of a session that nobody fetches would stay until NIXL's lease is over, and those that a slow decode engine
reads would go with it, without a sign to either.
"""

from __future__ import annotations

import time
from typing import Any

EXTENSION = f"{__name__}.KvLeases"
KEEP = "openengine_keep_kv_blocks"
END_LEASE = "openengine_end_kv_lease"


class KvLeases:
    """Changes the leases of a prefill engine."""

    def openengine_keep_kv_blocks(self, request_id: str, seconds: float) -> bool | None:
        """Keep the blocks of a finished prefill that long; False when they are gone, None to ask again.

        The lease begins a step after the output that told of it.
        """
        nixl = _nixl()
        if request_id in nixl._reqs_to_send:
            nixl._reqs_to_send[request_id] = time.perf_counter() + seconds
            return True
        return None if request_id in nixl._reqs_to_process else False

    def openengine_end_kv_lease(self, request_id: str) -> bool:
        """Let the blocks of a finished prefill go with the next step; True when nothing holds them any more.

        Asked again until then: a decode engine's sign of life renews a lease.
        """
        nixl = _nixl()
        if request_id in nixl._reqs_to_send:
            nixl._reqs_to_send[request_id] = 0.0  # the worker frees what is older than now
        return request_id not in nixl._reqs_to_process


def _nixl() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker
