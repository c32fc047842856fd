"""The attention and mask functions that Hugging Face models call under the name "kv"."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kv_core.errors import NoKernelError
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from kv_kernels.integrations.batch import Batch

NAME = "kv"
_REFUSED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "indices": "sparse attention indices",
    "block_indices": "sparse attention indices",
}


@dataclass(frozen=True, eq=False)
class PaddingMask:
    """What a model's mask says, without the ``[B, 1, Q, S]`` tensor that would spell it out.

    Attributes:
        tokens: ``[B, S]`` bool, False for padding, over stored and new columns; None for no
            padding.
        window: Tokens that a query sees, itself included; None for all. Some models tell it to
            the mask only, so what a layer says does not count where there is a mask.
        is_causal: Whether it is causal, padding and the window aside.
        arguments: What ``transformers`` makes dense masks from.
    """

    tokens: Tensor | None
    window: int | None
    is_causal: bool
    arguments: dict[str, Any]

    @functools.cached_property
    def dense(self) -> Tensor | None:
        """The mask as SDPA takes it; made when first asked for, which a paged cache never does."""
        mask: Tensor | None = sdpa_mask(**self.arguments)
        return mask


def padding_mask(
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **others: Any,
) -> PaddingMask:
    """Hand over a model's 2D mask as it is: the mask function of "kv"."""
    arguments = {
        "attention_mask": attention_mask,
        "local_size": local_size,
        "allow_is_causal_skip": allow_is_causal_skip,
        "use_vmap": use_vmap,
        **others,
    }
    # transformers adds its own rules to a causal mask (images that see themselves, say) with these
    is_causal = allow_is_causal_skip and not use_vmap
    return PaddingMask(attention_mask, local_size, is_causal, arguments)


class PendingKeys(Tensor):
    """New keys of one layer on their way from the cache to attention, which stores them.

    A model has no business with them in between: every operation but a look at their shape, dtype
    or device is refused.

    Attributes:
        rows: ``[B, H, Q, D]`` the keys.
        batch: Whose keys they are.
        layer: Index of the layer.
    """

    rows: Tensor
    batch: "Batch"
    layer: int

    @classmethod
    def of(cls, keys: Tensor, batch: "Batch", layer: int) -> "PendingKeys":
        """Wrap keys; nothing is copied."""
        pending = keys.as_subclass(cls)
        pending.rows, pending.batch, pending.layer = keys, batch, layer
        return pending

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer for shape, dtype and device; refuse everything else by its name."""
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "size", "dim") and isinstance(args[0], PendingKeys):
            return func(args[0].rows, *args[1:], **(kwargs or {}))
        raise NoKernelError(
            f"the model calls {name} on keys after it gave them to the cache, so they are not what "
            f'the attention function "{NAME}" expects; use transformers\' own DynamicCache for '
            "this model"
        )

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Return shape and layer."""
        return f"PendingKeys({list(self.rows.shape)}, layer={self.layer})"


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PaddingMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store a layer's new keys and values and attend all it has: the attention function of "kv".

    Keys that did not come from a ``PagedCache`` (another cache, or none) are attended by
    transformers' own "sdpa".

    Args:
        module: The layer that calls, named in refusals.
        query: ``[B, Hq, Q, D]``, rotated.
        key: What ``PagedCache.update`` returned.
        value: ``[B, H, Q, D]``.
        attention_mask: What ``padding_mask`` returned, or None.
        dropout: Must be 0.
        scaling: Factor of the scores, ``D ** -0.5`` by default.
        sliding_window: Keys that a query sees, itself included, where there is no mask.
        softcap: Bound of the scores.
        kwargs: Others that a model passes; those that would change attention are refused.

    Returns:
        ``[B, Q, Hq, D]``, zeros for padding, and None instead of attention weights.

    Raises:
        NoKernelError: The layer asks for something that has no kernel.
        SpecError: The mask does not fit what is stored.
    """
    if not isinstance(key, PendingKeys):
        if softcap is not None:
            raise NoKernelError(
                f"{type(module).__name__} asks for {softcap=} without a PagedCache, which SDPA "
                'does not have; pass cache=PagedCache(model), or set_attn_implementation("eager")'
            )
        dense = attention_mask.dense if isinstance(attention_mask, PaddingMask) else attention_mask
        out: tuple[Tensor, None] = AttentionInterface()["sdpa"](
            module, query, key, value, dense,
            dropout=dropout, scaling=scaling, sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
        return out
    if reason := _refusal(module, attention_mask, dropout, kwargs):
        raise NoKernelError(f"{type(module).__name__} {reason}")
    assert not isinstance(attention_mask, Tensor)
    window = sliding_window if attention_mask is None else attention_mask.window
    found = key.batch.attend(
        key.layer, query, key.rows, value,
        mask=None if attention_mask is None else attention_mask.tokens,
        cu_seqlens=kwargs.get("cu_seq_lens_q"),
        scale=scaling,
        window_left=-1 if window is None else window - 1,
        softcap=softcap or 0.0,
    )  # fmt: skip
    return found, None


def _refusal(
    module: torch.nn.Module, mask: object, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    own_cache = "use transformers' own DynamicCache for this model"
    for name, meaning in _REFUSED.items():
        if kwargs.get(name) is not None:
            return f"asks for {meaning} ({name}), which has no kernel here; {own_cache}"
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        return f"is not causal, and a paged cache holds the past; {own_cache}"
    if dropout:
        return f"asks for dropout {dropout}, which has no kernel here; call model.eval()"
    if kwargs.get("output_attentions"):
        return (
            "asks for attention weights, which are never formed; leave output_attentions out, or "
            'use set_attn_implementation("eager") with a DynamicCache'
        )
    if isinstance(mask, PaddingMask) and not mask.is_causal:
        return f"has a mask that is not causal with padding and a window; {own_cache}"
    if mask is not None and not isinstance(mask, PaddingMask):
        return (
            f"was given a mask {list(mask.shape) if isinstance(mask, Tensor) else mask!r} of its "
            "own; pass the 2D attention_mask of the tokenizer instead"
        )
    return None
