"""Compile the Triton kernels for GPUs that need not be here: python -m kv_kernels.aot 80 90 100.

What is compiled is what a call would launch: arguments come from the same functions, made from
tensors without memory.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kv_core.errors import SpecError
from kv_core.hybrid.keys import KeyFormat, KeyTensors, key_widths
from kv_core.hybrid.rows import RowFormat, RowTensors, row_widths
from torch import Tensor

from kv_kernels.launch import Launch
from kv_kernels.ops.cache import CacheTensors

_BF16, _FP16, _FP32, _INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
_POINTERS = {
    _FP32: "*fp32",
    _FP16: "*fp16",
    _BF16: "*bf16",
    _INT8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(dtype: torch.dtype, N: int, H: int, D: int, layout: str = "NHD") -> CacheTensors:
    shape = (1024, N, H, D) if layout == "NHD" else (1024, H, N, D)
    k, v = (_empty(*shape, dtype=dtype) for _ in range(2))
    if layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    if dtype != _INT8:
        return CacheTensors(k, v)
    scales = (_empty(1024, H, N, dtype=_FP32).transpose(1, 2) for _ in range(2))
    return CacheTensors(k, v, *scales)


def _write(
    dtype: torch.dtype, cache: CacheTensors, Hq: int, rope: str, *, T: int, norm: bool = True
) -> list[Launch]:
    from kv_kernels.ops.paged_write.triton import launch

    H, D = cache.k.shape[2:]
    weight = _empty(D, dtype=dtype) if norm else None
    cos = _empty(4096, D // 2, dtype=_FP32) if rope != "none" else None
    ids = _empty(T, dtype=torch.int64)
    qkv = _empty(T, (Hq + 2 * H) * D, dtype=dtype)
    return [launch(qkv, weight, weight, cos, cos, ids, ids, cache, rope, 1e-6)[1]]


def _split(dtype: torch.dtype, Hq: int, H: int, D: int) -> list[Launch]:
    from kv_kernels.ops.paged_write.triton import launch

    k, v = (_empty(64, 1, H, D, dtype=dtype) for _ in range(2))
    cos, ids = _empty(4096, D // 2, dtype=_FP32), _empty(64, dtype=torch.int64)
    qkv = _empty(64, (Hq + 2 * H) * D, dtype=dtype)
    return [launch(qkv, None, None, cos, cos, ids, None, CacheTensors(k, v), "half", 1e-6)[1]]


def _append(dtype: torch.dtype, cache: CacheTensors) -> list[Launch]:
    from kv_kernels.ops.append.triton import launch

    k = _empty(64, *cache.k.shape[2:], dtype=dtype)
    return [launch(k, k, _empty(64, dtype=torch.int64), cache)]


def _gather(dtype: torch.dtype, cache: CacheTensors) -> list[Launch]:
    from kv_kernels.ops.gather.triton import launch

    ids = torch.int32
    return [launch(cache, _empty(4, 64, dtype=ids), _empty(4, dtype=ids), 1024, dtype)[2]]


def _attend(
    compute: tuple[int, int],
    dtype: torch.dtype,
    cache: CacheTensors,
    G: int,
    *,
    queries: int = 1,
    window: int = -1,
    softcap: float = 0.0,
    splits: int = 1,
    lse: bool = False,
) -> list[Launch]:
    from kv_kernels.ops.paged_decode_attention.triton import launches

    H, D = cache.k.shape[2:]
    B, ids = 32, torch.int32
    return launches(
        _empty(B * queries, H * G, D, dtype=dtype), cache, _empty(B, 512, dtype=ids),
        _empty(B, dtype=ids), _empty(B + 1, dtype=ids), queries, 8192,
        D**-0.5, window, softcap, splits, lse, compute,
    )[2]  # fmt: skip


def _ids(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


def _rows(fmt: RowFormat, outer: int, inner: int, group: int = 64) -> RowTensors:
    widths = row_widths(fmt, 512, 64, group)
    return RowTensors(*(_empty(outer, inner, w, dtype=dtype) for w, dtype in widths.values()))


def _keys(fmt: KeyFormat, width: int = 128) -> KeyTensors:
    widths = key_widths(fmt, width)
    return KeyTensors(*(_empty(1024, 64, w, dtype=dtype) for w, dtype in widths.values()))


def _append_swa(dtype: torch.dtype, fmt: RowFormat, T: int) -> list[Launch]:
    from kv_kernels.ops.append_swa.triton import launch

    rows, held = _empty(T, 512, dtype=dtype), _ids(64, 128)
    return [launch(rows, _ids(T), _ids(T), _rows(fmt, 64, 128), held, fmt, 64)]


def _append_tail(dtype: torch.dtype, T: int) -> list[Launch]:
    from kv_kernels.ops.append_tail.triton import launch

    value, tail = _empty(T, 1024, dtype=dtype), _empty(64, 8, 2, 1024, dtype=_FP32)
    return [launch(value, value, _ids(T), tail)]


def _compress(dtype: torch.dtype, D: int, ratio: int, *, overlap: bool) -> list[Launch]:
    from kv_kernels.ops.compress.triton import launch

    span, width = (2 * ratio, 2 * D) if overlap else (ratio, D)
    value, weight, cos = (_empty(*shape, dtype=dtype) for shape in ((64, width), (D,), (4096, 32)))
    tail = _empty(64, span, 2, width, dtype=_FP32)
    return [
        launch(
            value, value, tail, weight, cos, cos, _ids(64), _ids(64), _ids(64), _ids(32), _ids(32),
            1e-6, ratio, overlap,
        )[1]
    ]  # fmt: skip


def _flush(row: RowFormat, key: KeyFormat | None, T: int) -> list[Launch]:
    from kv_kernels.ops.flush_compression.triton import launch

    entries, keys = _empty(T, 512, dtype=_FP32), _empty(T, 128, dtype=_FP32)
    total = _empty(1, dtype=_FP32) if key is KeyFormat.NVFP4 else None
    pool = _rows(row, 1024, 64)
    if key is None:
        return [launch(entries, None, _ids(T), pool, None, None, row, None, 64)]
    return [launch(entries, keys, _ids(T), pool, _keys(key), total, row, key, 64)]


def _index(
    compute: tuple[int, int],
    dtype: torch.dtype,
    fmt: KeyFormat,
    *,
    columns: int = 512,
    rounds: bool = False,
) -> list[Launch]:
    from kv_kernels.ops.indexer_topk.triton import launches

    total = _empty(1, dtype=_FP32) if fmt is KeyFormat.NVFP4 else None
    return list(
        launches(
            _empty(32, 64, 128, dtype=dtype), _empty(32, 64, dtype=dtype), _keys(fmt), total,
            _ids(32, columns), _ids(32), _ids(32), 512, rounds, fmt,
            compute,
        )[2]
    )  # fmt: skip


def _hybrid(
    compute: tuple[int, int],
    dtype: torch.dtype,
    fmt: RowFormat,
    Hq: int,
    k: int | None = 512,
    *,
    pooled: bool = True,
    group: int = 64,
    T: int = 64,
) -> list[Launch]:
    from kv_kernels.ops.hybrid_attention.triton import launches

    B = 32
    cos = _empty(4096, 32, dtype=_FP32)
    pool, table, vis, picked = _rows(fmt, 1024, 64, group), _ids(B, 32), _ids(T), _ids(T, k or 1)
    return launches(
        _empty(T, Hq, 512, dtype=dtype), _empty(T, 512, dtype=dtype), _empty(Hq, dtype=_FP32),
        _rows(fmt, B, 128, group), _ids(B, 128), _ids(B), _ids(B), _ids(T), _ids(T),
        pool if pooled else None, table if pooled else None, vis if pooled else None,
        picked if pooled and k else None, cos, cos, 512**-0.5, 128, fmt, group, False,
        compute,
    )[2]  # fmt: skip


def variants(architecture: int = 90) -> Iterator[tuple[str, Launch]]:
    """Yield a name and a launch for every kernel, in the formats and sizes that differ most."""
    compute = divmod(architecture, 10)
    attend, index = partial(_attend, compute), partial(_index, compute)
    hybrid = partial(_hybrid, compute)
    calls = {
        "paged_write bf16": _write(_BF16, _cache(_BF16, 16, 8, 128), 32, "half", T=8192),
        "paged_write bf16 to int8": _write(_BF16, _cache(_INT8, 16, 8, 128), 32, "half", T=8192),
        "paged_write fp16 to int8 D80 interleaved": _write(
            _FP16, _cache(_INT8, 16, 3, 80, "HND"), 9, "interleaved", T=1, norm=False
        ),
        "split_qkv_norm_rope fp32 D256": _split(_FP32, 16, 16, 256),
        "append fp16": _append(_FP16, _cache(_FP16, 16, 8, 128)),
        "append bf16 to int8": _append(_BF16, _cache(_INT8, 16, 8, 128)),
        "gather int8 to bf16": _gather(_BF16, _cache(_INT8, 16, 8, 128)),
        "attention bf16 decode": attend(_BF16, _cache(_BF16, 64, 8, 128), 4, splits=4),
        "attention bf16 decode block 16": attend(_BF16, _cache(_BF16, 16, 8, 128, "HND"), 4),
        "attention bf16 over int8 decode": attend(_BF16, _cache(_INT8, 64, 8, 128), 4),
        "attention bf16 over int8 decode, one head, in parts": attend(
            _BF16, _cache(_INT8, 64, 8, 256), 1, splits=4
        ),
        "attention fp16 over int8 D80": attend(
            _FP16, _cache(_INT8, 16, 3, 80), 3, queries=3, window=100, splits=2, lse=True
        ),
        "attention bf16 prefill": attend(_BF16, _cache(_BF16, 64, 8, 128), 4, queries=512,
            splits=0),
        "attention bf16 D256 soft cap": attend(_BF16, _cache(_BF16, 64, 8, 256), 2, softcap=50.0),
        "attention fp32": attend(_FP32, _cache(_FP32, 16, 4, 64), 7, queries=8),
        "append_swa bf16 to fp8": _append_swa(_BF16, RowFormat.FP8, 8192),
        "append_swa fp32": _append_swa(_FP32, RowFormat.FP32, 1),
        "append_tail bf16": _append_tail(_BF16, 8192),
        "compress bf16 ratio 4": _compress(_BF16, 512, 4, overlap=True),
        "compress fp32 ratio 4 D128": _compress(_FP32, 128, 4, overlap=True),
        "compress bf16 ratio 128": _compress(_BF16, 512, 128, overlap=False),
        "flush_compression to fp8 and mxfp4": _flush(RowFormat.FP8, KeyFormat.MXFP4, 1),
        "flush_compression to bf16 and nvfp4": _flush(RowFormat.BF16, KeyFormat.NVFP4, 8192),
        "flush_compression to fp8": _flush(RowFormat.FP8, None, 64),
        "indexer_topk bf16 over mxfp4": index(_BF16, KeyFormat.MXFP4),
        "indexer_topk bf16 over mxfp4 rounded, 64k": index(
            _BF16, KeyFormat.MXFP4, columns=1024, rounds=True
        ),
        "indexer_topk bf16 over nvfp4 rounded": index(_BF16, KeyFormat.NVFP4, rounds=True),
        "indexer_topk fp32": index(_FP32, KeyFormat.FP32),
        "hybrid_attention bf16 over fp8, 64 heads": hybrid(_BF16, RowFormat.FP8, 64),
        "hybrid_attention bf16 over fp8, many tokens": hybrid(_BF16, RowFormat.FP8, 64, T=128),
        "hybrid_attention bf16 over fp8, one group": hybrid(
            _BF16, RowFormat.FP8, 64, group=448, T=128
        ),
        "hybrid_attention bf16 over fp8, 128 heads, all entries": hybrid(
            _BF16, RowFormat.FP8, 128, None
        ),
        "hybrid_attention bf16, 16 heads, window": hybrid(
            _BF16, RowFormat.BF16, 16, pooled=False
        ),
        "hybrid_attention fp32": hybrid(_FP32, RowFormat.FP32, 8),
    }  # fmt: skip
    for name, found in calls.items():
        for part, launch in enumerate(found, 1):
            yield name + (f" part {part}" if len(found) > 1 else ""), launch


def source(launch: Launch) -> tuple[Any, dict[str, Any]]:
    """Return what Triton compiles for a launch, specialised as a call would be, and its options."""
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    given = dict(zip(names, launch.arguments, strict=False)) | launch.options
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, parameter) in enumerate(zip(names, launch.kernel.params, strict=True)):
        value = given[name]
        is_special = not parameter.do_not_specialize
        # the rules of a launch: nothing is a constant, and so is 1
        is_one = isinstance(value, int) and value == 1 and is_special
        if value is None or name in launch.options or is_one:
            signature[name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, Tensor):
            signature[name] = _POINTERS[value.dtype]
            is_divisible = value.storage_offset() * value.element_size() % 16 == 0
        else:
            is_long = isinstance(value, int) and value >= 2**31
            signature[name] = "fp32" if isinstance(value, float) else "i64" if is_long else "i32"
            is_divisible = isinstance(value, int) and value % 16 == 0
        if is_divisible and is_special:
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in launch.options.items() if name not in names}
    return ASTSource(launch.kernel, signature, constants, attributes), options


def main(arguments: list[str] | None = None) -> int:
    """Compile every variant for each architecture, and print one line for each.

    Raises:
        SpecError: Triton was imported as an interpreter, which compiles nothing.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "architectures", nargs="+", type=int, help="80 for compute capability 8.0, and so on"
    )
    architectures = parser.parse_args(arguments).architectures
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_source

    from kv_kernels.device_code import INTERPRETED

    if INTERPRETED.value:
        raise SpecError(
            "TRITON_INTERPRET must not be set to compile, got an interpreter; unset it and start "
            "Python again"
        )
    for architecture in architectures:
        for name, launch in variants(architecture):
            start = time.perf_counter()
            compiled, options = source(launch)
            target = GPUTarget("cuda", architecture, 32)
            built = compile_source(compiled, target=target, options=options)
            print(
                f"sm_{architecture} {name}: {built.metadata.shared} bytes of shared memory, "
                f"{built.metadata.num_warps} warps, {len(built.asm['cubin'])} bytes of code, "
                f"{time.perf_counter() - start:.1f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # newer Tritons warn that it will change
    sys.exit(main())
