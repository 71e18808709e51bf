# SPDX-License-Identifier: Apache-2.0
"""Stands for SGLang's kernel package, of which PyPI has CUDA builds only.

SGLang imports many functions called `*_cpu` from here when it starts and, without AMX, calls two of them: the
hash behind seeded sampling and the bookkeeping of the token pool.  Those are written out; every other one can
be imported and fails when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

_UINT32 = 0xFFFF_FFFF

# Operators that SGLang looks up under `torch.ops.sgl_kernel` while it imports models, and does not call.
_ONLY_LOOKED_UP = (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)


def _absorb(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """One round of MurmurHash3 (32 bit), in int64 so that nothing overflows into a sign."""
    word = (word * 0xCC9E_2D51) & _UINT32
    word = ((word << 15) | (word >> 17)) & _UINT32
    word = (word * 0x1B87_3593) & _UINT32
    state = state ^ word
    state = ((state << 13) | (state >> 19)) & _UINT32
    return (state * 5 + 0xE654_6B64) & _UINT32


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash (64-bit seed, position) of each row with each column to uint32, as the GPU kernel does."""
    seeds = seed.view(torch.int64)
    state = torch.zeros_like(seeds)
    for word in (seeds, seeds >> 32, positions.to(torch.int64)):
        state = _absorb(state, word & _UINT32)
    columns = col_indices.to(torch.int64) & _UINT32
    hashed = _absorb(state.unsqueeze(1), columns.unsqueeze(0))
    hashed = hashed ^ 16  # the length of the key in bytes
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EB_CA6B) & _UINT32
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2_AE35) & _UINT32
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the new cache slots, which lie request after request, into each one's row from start to end."""
    lengths = (end - start).tolist()
    rows = zip(req_pool_indices.tolist(), start.tolist(), out_cache_loc.split(lengths), strict=True)
    for row, begin, slots in rows:
        req_to_token[row, begin : begin + len(slots)] = slots.to(req_to_token.dtype)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Any other kernel for the CPU: there to be imported, not to be called."""
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def absent(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for the CPU")

    return absent


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
for _name in _ONLY_LOOKED_UP:
    _library.define(f"{_name}(Tensor x) -> Tensor")
