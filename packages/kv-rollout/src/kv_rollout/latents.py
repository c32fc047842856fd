"""Between latent pixels and tokens: a token is one square patch of one frame of one view."""

from kv_core import ShapeError, check_int
from torch import Tensor


def patchify(latent: Tensor, patch: int) -> Tensor:
    """Cut every frame into square patches, one token each.

    Args:
        latent: ``[B, V, Ch, F, rows, columns]``; both sides are multiples of ``patch``.
        patch: Side of a patch, in latent pixels.

    Returns:
        ``[B, V, F, X, W]`` with ``W = patch * patch * Ch``. Patches run row by row; inside a token
        the order is row, column, channel, the channel fastest.

    Raises:
        ShapeError: The latent is not 6-D, or a side is not a multiple of the patch.
    """
    check_int("patch", patch, minimum=1)
    if latent.ndim != 6:
        raise ShapeError(f"latent must be [B, V, Ch, F, rows, columns], got {list(latent.shape)}")
    B, V, Ch, F, rows, columns = latent.shape
    if rows % patch or columns % patch:
        raise ShapeError(
            f"a frame of {rows} x {columns} latent pixels does not divide into patches of "
            f"{patch} x {patch}; crop or pad it to multiples of {patch}"
        )
    cut = latent.reshape(B, V, Ch, F, rows // patch, patch, columns // patch, patch)
    return cut.permute(0, 1, 3, 4, 6, 5, 7, 2).reshape(B, V, F, -1, patch * patch * Ch)


def unpatchify(tokens: Tensor, *, patch_h: int, patch_w: int, patch: int) -> Tensor:
    """Put patches back together; the inverse of `patchify`.

    Args:
        tokens: ``[B, V, F, X, W]``; ``X = patch_h * patch_w``, W is a multiple of ``patch ** 2``.
        patch_h: Patches in a column of a frame.
        patch_w: Patches in a row of a frame.
        patch: Side of a patch, in latent pixels.

    Returns:
        ``[B, V, Ch, F, patch_h * patch, patch_w * patch]``.

    Raises:
        ShapeError: X or W does not fit the patches.
    """
    if tokens.ndim != 5:
        raise ShapeError(f"tokens must be [B, V, F, X, W], got {list(tokens.shape)}")
    B, V, F, X, W = tokens.shape
    if patch_h * patch_w != X:
        raise ShapeError(
            f"tokens must have X={patch_h * patch_w} patches in a frame "
            f"({patch_h} x {patch_w}), got {X}"
        )
    if W % (patch * patch):
        raise ShapeError(
            f"a token of width {W} is not a patch of {patch} x {patch}: "
            f"its width must be a multiple of {patch * patch}"
        )
    grid = tokens.reshape(B, V, F, patch_h, patch_w, patch, patch, W // (patch * patch))
    return grid.permute(0, 1, 7, 2, 3, 5, 4, 6).reshape(
        B, V, W // (patch * patch), F, patch_h * patch, patch_w * patch
    )
