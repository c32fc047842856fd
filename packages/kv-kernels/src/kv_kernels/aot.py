"""Compile the Triton kernels for GPUs that need not be here: python -m kv_kernels.aot 80 90 100.

What is compiled is what a call would launch: arguments come from the same functions, made from
tensors without memory.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from kv_core.errors import SpecError
from torch import Tensor

from kv_kernels.launch import Launch
from kv_kernels.ops.cache import CacheTensors

_BF16, _FP16, _FP32, _INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
_POINTERS = {
    _FP32: "*fp32",
    _FP16: "*fp16",
    _BF16: "*bf16",
    _INT8: "*i8",
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
        D**-0.5, window, softcap, splits, lse,
    )[2]  # fmt: skip


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield a name and a launch for every kernel, in the formats and sizes that differ most."""
    calls = {
        "paged_write bf16": _write(_BF16, _cache(_BF16, 16, 8, 128), 32, "half", T=8192),
        "paged_write bf16 to int8": _write(_BF16, _cache(_INT8, 16, 8, 128), 32, "half", T=8192),
        "paged_write fp16 to int8 D80 interleaved": _write(
            _FP16, _cache(_INT8, 16, 3, 80, "HND"), 9, "interleaved", T=1, norm=False
        ),
        "split_qkv_norm_rope fp32 D256": _split(_FP32, 16, 16, 256),
        "append bf16 to int8": _append(_BF16, _cache(_INT8, 16, 8, 128)),
        "gather int8 to bf16": _gather(_BF16, _cache(_INT8, 16, 8, 128)),
        "attention bf16 decode": _attend(_BF16, _cache(_BF16, 64, 8, 128), 4, splits=4),
        "attention bf16 decode block 16": _attend(_BF16, _cache(_BF16, 16, 8, 128, "HND"), 4),
        "attention bf16 over int8 decode": _attend(_BF16, _cache(_INT8, 64, 8, 128), 4),
        "attention fp16 over int8 D80": _attend(
            _FP16, _cache(_INT8, 16, 3, 80), 3, queries=3, window=100, splits=2, lse=True
        ),
        "attention bf16 prefill": _attend(_BF16, _cache(_BF16, 64, 8, 128), 4, queries=512,
            splits=0),
        "attention bf16 D256 soft cap": _attend(_BF16, _cache(_BF16, 64, 8, 256), 2, softcap=50.0),
        "attention fp32": _attend(_FP32, _cache(_FP32, 16, 4, 64), 7, queries=8),
    }  # fmt: skip
    for name, found in calls.items():
        for launch in found:
            suffix = " merge" if len(found) > 1 and launch is found[1] else ""
            yield name + suffix, launch


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
        for name, launch in variants():
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
