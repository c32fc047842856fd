"""What checked=True reads of a hybrid step, and refuses; each waits for the device."""

from kv_core.errors import SpecError
from kv_core.hybrid.views import ClassicalView, IndexerView
from torch import Tensor


def check_table(view: ClassicalView | IndexerView, blocks: int) -> None:
    """Check the block ids that the tokens of a step lead to.

    Raises:
        SpecError: An id is out of range, or the null block's; or a token sees more than the table
            has.
    """
    N, table = view.entries_per_block, view.block_table.tolist()
    tokens = zip(view.request_ids.tolist(), view.vis.tolist(), strict=True)
    for t, (b, seen) in enumerate(tokens):
        if b < 0 or not seen:
            continue
        needed = -(-seen // N)
        if needed > len(table[b]):
            raise SpecError(
                f"vis[{t}] must be at most {len(table[b]) * N} (M={len(table[b])} blocks of N={N} "
                f"entries), got {seen}; take the view from the step that was acquired"
            )
        for column, block in enumerate(table[b][:needed]):
            if not 0 < block < blocks:
                raise SpecError(
                    f"block_table[{b}, {column}] must be from 1 to {blocks - 1}, the blocks of the "
                    f"pool without the null block, got {block}; token {t} sees {seen} entries"
                )


def check_picks(picked: Tensor, vis: Tensor) -> None:
    """Check that each token picks entries that it sees, each once.

    Raises:
        SpecError: It does not.
    """
    for t, (row, seen) in enumerate(zip(picked.tolist(), vis.tolist(), strict=True)):
        found = [entry for entry in row if entry != -1]
        for entry in found:
            if not 0 <= entry < seen:
                raise SpecError(
                    f"picked[{t}] must have entries from 0 to {seen - 1} that token {t} sees, or "
                    f"-1, got {entry}; pass what indexer_topk returned for this step"
                )
        if len(set(found)) != len(found):
            twice = next(entry for entry in found if found.count(entry) > 1)
            raise SpecError(
                f"picked[{t}] must have each entry once, got {twice} twice; it would count twice"
            )
