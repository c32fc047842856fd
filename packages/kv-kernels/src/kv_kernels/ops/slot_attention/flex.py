"""Attend through compiled FlexAttention, which visits only the blocks that a mask needs.

The storage that is attended has to be finite, also where no query looks: a block that is partly
visible is loaded whole, and 0 times NaN is NaN. Caches that zero what is not valid satisfy this.
"""

import contextlib
import functools
import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from kv_core.errors import CapacityError
from torch import Tensor

from kv_kernels.ops.slot_attention.parts import Mask, Part, empty_output, join, output_stride
from kv_kernels.ops.slot_attention.tiles import MAX_HEAD, MIN_TILE, tile_options
from kv_kernels.registry import Query

Options = tuple[tuple[str, Any], ...]

_compiled: Counter[str] = Counter()  # compilations of each variant


def compiles() -> int:
    """Return how many times this process compiled attention, in all shapes and formats."""
    return _compiled.total()


def rejects_cuda(query: Query) -> str | None:
    """Say why compiled flex cannot run ``query`` on a CUDA device, or None if it can."""
    if query.device != "cuda":
        return f"(CUDA) needs a CUDA device, got {query.device}"
    if query.capability is not None and query.capability < (8, 0):
        return "(CUDA) needs compute capability 8.0 or newer, got {}.{}".format(*query.capability)
    if importlib.util.find_spec("triton") is None:
        return "(CUDA) needs triton, which is not installed"
    for name, size in (("D", query.k_dim), ("Dv", query.v_dim)):
        if not MIN_TILE <= size <= MAX_HEAD:
            return f"(CUDA) takes {name} from {MIN_TILE} to {MAX_HEAD}, got {size}"
    if query.block_size is not None and any(size % MIN_TILE for size in query.block_size):
        return f"(CUDA) needs mask blocks in multiples of {MIN_TILE}, got {query.block_size}"
    return None


def rejects_cpu(query: Query) -> str | None:
    """Say why compiled flex cannot run ``query`` on the CPU, or None if it can."""
    if query.device != "cpu":
        return f"(CPU) needs the CPU, got {query.device}"
    if query.lse:
        return "(CPU) returns no log-sum-exp, because torch compiles none there"
    vectors = torch.backends.cpu.get_cpu_capability()
    if not vectors.startswith("AVX") or sys.platform == "darwin":
        return f"(CPU) needs AVX2 on Linux or Windows, got {vectors} on {sys.platform}"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"(CPU) needs a C++ compiler, and {compiler!r} is not there; set CXX to name one"
    return None


