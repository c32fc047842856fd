"""What a Hugging Face decoder asks of a cache, read from its configuration, and who is refused."""

from typing import Any

from kv_core.errors import NoKernelError
from kv_core.spec import KVSpec
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

_LAYER_TYPES = ("full_attention", "sliding_attention")
_ADVICE = "use transformers' own DynamicCache for this model"


def decoder_config(model: PreTrainedModel) -> Any:
    """Return the configuration of the part that generates text.

    Raises:
        NoKernelError: The model is one whose keys and values this cache cannot hold.
    """
    config = model.config.get_text_config(decoder=True)
    if reason := _refusal(model, config):
        raise NoKernelError(f"{type(model).__name__} {reason}; {_ADVICE}")
    return config


def _refusal(model: PreTrainedModel, config: Any) -> str | None:
    if config.is_encoder_decoder:
        return "is an encoder-decoder, and cross-attention has no kernel here"
    if getattr(config, "kv_lora_rank", None):
        return "has multi-head latent attention (kv_lora_rank is set), not keys and values per head"
    for layer, kind in enumerate(get_layer_types_and_kwargs(config)[0]):
        if kind not in _LAYER_TYPES:
            shared = ", one that reuses another layer's cache or has none" * (kind == "dummy")
            return (
                f"has a layer of type {kind!r}{shared} (layer {layer}); only layers of type "
                f"{' and '.join(map(repr, _LAYER_TYPES))} have a kernel here"
            )
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        return f"is spread over the devices {sorted(map(str, devices))}; a cache lives on one"
    return None


def layer_specs(config: Any, *, block_size: int, **formats: Any) -> list[KVSpec]:
    """Return the sizes of each layer's keys and values."""
    return [
        KVSpec(
            kv_heads=getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
            head_dim=getattr(layer, "head_dim", None)
            or layer.hidden_size // layer.num_attention_heads,
            block_size=block_size,
            **formats,
        )
        for layer in config.per_layer_config
    ]


def use_attention(model: PreTrainedModel, config: Any, name: str) -> None:
    """Make the decoder call the attention function ``name``; other parts keep theirs.

    Raises:
        NoKernelError: The model does not call attention through transformers' interface.
    """
    part = [key for key in model.config.sub_configs if getattr(model.config, key, None) is config]
    model.set_attn_implementation({part[0]: name} if part else name)
    if config._attn_implementation != name:
        raise NoKernelError(
            f"{type(model).__name__} does not call attention through transformers' "
            f"AttentionInterface, so it would not use the cache; {_ADVICE}"
        )
