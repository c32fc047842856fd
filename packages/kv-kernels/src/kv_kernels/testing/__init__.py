"""FP64 oracles, error budgets and awkward tensors, for tests of kernels here and downstream."""

from kv_kernels.testing.budgets import assert_within_budget, error_budget, largest_error
from kv_kernels.testing.hybrid import (
    assert_picks,
    fill_garbage,
    hybrid_attention_oracle,
    indexer_scores_oracle,
    random_hybrid,
    topk_oracle,
)
from kv_kernels.testing.paged import (
    STORAGES,
    fill_layer,
    make_layer,
    make_step,
    paged_attention_oracle,
    random_paged,
    split_qkv_norm_rope_oracle,
    storage_bytes,
)
from kv_kernels.testing.slots import (
    LAYOUTS,
    attention_oracle,
    exact_values,
    quantized,
    random_layer,
    random_mask,
    random_tensor,
    slot_attention_oracle,
)

__all__ = [
    "LAYOUTS",
    "STORAGES",
    "assert_picks",
    "assert_within_budget",
    "attention_oracle",
    "error_budget",
    "exact_values",
    "fill_garbage",
    "fill_layer",
    "hybrid_attention_oracle",
    "indexer_scores_oracle",
    "largest_error",
    "make_layer",
    "make_step",
    "paged_attention_oracle",
    "quantized",
    "random_hybrid",
    "random_layer",
    "random_mask",
    "random_paged",
    "random_tensor",
    "slot_attention_oracle",
    "split_qkv_norm_rope_oracle",
    "storage_bytes",
    "topk_oracle",
]
