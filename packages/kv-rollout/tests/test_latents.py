"""Patches become tokens and come back."""

import pytest
import torch
from kv_core import ShapeError
from kv_rollout import patchify, unpatchify


def test_a_token_is_row_then_column_then_channel():
    # value = channel + 10 * column + 100 * row
    row, column, channel = torch.arange(4), torch.arange(6), torch.arange(3)
    picture = channel[:, None, None] + 10 * column[None, None] + 100 * row[None, :, None]
    tokens = patchify(picture[None, None, :, None].float(), 2)
    assert tokens.shape == (1, 1, 1, 6, 12)
    assert tokens[0, 0, 0, 4].tolist() == [
        220, 221, 222, 230, 231, 232, 320, 321, 322, 330, 331, 332,
    ]  # fmt: skip


def test_unpatchify_is_the_inverse():
    latent = torch.randn(2, 3, 4, 5, 6, 8)
    tokens = patchify(latent, 2)
    assert tokens.shape == (2, 3, 5, 12, 16)
    assert torch.equal(unpatchify(tokens, patch_h=3, patch_w=4, patch=2), latent)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: patchify(torch.zeros(1, 1, 3, 1, 5, 4), 2), "5 x 4 latent pixels"),
        (lambda: patchify(torch.zeros(3, 4, 4), 2), "Ch, F, rows, columns"),
        (
            lambda: unpatchify(torch.zeros(1, 1, 1, 5, 4), patch_h=2, patch_w=3, patch=2),
            "X=6 patches in a frame .2 x 3., got 5",
        ),
        (
            lambda: unpatchify(torch.zeros(1, 1, 1, 6, 5), patch_h=2, patch_w=3, patch=2),
            "multiple of 4",
        ),
        (lambda: unpatchify(torch.zeros(6, 4), patch_h=2, patch_w=3, patch=2), "V, F, X, W"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(call, words: str):
    with pytest.raises(ShapeError, match=words):
        call()
