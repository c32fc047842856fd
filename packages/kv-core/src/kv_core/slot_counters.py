"""What a cache with slots knows about its rows: visible extent, newest chunks, valid rows."""

from collections.abc import Mapping
from operator import index
from typing import Any

from kv_core.checks import check_int
from kv_core.errors import DtypeError, SnapshotError, SpecError
from kv_core.regions import SlotRegion


class SlotCounters:
    """The host-side numbers of one cache.

    ``length`` is the visible extent, ``newest`` the last chunk id of each region (-1 before the
    first), ``valid`` the rows written in each slot of each region. ``record`` replaces values and
    never mutates them, so a shallow ``copy`` is a snapshot.
    """

    def __init__(self, regions: Mapping[str, SlotRegion], prefill_tokens: int) -> None:
        """Start as after a prefill, whose rows inside a region are valid."""
        self.regions = regions
        self.prefill_tokens = prefill_tokens
        self.length = prefill_tokens
        self.newest = dict.fromkeys(regions, -1)
        self.valid = {
            name: tuple(
                min(max(prefill_tokens - region.slot_start(slot), 0), region.slot_tokens)
                for slot in range(region.slots)
            )
            for name, region in regions.items()
        }

    def copy(self) -> "SlotCounters":
        """Return the same numbers, unaffected by what happens to these."""
        twin = SlotCounters(self.regions, self.prefill_tokens)
        twin.length, twin.newest, twin.valid = self.length, dict(self.newest), dict(self.valid)
        return twin

    @property
    def valid_tokens(self) -> int:
        """All rows that are valid, the prefill's included."""
        fresh = SlotCounters(self.regions, self.prefill_tokens).valid
        written = sum(sum(rows) - sum(fresh[name]) for name, rows in self.valid.items())
        return self.prefill_tokens + written

    def find(self, region: object) -> SlotRegion:
        """Return the region of that name.

        Raises:
            DtypeError: Not a string.
            SpecError: No region has this name.
        """
        if not isinstance(region, str):
            example = next(iter(self.regions), "history")
            raise DtypeError(
                f"region must be the name of a region, got {region!r}; pass a string such as "
                f"{example!r}"
            )
        if region not in self.regions:
            known = ", ".join(map(repr, self.regions)) or "none, for there are no regions"
            raise SpecError(f"region must be one of {known}, got {region!r}; pass one of those")
        return self.regions[region]

    def admit(self, region: SlotRegion, chunk_id: object) -> tuple[int, int]:
        """Return the chunk id and its slot if it is the newest one or the next.

        Raises:
            DtypeError: Not an integer.
            SpecError: Another id, or a region without slots.
        """
        if not region.slots:
            raise SpecError(
                f"region {region.name!r} must have slots to be written, got 0 slots; declare it "
                "with slots >= 1 when the cache is built"
            )
        number = check_int(f"chunk_id for region {region.name!r}", chunk_id)
        newest = self.newest[region.name]
        if number == newest + 1 or number == newest >= 0:
            return number, number % region.slots
        again = f" or {newest} (overwrite)" if newest >= 0 else ""
        raise SpecError(
            f"chunk_id for region {region.name!r} must be {newest + 1} (append){again}, got "
            f"{number}; chunks are written in order and only the newest can be rewritten"
        )

    def record(self, region: SlotRegion, chunk_id: int, tokens: int) -> None:
        """Note that a chunk of ``tokens`` rows now fills its slot."""
        slot = chunk_id % region.slots
        rows = self.valid[region.name]
        self.newest[region.name] = chunk_id
        self.valid[region.name] = (*rows[:slot], tokens, *rows[slot + 1 :])
        if region.extends_length:
            self.length = max(self.length, region.slot_start(slot + 1))

    def invalid_runs(self) -> list[tuple[int, int]]:
        """Return the runs ``[start, stop)`` of visible rows that are not valid, in order."""
        valid = [(0, self.prefill_tokens)]
        for name, region in self.regions.items():
            # rows of the prefill past a shorter chunk of the same slot are no longer valid
            for slot, rows in enumerate(self.valid[name]):
                start, stop = region.slot_start(slot), region.slot_start(slot + 1)
                valid = [part for run in valid for part in _without(run, (start, stop))]
                valid.append((start, start + rows))
        runs, reached = [], 0
        for start, stop in sorted(valid):
            if start > reached:
                runs.append((reached, start))
            reached = max(reached, stop)
        return [*runs, (reached, self.length)] if reached < self.length else runs

    def to_meta(self) -> dict[str, Any]:
        """Return the numbers as JSON has them."""
        valid = {name: list(rows) for name, rows in self.valid.items()}
        return {"length": self.length, "newest": dict(self.newest), "valid": valid}

    def from_meta(self, meta: Mapping[str, Any]) -> "SlotCounters":
        """Return the counters that ``to_meta`` described, for the same regions.

        Raises:
            SnapshotError: Numbers that are missing or contradict each other.
        """
        fresh = SlotCounters(self.regions, self.prefill_tokens)
        loaded = fresh.copy()
        try:
            loaded.length = index(meta["length"])
            loaded.newest = {name: index(meta["newest"][name]) for name in self.regions}
            loaded.valid = {name: tuple(map(index, meta["valid"][name])) for name in self.regions}
        except (KeyError, TypeError) as error:
            raise SnapshotError(
                "meta of the state must have whole numbers under length, newest and valid for "
                f"every region, got {error!r}; load a state that was not edited"
            ) from error
        visible = self.prefill_tokens
        for name, region in self.regions.items():
            filled = min(loaded.newest[name] + 1, region.slots)
            rows = loaded.valid[name]
            if (
                filled < 0
                or len(rows) != region.slots
                or rows[filled:] != fresh.valid[name][filled:]
                or not all(1 <= tokens <= region.slot_tokens for tokens in rows[:filled])
            ):
                raise SnapshotError(
                    f"counters of region {name!r} must agree, got newest {loaded.newest[name]} "
                    f"with valid {rows} in the state; load a state that was not edited"
                )
            if region.extends_length and filled:
                visible = max(visible, region.slot_start(filled))
        if loaded.length != visible:
            raise SnapshotError(
                f"length in the state must be {visible} by its chunk ids, got {loaded.length}; "
                "load a state that was not edited"
            )
        return loaded


def _without(run: tuple[int, int], hole: tuple[int, int]) -> list[tuple[int, int]]:
    parts = [(run[0], min(run[1], hole[0])), (max(run[0], hole[1]), run[1])]
    return [(start, stop) for start, stop in parts if start < stop]
