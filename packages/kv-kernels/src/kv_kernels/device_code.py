"""Pieces that the Triton kernels share. They mirror ``kv_core.codecs`` bit for bit.

In Triton's interpreter BF16 arithmetic is wrong, casts to BF16 truncate, and casts from it lose
subnormal numbers, so there everything is computed in FP32 and both casts are done by hand.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(type(tl.cdiv).__name__ == "InterpretedFunction")

_ROUND = tl.constexpr(1.5 * 2**23)  # adding it leaves no place for a fraction
_LOG2_E = tl.constexpr(1.4426950408889634)
_INF = tl.constexpr(float("inf"))
_E4M3_NAN = tl.constexpr(0x7F)


@triton.jit
def widen(x):
    """Convert ``x`` to FP32, which is exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round FP32 ``x`` to a floating dtype, halves to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def operand(x, dtype: tl.constexpr):
    """Make INT8 codes, or elements of ``dtype``, a side of a matrix product in ``dtype``."""
    if INTERPRETED:
        return widen(x)
    else:
        return x.to(dtype)


@triton.jit
def row_sum(x):
    """Add up each row pair by pair.

    The order of additions depends on the row's length alone. That of ``tl.sum`` depends on how the
    tile lies in registers, so on its height, on the warps and on what the kernel does afterwards.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    if columns > 1:
        pairs = tl.reshape(x, [rows, columns // 2, 2])
        return row_sum(tl.sum(pairs, axis=2))
    else:
        return tl.reshape(x, [rows])


@triton.jit
def inverse_rms(x, eps, D: tl.constexpr):
    """Return ``1 / sqrt(mean(x^2) + eps)`` of each row; padding has to be zero."""
    total = row_sum(x * x)
    mean = tl.div_rn(total, tl.full(total.shape, D, tl.float32))
    return tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent to FP32 accuracy, small arguments included."""
    square = x * x
    # least squares on Chebyshev nodes below 0.625, relative error 5e-9
    near = -0.05374308 + square * (0.02064935 + square * -0.00571579)
    near = -0.33333284 + square * (0.13331485 + square * near)
    near = x + x * square * near
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2 * _LOG2_E)) + 1.0)
    far = tl.where(x < 0, -far, far)
    return tl.where(tl.abs(x) < 0.625, near, far)


# --- FP8 and FP4: e4m3, E2M1 and power-of-two scales, all by their bits


@triton.jit
def round_bf16(x):
    """Round to BF16 and return FP32."""
    return widen(round_to(widen(x), tl.bfloat16))


@triton.jit
def power_byte(largest, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr):
    """Return the UE8M0 byte of the smallest power of two that makes the largest code enough.

    Args:
        largest: Positive, normal FP32.
        MANTISSA: Bits behind the leading one of the largest code, as in FP32.
        EXPONENT: Power of two that the largest code is below.
    """
    bits = largest.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32) + (1 - EXPONENT)


@triton.jit
def decode_ue8m0(byte):
    """Return ``2^(byte - 127)``; 255 is NaN."""
    byte = byte.to(tl.int32)
    bits = tl.maximum(byte << 23, 0x400000)  # byte 0 is below the normal numbers
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _inverse_power(byte):
    """Return ``2^(127 - byte)`` for a byte from 1 to 253."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _with_sign(x, bits):
    """Return ``x``, which is not negative, with the highest of INT32 ``bits`` as its sign."""
    return (x.to(tl.int32, bitcast=True) | (bits & -(2**31))).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x):
    """Return the code of each element within 448, halves to even; NaN has one code."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # the last place of 2^14 is 2^-9, that of the subnormal codes
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    code = tl.where(size < 121 << 23, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(x == x, code, _E4M3_NAN).to(tl.uint8)


@triton.jit
def decode_e4m3(code, HAS_FP8: tl.constexpr):
    """Return the FP32 value of each code.

    Args:
        code: UINT8.
        HAS_FP8: Whether the device converts by itself.
    """
    if HAS_FP8 and not INTERPRETED:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.int32)
        size = bits & 0x7F
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
        value = tl.where(size == _E4M3_NAN, float("nan"), value)
        return _with_sign(value, bits << 24)


