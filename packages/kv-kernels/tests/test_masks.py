"""SegmentMask: what it says of pairs of tokens, and its block lists against torch's own."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.errors import DtypeError, ShapeError, SpecError
from kv_kernels.masks import SegmentMask, check_block_size
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

LISTS = [
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
]


def expand(table: np.ndarray, q_lengths: list[int], kv_lengths: list[int]) -> Tensor:
    """The mask of every pair of tokens, the plain way."""
    return torch.from_numpy(table.repeat(q_lengths, 0).repeat(kv_lengths, 1))


def torchs_block_mask(dense: Tensor, block: tuple[int, int]) -> BlockMask:
    def looked_up(b, h, q_idx, kv_idx):
        return dense[q_idx, kv_idx]

    return create_block_mask(looked_up, None, None, *dense.shape, device="cpu", BLOCK_SIZE=block)


def assert_same_lists(ours: BlockMask, theirs: BlockMask) -> None:
    for name in LISTS:
        torch.testing.assert_close(
            getattr(ours, name), getattr(theirs, name), rtol=0, atol=0, msg=name
        )
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert ours.shape == theirs.shape


def densified(blocks: BlockMask) -> Tensor:
    """What a kernel computes: full blocks whole, partial ones by the rule, no others."""
    (q_len, kv_len), (bq, bk) = blocks.seq_lengths, blocks.BLOCK_SIZE
    rows, columns = blocks.kv_indices.shape[2:]
    seen = torch.zeros(rows * bq, columns * bk, dtype=torch.bool)
    for row in range(rows):
        q = torch.arange(row * bq, (row + 1) * bq)
        for column in blocks.kv_indices[0, 0, row, : blocks.kv_num_blocks[0, 0, row]].tolist():
            kv = torch.arange(column * bk, (column + 1) * bk)
            rule = blocks.mask_mod(None, None, q[:, None], kv[None, :])
            seen[row * bq : (row + 1) * bq, column * bk : (column + 1) * bk] = rule
        count = blocks.full_kv_num_blocks[0, 0, row]
        for column in blocks.full_kv_indices[0, 0, row, :count].tolist():
            seen[row * bq : (row + 1) * bq, column * bk : (column + 1) * bk] = True
    assert not seen[q_len:].any() and not seen[:, kv_len:].any(), "padding is visible"
    return seen[:q_len, :kv_len]


def causal(q_len: int, kv_len: int, **options) -> SegmentMask:
    """Bottom-right causal, one segment for each token."""
    table = np.tri(q_len, kv_len, kv_len - q_len, dtype=bool)
    return SegmentMask.build(table, np.ones(q_len, int), np.ones(kv_len, int), **options)


@st.composite
def masks(draw: st.DrawFn):
    lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
    q_lengths, kv_lengths = draw(lengths), draw(lengths)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    visible = draw(st.sampled_from([0.2, 0.5, 0.9]))
    table = random.random((len(q_lengths), len(kv_lengths))) < visible
    block = draw(st.integers(1, 70) | st.tuples(st.integers(1, 70), st.integers(1, 70)))
    return table, q_lengths, kv_lengths, block


@settings(max_examples=40, deadline=None)
@given(masks())
def test_dense_and_every_block_list_equal_torchs_own(case):
    table, q_lengths, kv_lengths, block = case
    mask = SegmentMask.build(table, q_lengths, kv_lengths, block_size=block)
    dense = expand(table, q_lengths, kv_lengths)
    torch.testing.assert_close(mask.dense(), dense, rtol=0, atol=0)
    assert_same_lists(mask.block_mask(), torchs_block_mask(dense, check_block_size(block)))
    torch.testing.assert_close(densified(mask.block_mask()), dense, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (128, (1, 1, 2, 3)),
        ((64, 128), (1, 1, 3, 3)),
        ((128, 64), (1, 1, 2, 6)),
        ((32, 256), (1, 1, 5, 2)),
        ((150, 333), (1, 1, 1, 1)),
        (48, (1, 1, 4, 7)),
        ((1, 128), (1, 1, 150, 3)),
        (8, (1, 1, 19, 42)),
    ],
)
def test_e01_any_block_size_gives_the_lists_of_that_size(block, shape):
    """E01: pairs, sizes that divide nothing, one block over everything, blocks of one row."""
    mask = causal(150, 333, block_size=block)
    blocks = mask.block_mask()
    assert blocks.kv_indices.shape == shape
    assert blocks.kv_indices.dtype == blocks.kv_num_blocks.dtype == torch.int32
    expected = torch.ones(150, 333, dtype=torch.bool).tril(183)
    assert_same_lists(blocks, torchs_block_mask(expected, check_block_size(block)))
    assert torch.equal(densified(blocks), expected) and torch.equal(mask.dense(), expected)


@pytest.mark.parametrize(
    ("size", "error"),
    [
        (0, SpecError),
        (-4, SpecError),
        ((4, 4, 4), SpecError),
        ((128,), SpecError),
        ((), SpecError),
        ((64, 0), SpecError),
        ("128", DtypeError),
        (True, DtypeError),
        ((64, True), DtypeError),
        (128.0, DtypeError),
        (None, DtypeError),
        (torch.tensor(128), DtypeError),
    ],
    ids=repr,
)
def test_e01_what_is_no_block_size_is_refused(size, error):
    with pytest.raises(error, match="block_size"):
        check_block_size(size)
    with pytest.raises(error, match="block_size"):
        causal(2, 2, block_size=size)


def test_numpy_numbers_and_lists_are_block_sizes_too():
    assert check_block_size(np.int64(32)) == (32, 32)
    assert check_block_size([np.int32(8), 16]) == (8, 16)


@pytest.mark.parametrize("block", [128, (16, 64), (8, 16), 1])
def test_e02_the_rule_is_total_on_the_padded_grid(block):
    """E02: 15 queries and 143 keys; whole blocks are inside the tables, and padding is False."""
    mask = causal(15, 143, block_size=block)
    bq, bk = check_block_size(block)
    rows, columns = -(-15 // bq) * bq, -(-143 // bk) * bk
    assert mask.q_segment.shape == (rows,) and mask.kv_segment.shape == (columns,)
    grid = mask.block_mask().mask_mod(
        None, None, torch.arange(rows)[:, None], torch.arange(columns)[None]
    )
    assert torch.equal(grid[:15, :143], torch.ones(15, 143, dtype=torch.bool).tril(128))
    assert not grid[15:].any() and not grid[:, 143:].any()


def test_e03_96_000_tokens_take_megabytes_not_gigabytes():
    """E03: the dense mask would be 8.6 GiB; the peak is what the module promises."""
    segments, tokens, block = 960, 96_000, 128
    table = np.tri(segments, dtype=bool)
    lengths = np.full(segments, tokens // segments)
    tracemalloc.start()
    try:
        mask = SegmentMask.build(table, lengths, lengths, block_size=block)
        blocks = mask.block_mask()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    promised = 33 * 750 * 750 + 12 * segments * 750 + 16 * 2**20
    assert peak < promised, f"{peak / 1e6:.1f} MB, promised {promised / 1e6:.1f} MB"
    assert mask.nbytes < 12e6
    # block r ends with token 128 r + 127; whole segments of 100 up to its own are visible
    full = [min(100 * (128 * r // 100 + 1) // 128, 750) for r in range(750)]
    assert blocks.full_kv_num_blocks[0, 0].tolist() == full
    some = [-(-100 * (min(128 * r + 127, 95_999) // 100 + 1) // 128) for r in range(750)]
    total = blocks.full_kv_num_blocks + blocks.kv_num_blocks
    assert total[0, 0].tolist() == some


def test_more_visible_pairs_in_a_block_than_int32_counts():
    mask = SegmentMask.build(np.ones((1, 1), bool), [70_000], [70_000], block_size=70_000)
    blocks = mask.block_mask()
    assert blocks.full_kv_num_blocks.tolist() == [[[1]]] and blocks.kv_num_blocks.sum() == 0


@pytest.mark.parametrize(("q_len", "kv_len"), [(10, 10), (1, 1), (1, 300)])
def test_e04_a_mask_of_a_single_block_or_a_single_token_works(q_len, kv_len):
    mask = causal(q_len, kv_len, block_size=128)
    assert_same_lists(mask.block_mask(), torchs_block_mask(mask.dense(), (128, 128)))
    assert torch.equal(densified(mask.block_mask()), mask.dense())
    compact = SegmentMask.build(np.ones((1, 1), bool), [q_len], [kv_len], block_size=128)
    assert compact.dense().all() and compact.dense().shape == (q_len, kv_len)


def test_e07_rows_that_see_nothing_are_in_no_block():
    """E07: queries 0 and 1 of 8 see nothing, and the query block is longer than the sequence."""
    table = np.array([[False, False], [True, False]])
    mask = SegmentMask.build(table, [2, 6], [5, 3], block_size=(16, 4))
    assert mask.dense().sum(1).tolist() == [0, 0, 5, 5, 5, 5, 5, 5]
    assert torch.equal(densified(mask.block_mask()), mask.dense())
    alone = SegmentMask.build(table, [2, 6], [5, 3], block_size=(2, 4)).block_mask()
    assert (alone.kv_num_blocks + alone.full_kv_num_blocks).tolist() == [[[0, 2, 2, 2]]]


def test_e08_a_mask_knows_its_exact_lengths():
    """E08: a mask for a short last chunk is built for it, not cut out of a longer one."""
    short = causal(101, 129, block_size=128)
    assert (short.q_len, short.kv_len) == (101, 129)
    assert short.block_mask().seq_lengths == (101, 129)
    assert short.dense().shape == (101, 129)
    whole = SegmentMask.build(np.ones((1, 1), bool), [256], [257], block_size=128)
    cut = SegmentMask.build(np.ones((1, 1), bool), [101], [129], block_size=128)
    assert whole.block_mask().full_kv_num_blocks.tolist() == [[[2, 2]]]
    assert cut.block_mask().full_kv_num_blocks.tolist() == [[[0]]]
    assert cut.block_mask().kv_num_blocks.tolist() == [[[2]]]


def test_a_block_cut_by_the_end_is_partial_even_if_all_of_it_is_visible():
    mask = SegmentMask.build(np.ones((1, 1), bool), [12], [20], block_size=8)
    blocks = mask.block_mask()
    assert blocks.full_kv_num_blocks.tolist() == [[[2, 0]]]
    assert blocks.kv_num_blocks.tolist() == [[[1, 3]]]


def test_no_queries_or_no_keys_is_an_empty_mask():
    no_keys = SegmentMask.build(np.zeros((1, 0), bool), [5], [], block_size=2)
    assert no_keys.dense().shape == (5, 0)
    assert no_keys.block_mask().kv_indices.shape == (1, 1, 3, 0)
    assert no_keys.block_mask().kv_num_blocks.tolist() == [[[0, 0, 0]]]
    no_queries = SegmentMask.build(np.zeros((0, 1), bool), [], [5], block_size=2)
    assert no_queries.dense().shape == (0, 5)
    assert no_queries.block_mask().q_num_blocks.tolist() == [[[0, 0, 0]]]
    assert no_keys.key != no_queries.key


def test_the_last_row_and_column_of_the_table_are_padding():
    mask = SegmentMask.build(np.ones((2, 3), bool), [1, 2], [3, 1, 1], block_size=4)
    assert mask.table.shape == (3, 4) and mask.table.dtype == torch.bool
    assert mask.table[:2, :3].all() and not mask.table[2].any() and not mask.table[:, 3].any()
    assert mask.q_segment.tolist() == [0, 1, 1, 2]
    assert mask.kv_segment.tolist() == [0, 0, 0, 1, 2, 3, 3, 3]
    assert mask.q_segment.dtype == mask.kv_segment.dtype == torch.int32


def test_a_mask_does_not_change_with_the_arrays_it_was_built_from():
    table, lengths = np.ones((2, 2), bool), np.array([3, 2])
    mask = SegmentMask.build(table, lengths, lengths, block_size=2)
    table[:], lengths[:] = False, 1
    assert mask.dense().all() and mask.dense().shape == (5, 5)
    assert mask.block_mask().full_kv_num_blocks.tolist() == [[[2, 2, 0]]]


def test_stamped_copies_share_everything_but_the_version():
    mask = causal(5, 5, block_size=2)
    before = mask.nbytes
    stamped = mask.stamped(7)
    assert (mask.version, stamped.version) == (0, 7)
    assert stamped.table is mask.table and stamped.key == mask.key
    assert stamped.block_mask() is mask.block_mask() is mask.stamped(8).block_mask()
    lists = sum(getattr(mask.block_mask(), name).nbytes for name in LISTS)
    assert mask.nbytes == stamped.nbytes == before + lists
    assert before == mask.table.nbytes + mask.q_segment.nbytes + mask.kv_segment.nbytes
    with pytest.raises(DtypeError, match="version"):
        mask.stamped(1.0)


def test_keys_are_equal_where_masks_are_and_nowhere_else():
    table = np.array([[True, False], [True, True]])
    mask = SegmentMask.build(table, [2, 3], [1, 4], block_size=2, version=1)
    assert SegmentMask.build(table, [2, 3], [1, 4], block_size=(2, 2), version=9).key == mask.key
    others = [
        SegmentMask.build(~table, [2, 3], [1, 4], block_size=2),
        SegmentMask.build(table, [3, 2], [1, 4], block_size=2),
        SegmentMask.build(table, [2, 3], [4, 1], block_size=2),
        SegmentMask.build(table, [2, 3], [1, 4], block_size=(2, 3)),
        SegmentMask.build(table.reshape(1, 4), [2], [3, 1, 4, 0], block_size=2),
        SegmentMask.build(table, [2, 3], [1, 4], block_size=2, device="meta"),
    ]
    assert len({mask.key, *(other.key for other in others)}) == 7


def test_masks_are_frozen_compare_by_identity_and_show_their_sizes():
    mask = causal(3, 4, block_size=(2, 8))
    with pytest.raises(AttributeError):
        mask.version = 3
    assert mask == mask and mask != mask.stamped(0)
    assert repr(mask) == (
        "SegmentMask(3 queries in 3 segments, 4 keys in 4, block_size=(2, 8), "
        "device=cpu, version=0)"
    )


GOOD = {"table": np.ones((2, 1), bool), "q_lengths": [1, 2], "kv_lengths": [3]}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"table": np.ones((2, 1), np.int8)}, DtypeError, "table must be .* bool, got int8"),
        ({"table": torch.ones(2, 1).bool()}, DtypeError, "numpy array of bool"),
        ({"table": np.ones(2, bool)}, ShapeError, r"\[nq, nk\], got 1 axes \[2\]"),
        ({"q_lengths": [1, 2, 3]}, ShapeError, "q_lengths .* 2 segments"),
        ({"kv_lengths": [[3]]}, ShapeError, "kv_lengths .* 1 segments"),
        ({"q_lengths": [1, -2]}, SpecError, "q_lengths must not be negative, got -2"),
        ({"q_lengths": [1.0, 2.0]}, DtypeError, "q_lengths must be integers, got float64"),
        ({"kv_lengths": [True]}, DtypeError, "kv_lengths must be integers, got bool"),
        ({"version": "1"}, DtypeError, "version"),
    ],
)
def test_what_does_not_describe_a_mask_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        SegmentMask.build(**GOOD | change)
