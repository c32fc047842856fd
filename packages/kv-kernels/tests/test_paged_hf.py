"""The paged operations against models and attention that others wrote."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat, KVSpec
from kv_kernels import gather, paged_decode_attention, paged_write
from kv_kernels.testing import (
    STORAGES,
    assert_within_budget,
    make_layer,
    make_step,
    paged_attention_oracle,
    random_paged,
)
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.functional import scaled_dot_product_attention

CHUNKS = [17, 20, 1, 1, 1, 1, 1]
OTHERS = [5, 1, 30, 1, 0, 1, 3]  # what a second sequence of the same batch does meanwhile
MODELS = {
    "D 16, blocks of 3": {"D": 16, "N": 3, "H": 1},
    "D 24, blocks of 4": {"D": 24, "N": 4, "H": 2},
    "D 80, blocks of 5": {"D": 80, "N": 5, "H": 4},
    "D 24, blocks of 16": {"D": 24, "N": 16, "H": 1},
    "D 16, one block a sequence": {"D": 16, "N": 42, "H": 4},
}


class Qwen:
    """Hugging Face's Qwen3 attention with weights that show a missing norm or a flat softmax."""

    def __init__(self, D: int, H: int) -> None:
        qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
        torch.manual_seed(0)
        config = qwen3.Qwen3Config(
            vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=H, head_dim=D, rms_norm_eps=1e-6,
            max_position_embeddings=128, attention_bias=False, attn_implementation="eager",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )  # fmt: skip
        self.layer = qwen3.Qwen3Attention(config, 0).eval().requires_grad_(False)
        for norm in (self.layer.q_norm, self.layer.k_norm):
            norm.weight.add_(0.3 * torch.randn(D))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(self.layer, name).weight.mul_(7)
        self.rope = qwen3.Qwen3RotaryEmbedding(config)
        self.config = config

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rope(torch.zeros(1), positions[None])
        return cos[0], sin[0]

    def qkv(self, x: torch.Tensor) -> torch.Tensor:
        names = ("q_proj", "k_proj", "v_proj")
        return torch.cat([getattr(self.layer, name)(x) for name in names], -1)

    def run(
        self, x: torch.Tensor, chunks: list[int]
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Return the outputs of each chunk of ``x``, and the keys and values of all."""
        from transformers import DynamicCache

        cache, outs, done = DynamicCache(), [], 0
        for count in chunks:
            positions = torch.arange(done, done + count)
            mask = torch.arange(done + count) > positions[:, None]
            mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(mask, -torch.inf)
            tables = tuple(table[None].to(x.dtype) for table in self.tables(positions))
            out = x[None, :0]
            if count:
                chunk = x[None, done : done + count]
                out, _ = self.layer(chunk, tables, mask[None, None], cache)
            outs.append(out[0])
            done += count
        k, v = cache.layers[0].keys, cache.layers[0].values
        return outs, k[0].transpose(0, 1), v[0].transpose(0, 1)


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("sizes", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_a_chunked_prefill_and_decode_is_qwen3_attention(
    sizes: dict[str, int], doubled: bool
) -> None:
    """Keys and values bit for bit; outputs within twice what Hugging Face errs itself."""
    D, N, H = sizes["D"], sizes["N"], sizes["H"]
    model = Qwen(D, H)
    xs = [torch.randn(sum(chunks), 64) for chunks in (CHUNKS, OTHERS)]
    theirs = [model.run(x, chunks) for x, chunks in zip(xs, (CHUNKS, OTHERS), strict=True)]

    spec = KVSpec(kv_heads=H, head_dim=D, block_size=N, format=KVFormat.FP32)
    g = torch.Generator().manual_seed(1)
    blocks = (torch.randperm(40, generator=g) + 1).tolist()
    layer = make_layer(spec, 41, storage=STORAGES[D % 3])
    tables = [blocks[:20], blocks[20:]]
    table = tuple(t[:, : D // 2] for t in model.tables(torch.arange(64)))
    done, outs = [0, 0], [[], []]
    for counts in zip(CHUNKS, OTHERS, strict=True):
        context = [a + b for a, b in zip(done, counts, strict=True)]
        used = [row[: -(-n // N)] for row, n in zip(tables, context, strict=True)]
        step = make_step(used, context, counts, N, pad_tokens=2, null_block=True)
        chunks = [x[a:b] for x, a, b in zip(xs, done, context, strict=True)]
        # each sequence's projection alone, as Hugging Face has it: other shapes round differently
        qkv = torch.cat([*map(model.qkv, chunks), torch.full((2, (4 + 2 * H) * D), torch.nan)])
        cos, sin = model.tables(step.positions) if doubled else table
        q = paged_write(
            layer, step, qkv, model.layer.q_norm.weight, model.layer.k_norm.weight, cos, sin,
            rope="half", eps=1e-6, doubled_tables=doubled, checked=True, backend="torch",
        )  # fmt: skip
        out = paged_decode_attention(layer, step, q, checked=True, backend="torch")
        assert not out[-2:].any()
        for side, piece in zip(outs, out[:-2].flatten(1).split(list(counts)), strict=True):
            side.append(model.layer.o_proj(piece))
        done = context
    k, v = gather(layer, step)
    for b, (_, their_k, their_v) in enumerate(theirs):
        assert torch.equal(k[b, : done[b]], their_k) and torch.equal(v[b, : done[b]], their_v)
    model.layer.double()
    for x, chunks, ours, (their_outs, _, _) in zip(xs, (CHUNKS, OTHERS), outs, theirs, strict=True):
        oracle = torch.cat(model.run(x.double(), chunks)[0])
        assert_within_budget(torch.cat(ours), torch.cat(their_outs), oracle)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("heads", [(9, 3), (28, 4), (6, 6)])
def test_any_group_size_is_sdpa(heads: tuple[int, int], tokens: int) -> None:
    """D10: 3, 7 and 1 query heads for a key head, and a head that is no power of two."""
    Hq, H = heads
    spec = KVSpec(kv_heads=H, head_dim=80, block_size=16, format=KVFormat.FP32)
    g = torch.Generator().manual_seed(0)
    layer, step = random_paged(spec, [40], [tokens], generator=g)
    q = torch.randn(tokens, Hq, 80, generator=g)
    out = paged_decode_attention(layer, step, q)
    k, v = gather(layer, step)
    # is_causal would align the first query with the first key
    theirs = scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=causal_lower_right(tokens, 40), enable_gqa=True,
    )[0].transpose(0, 1)  # fmt: skip
    assert_within_budget(out, theirs, paged_attention_oracle(q, layer, step)[0])


def test_the_table_of_flex_attention_is_read_as_it_means_it() -> None:
    """torch's own paged cache, its pages adopted and its table, in which -1 is nothing."""
    P, N, H, D, lengths = 8, 4, 2, 16, [9, 3]
    pages = PagedAttention(P, N, 2, device="cpu")
    caches = [torch.full((1, H, P * N, D), torch.nan) for _ in range(2)]
    stored = []
    for tokens in (2, 1):  # reserved in turns, so that their pages mix
        for b, length in enumerate(lengths):
            pages.reserve(torch.tensor(b), torch.tensor(length if tokens == 1 else tokens))
    for b, length in enumerate(lengths):
        rows = torch.randn(2, 1, H, length, D)
        stored.append(rows)
        positions = torch.arange(length)[None]
        pages.assign(torch.tensor([b]), positions, rows[0], rows[1], *caches)
    spec = KVSpec(kv_heads=H, head_dim=D, block_size=N, format=KVFormat.FP32)
    k, v = (x.view(H, P, N, D).permute(1, 2, 0, 3) for x in caches)
    layer = KVLayer.adopt(spec, k, v)
    step = make_step([[0] * 3, [0]], lengths, [3, 1], N)
    step.block_table = pages.page_table
    assert step.block_table[0, 1] != step.block_table[0, 0] + 1
    q = torch.randn(4, 4, D)
    out = paged_decode_attention(layer, step, q, checked=True)
    for b, (cut, count) in enumerate([(slice(0, 3), 3), (slice(3, 4), 1)]):
        theirs = scaled_dot_product_attention(
            q[cut].transpose(0, 1)[None], *stored[b],
            attn_mask=causal_lower_right(count, lengths[b]), enable_gqa=True,
        )[0].transpose(0, 1)  # fmt: skip
        oracle = paged_attention_oracle(q, layer, step)[0][cut]
        assert_within_budget(out[cut], theirs, oracle)


class Sequence:
    """200 tokens of one sequence, written and attended in steps of any length."""

    H, D, N, TOKENS = 1, 16, 16, 200

    def __init__(self, fmt: KVFormat, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        width = 4 * self.D
        self.spec = KVSpec(kv_heads=self.H, head_dim=self.D, block_size=self.N, format=fmt)
        self.qkv = torch.randn(self.TOKENS, width, generator=g)
        self.norm = 1 + 0.3 * torch.randn(self.D, generator=g)
        angles = torch.outer(torch.arange(256.0), 100.0 ** -torch.arange(0, 1, 2 / self.D))
        self.tables = angles.cos(), angles.sin()
        self.other = torch.randn(64, width, generator=g)

    def run(self, cuts: list[int], seed: int, other: int = 0) -> torch.Tensor:
        """Return the output of every token, with ``other`` tokens of another sequence beside."""
        g = torch.Generator().manual_seed(seed)
        blocks = (torch.randperm(19, generator=g) + 1).tolist()
        layer = make_layer(self.spec, 20)
        outs, done, beside = [], 0, 0
        for stop in [*cuts, self.TOKENS]:
            count = stop - done
            new = min(other, 64 - beside)
            beside += new
            ends = blocks, blocks[::-1]
            lengths = [stop, beside]
            tables = [b[: -(-n // self.N)] for b, n in zip(ends, lengths, strict=True)]
            step = make_step(tables, lengths, [count, new], self.N, pad_tokens=1)
            qkv = torch.cat([self.qkv[done:stop], self.other[beside - new : beside]])
            qkv = torch.cat([qkv, torch.full((1, 4 * self.D), torch.nan)])
            q = paged_write(layer, step, qkv, self.norm, self.norm, *self.tables, rope="half")
            outs.append(paged_decode_attention(layer, step, q, checked=True)[:count])
            done = stop
        return torch.cat(outs)


@pytest.mark.parametrize("fmt", [KVFormat.FP32, KVFormat.INT8], ids=lambda fmt: fmt.name)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    cuts=st.sets(st.integers(1, 199), max_size=25),
    seed=st.integers(0, 9),
    other=st.sampled_from([0, 1, 7]),
)
def test_any_way_of_cutting_a_sequence_gives_the_same_answer(
    fmt: KVFormat, cuts: set[int], seed: int, other: int
) -> None:
    """Also beside another sequence and with any table: what is attended is what was stored."""
    sequence = Sequence(fmt, 0)
    whole = sequence.run([], 0)
    pieces = sequence.run(sorted(cuts), seed, other)
    assert (pieces - whole).abs().max() <= 1e-6
