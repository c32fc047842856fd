"""Named runs of equal slots inside a cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kv_core.checks import check_int
from kv_core.errors import DtypeError, SpecError


@dataclass(frozen=True, slots=True)
class SlotRegion:
    """A run of equal slots inside a cache; a new chunk takes the slot of the oldest.

    Args:
        name: What the region is called in ``write`` and ``valid``.
        start: Position of its first token in the cache.
        slots: Number of slots; 0 makes a placeholder that cannot be written.
        slot_tokens: Tokens in each slot, at least 1 if there are slots.
        extends_length: Whether a write makes the slot, and all before it, visible.

    Raises:
        SpecError: An empty name or a number out of range.
        DtypeError: A name that is not a string, a size that is not an integer, a flag not a bool.
    """

    name: str
    start: int
    slots: int
    slot_tokens: int
    extends_length: bool = False

    def __post_init__(self) -> None:
        """Check the fields and turn numpy integers into ``int``."""
        if not isinstance(self.name, str):
            raise DtypeError(
                f"name of a region must be a string, got {self.name!r}; for example 'history'"
            )
        if not self.name:
            raise SpecError("name of a region must not be empty, got ''; for example 'history'")
        if not isinstance(self.extends_length, bool):
            raise DtypeError(
                f"extends_length of region {self.name!r} must be a bool, got "
                f"{self.extends_length!r}; pass True or False"
            )
        for field in ("start", "slots", "slot_tokens"):
            least = 1 if field == "slot_tokens" and self.slots else 0
            value = getattr(self, field)
            number = check_int(f"{field} of region {self.name!r}", value, minimum=least)
            object.__setattr__(self, field, number)

    @property
    def end(self) -> int:
        """Position one past its last token."""
        return self.start + self.slots * self.slot_tokens

    def slot_start(self, slot: int) -> int:
        """Return the position of a slot's first token."""
        return self.start + slot * self.slot_tokens

    def __str__(self) -> str:
        """Return name and extent, as messages use them."""
        return f"{self.name!r} [{self.start}, {self.end})"


def check_regions(
    regions: Sequence[SlotRegion], *, prefill_tokens: int, capacity: int
) -> dict[str, SlotRegion]:
    """Return the regions by name if they fit the cache and each other.

    Raises:
        DtypeError: Something else than a ``SlotRegion``.
        SpecError: A name twice, an end past the capacity, an overlap, or a region that does not
            extend the length and is not within the prefill.
    """
    if not isinstance(regions, Sequence):
        raise DtypeError(
            f"regions must be a sequence of SlotRegion objects, got {type(regions).__name__}; pass "
            "a list, empty if there are none"
        )
    found: dict[str, SlotRegion] = {}
    for region in regions:
        if not isinstance(region, SlotRegion):
            raise DtypeError(
                f"regions must be SlotRegion objects, got {region!r}; for example "
                "SlotRegion('history', start=0, slots=2, slot_tokens=4, extends_length=True)"
            )
        if region.name in found:
            raise SpecError(
                f"regions must have different names, got {found[region.name]} and {region}; rename "
                "one of them"
            )
        if region.end > capacity:
            raise SpecError(
                f"region {region} must end within the capacity, {capacity}, got end {region.end}; "
                f"pass capacity={region.end} or fewer slots"
            )
        if region.slots and not region.extends_length and region.end > prefill_tokens:
            raise SpecError(
                f"region {region} must end within the prefill, {prefill_tokens} tokens, got end "
                f"{region.end}; prefill more tokens or pass extends_length=True"
            )
        found[region.name] = region
    occupied = sorted((r for r in found.values() if r.slots), key=lambda r: r.start)
    for before, after in pairwise(occupied):
        if after.start < before.end:
            raise SpecError(
                f"regions must not overlap, got {before} and {after}; start {after.name!r} at "
                f"{before.end} or later"
            )
    return found