def attend(
    q: Tensor, parts: Sequence[Part], mask: Mask, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Attend ``parts`` from ``q`` with one compiled kernel; see ``reference.attend``.

    Parts that are adjacent slices of one buffer are attended where they are. Others are copied, and
    INT8 memory is dequantised, into a scratch buffer (``parts.scratch_nbytes``).

    Raises:
        CapacityError: torch compiled as many shapes as it is allowed to, or was told not to
            compile at all. Attention is never run uncompiled instead.
    """
    import torch._dynamo  # late, because it takes seconds and the torch row never needs it
    from torch._dynamo.exc import FailOnRecompileLimitHit

    B, Hq, N, D = q.shape
    v_dim = parts[0].v.shape[3]
    assert len(mask.blocks) == 4
    parts = [part for part in parts if part.k.shape[2]]
    if not parts or not q.numel():
        return _nothing(q, v_dim, return_lse)
    k, v = join(parts, q.dtype)
    sizes = (B, Hq, k.shape[1], D, v_dim)
    options = _options(q, k, v, mask.block_size)
    variant = _variant(q.device.type, q.dtype, sizes, mask.block_size, scale, options, return_lse)
    # the number of segments differs from layout to layout and must not count as a new shape
    torch._dynamo.maybe_mark_dynamic(mask.table, [0, 1])
    try:
        with _below_autograd():
            out, lse = variant(q, k, v, mask.table, mask.q_segment, mask.kv_segment, *mask.blocks)
    except FailOnRecompileLimitHit as error:
        raise CapacityError(
            f"flex may not compile for {N} queries and {k.shape[2]} keys: after "
            f"{_compiled[variant.__name__]} compilation(s) for this format and mask block, "
            "torch._dynamo.config.recompile_limit is reached; raise it, pad to fewer lengths, or "
            "use backend='torch'"
        ) from error
    if out.stride() != output_stride(q, v_dim):
        out = empty_output(q, v_dim).copy_(out)
    return out, lse


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """Make tensors look the same in inference mode, outside it and inside a compiled region.

    Otherwise each of these is a recompilation of everything.
    """
    views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(views):
        yield


def _nothing(q: Tensor, v_dim: int, return_lse: bool) -> tuple[Tensor, Tensor]:
    out = empty_output(q, v_dim).zero_()
    shape = q.shape[:3] if return_lse else (0,)
    return out, q.new_full(shape, -torch.inf, dtype=torch.float32)


@functools.cache
def _variant(
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    block_size: tuple[int, int],
    scale: float,
    options: Options,
    return_lse: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make a compiled function for everything that is fixed while lengths and masks change.

    ``device``, ``dtype`` and ``sizes`` only tell variants apart: torch counts compilations, and
    remembers which lengths vary, for each code object, so each variant gets a code object.
    """
    from torch._dynamo import lookup_backend
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    name = f"flex_{_variant.cache_info().misses}"

    def run(
        q: Tensor, k: Tensor, v: Tensor, table: Tensor, q_segment: Tensor, kv_segment: Tensor,
        kv_num_blocks: Tensor, kv_indices: Tensor, full_num_blocks: Tensor, full_indices: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not torch.compiler.is_dynamo_compiling():
            raise CapacityError(
                "flex attention was about to run uncompiled, which takes memory for every score; "
                "enable torch.compile (TORCHDYNAMO_DISABLE, stance) or use backend='torch'"
            )

        def sees(b: Tensor, h: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
            return table[q_segment[q_index], kv_segment[kv_index]]

        block_mask = BlockMask(
            seq_lengths=(q.shape[2], k.shape[2]),
            kv_num_blocks=kv_num_blocks,
            kv_indices=kv_indices,
            full_kv_num_blocks=full_num_blocks,
            full_kv_indices=full_indices,
            q_num_blocks=None,
            q_indices=None,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=block_size,
            mask_mod=sees,
        )
        shared: Any = {"scale": scale, "enable_gqa": True, "kernel_options": dict(options)}
        if not return_lse:
            out = flex_attention(q, k, v, block_mask=block_mask, **shared)
            return out, q.new_empty(0, dtype=torch.float32)
        aux = AuxRequest(lse=True)
        out, stats = flex_attention(q, k, v, block_mask=block_mask, return_aux=aux, **shared)
        return out, stats.lse

    def count(graph: Any, inputs: Any) -> Any:
        _compiled[name] += 1
        return lookup_backend("inductor")(graph, inputs)

    run.__code__ = run.__code__.replace(co_name=name)
    run.__name__ = name
    # fullgraph makes the recompile limit an error; symbolic lengths do not compile on the CPU
    dynamic = False if device == "cpu" else None
    return torch.compile(run, backend=count, fullgraph=True, dynamic=dynamic)


def _options(q: Tensor, k: Tensor, v: Tensor, block_size: tuple[int, int]) -> Options:
    """Choose kernel options for CUDA; the CPU has none."""
    if q.device.type != "cuda":
        return ()
    capability = torch.cuda.get_device_capability(q.device)
    options = tile_options(capability, q.dtype, q.shape[3], v.shape[3], block_size)
    if q.shape[2] % block_size[0] or k.shape[2] % block_size[1]:
        # torch infers this from multiples of 128, and would read past the end of a cut block
        options += (("IS_DIVISIBLE", False),)
    return options