@triton.jit
def encode_e2m1(x):
    """Return the 4-bit code of each element as INT32, saturating; zero is never negative."""
    size = tl.abs(x)
    # a half rounds to the neighbour whose code is even, so every other border is inclusive
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
    code += (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return tl.where((x < 0) & (code > 0), code + 8, code)


@triton.jit
def decode_e2m1(code):
    """Return the FP32 value of each 4-bit INT32 code."""
    size = code & 7
    normal = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return _with_sign(value, code << 28)


@triton.jit
def quantize_fp8(x):
    """Return e4m3 codes, and the UE8M0 byte of each group as INT32.

    Args:
        x: ``[rows, groups, channels]`` FP32, rounded to BF16; padding has to be zero.
    """
    is_finite = tl.abs(x) < _INF
    largest = tl.max(tl.where(is_finite, tl.abs(x), 0.0), axis=2)
    byte = power_byte(tl.maximum(largest, 1e-4), 0x600000, 9)
    unit = x * _inverse_power(byte)[:, :, None]
    unit = tl.minimum(tl.maximum(unit, -448.0), 448.0)
    return encode_e4m3(tl.where(is_finite, unit, float("nan"))), byte


@triton.jit
def _finite_groups(x):
    """Return which groups of ``[rows, groups, channels]`` have nothing but finite elements."""
    return tl.max((tl.abs(x) < _INF).to(tl.int32) ^ 1, axis=2) == 0


@triton.jit
def _mx_byte(largest):
    """Return the UE8M0 byte of groups of MXFP4 with these largest sizes, all finite."""
    return power_byte(tl.maximum(largest, 6 * 2.0**-126), 0x400000, 3)


@triton.jit
def _nv_code(largest, total):
    """Return the e4m3 scale of groups of NVFP4 with these largest sizes, all finite."""
    wanted = tl.div_rn(largest, tl.full(largest.shape, 6.0, tl.float32) * total)
    return encode_e4m3(tl.minimum(tl.maximum(wanted, 0.001953125), 448.0))


@triton.jit
def quantize_mxfp4(x):
    """Return E2M1 codes as INT32, and the UE8M0 byte of each group of 32 as INT32.

    Args:
        x: ``[rows, groups, 32]`` FP32, rounded to BF16; padding has to be zero.
    """
    is_finite = _finite_groups(x)
    byte = _mx_byte(tl.where(is_finite, tl.max(tl.abs(x), axis=2), 1.0))
    unit = tl.where(is_finite[:, :, None], x * _inverse_power(byte)[:, :, None], 0.0)
    return encode_e2m1(unit), tl.where(is_finite, byte, 255)


@triton.jit
def quantize_nvfp4(x, total):
    """Return E2M1 codes as INT32, and the e4m3 scale of each group of 16 as UINT8.

    Args:
        x: ``[rows, groups, 16]`` FP32, rounded to BF16; padding has to be zero.
        total: The scale of everything, a scalar.
    """
    is_finite = _finite_groups(x)
    largest = tl.where(is_finite, tl.max(tl.abs(x), axis=2), 0.0)
    stored = _nv_code(largest, total)
    unit = decode_e4m3(stored, False) * total
    unit = tl.div_rn(x, tl.broadcast_to(unit[:, :, None], x.shape))
    unit = tl.where(is_finite[:, :, None], unit, 0.0)
    return encode_e2m1(unit), tl.where(is_finite, stored, _E4M3_NAN).to(tl.uint8)


@triton.jit
def pack_nibbles(codes):
    """Return ``[rows, groups * channels / 2]`` UINT8, the even channel low, of INT32 codes."""
    rows: tl.constexpr = codes.shape[0]
    pairs: tl.constexpr = codes.shape[1] * codes.shape[2] // 2
    low, high = tl.split(tl.reshape(codes, [rows, pairs, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def store_stored_rows(
    rows, is_row, slot, codes, rope, scale, N,
    codes_p, codes_n, rope_p, rope_n, scale_p, scale_n,
    W: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Encode rows of a hybrid cache and store row i at ``slot[i]``.

    Args:
        rows: ``[rows]`` pointers to the first channels.
        is_row: ``[rows]`` which are stored; others are not even read.
        slot: ``[rows]`` INT64.
        codes: ``[P, N, W]`` FP32, BF16 or UINT8.
        rope: ``[P, N, R]`` or None.
        scale: ``[P, N, SCALES]`` UINT8 or None.
        N: Rows of a block.
    """
    block = slot // N
    offset = slot - block * N
    g = tl.arange(0, BLOCK_G)
    j = tl.arange(0, BLOCK_J)
    channel = (g * GROUP)[:, None] + j[None, :]
    inside = (channel < W) & (j < GROUP)[None, :]
    inside = is_row[:, None, None] & inside[None, :, :]
    x = widen(tl.load(rows[:, None, None] + channel[None, :, :], mask=inside, other=0.0))
    target = codes + block * codes_p + offset * codes_n
    target = target[:, None, None] + channel[None, :, :]
    if scale is None:
        tl.store(target, round_to(x, codes.dtype.element_ty), mask=inside)
    else:
        coded, byte = quantize_fp8(round_bf16(x))
        tl.store(target, coded, mask=inside)
        byte = tl.where((g * GROUP < W)[None, :], byte, 0).to(tl.uint8)
        at = scale + block * scale_p + offset * scale_n
        tl.store(
            at[:, None] + g[None, :], byte, mask=is_row[:, None] & (g < SCALES)[None, :]
        )  # fmt: skip
    if rope is not None:
        r = tl.arange(0, BLOCK_R)
        inside_r = is_row[:, None] & (r < R)[None, :]
        x = widen(tl.load(rows[:, None] + (W + r)[None, :], mask=inside_r, other=0.0))
        at = rope + block * rope_p + offset * rope_n
        tl.store(at[:, None] + r[None, :], round_to(x, rope.dtype.element_ty), mask=inside_r)


# --- a few numbers as integers


@triton.jit
def nan_max(a, b):
    """Return the larger of two numbers, or NaN if one is; for ``tl.reduce`` too."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def small_round(x):
    """Round FP32 within 2^22 to INT32, halves to even; what is not finite becomes anything."""
    return (x + _ROUND).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _round_e2m1(x):
    """Round FP32 ``x`` within 6 to the nearest value of E2M1, halves to even."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 127 << 23)
    # its last place is that of the codes around x
    shift = ((exponent + (22 << 23)) | 0x400000).to(tl.float32, bitcast=True)
    return (x + shift) - shift


@triton.jit
def _group_sizes(x):
    """Return the largest size of each group, as bits: they have the order of the sizes."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)


@triton.jit
def round_mxfp4(x):
    """Return what codes and scales of ``quantize_mxfp4`` decode to, without making them."""
    bits = _group_sizes(x)
    is_finite = bits < 0x7F800000
    largest = tl.where(is_finite, bits, 0).to(tl.float32, bitcast=True)
    byte = _mx_byte(largest)
    scale = decode_ue8m0(tl.where(is_finite, byte, 255))
    return _round_e2m1(x * _inverse_power(byte)[:, :, None]) * scale[:, :, None]


@triton.jit
def round_nvfp4(x, total):
    """Return what ``quantize_nvfp4`` stands for, but for the factor ``total``."""
    bits = _group_sizes(x)
    is_finite = bits < 0x7F800000
    largest = tl.where(is_finite, bits, 0).to(tl.float32, bitcast=True)
    scale = decode_e4m3(_nv_code(largest, total), False)
    unit = scale * total
    unit = tl.div_rn(x, tl.broadcast_to(unit[:, :, None], x.shape))
    unit = _round_e2m1(tl.minimum(tl.maximum(unit, -6.0), 6.0))
    return unit * tl.where(is_finite, scale, float("nan"))[:, :, None]
