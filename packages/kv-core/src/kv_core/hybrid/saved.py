"""A hybrid cache as a state: meta for what the host knows, tensors for the rest."""

from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kv_core.blocks import BlockAllocator, check_storable
from kv_core.errors import SnapshotError
from kv_core.hybrid.records import RequestRecord
from kv_core.hybrid.snapshots import LayerStates
from kv_core.snapshot import check_state

if TYPE_CHECKING:
    from kv_core.hybrid.manager import KVCacheManager

_FIELDS = ("slot", "length", "floor", "stored", "written", "first")


def save_manager(manager: "KVCacheManager") -> dict[str, Any]:
    """Return a copy of everything that a closed manager holds.

    Raises:
        SnapshotError: A request is neither a string nor an integer.
    """
    rows: list[list[Any]] = []
    for request, record in manager._table.records.items():
        check_storable(request, "request")
        rows.append([request, *(getattr(record, name) for name in _FIELDS), record.blocks])
    tensors = {name: tensor.clone() for name, tensor in _storage(manager)}
    prefixes = manager._prefixes.items()
    for index, (_, layers) in enumerate(prefixes):
        for layer, captured in enumerate(layers):
            tensors |= {f"prefix.{index}.{layer}.{name}": t.clone() for name, t in captured.items()}
    meta = {
        "spec": _spec(manager),
        "allocator": manager._table.allocator.state_dict()["meta"],
        "requests": rows,
        "free_slots": list(manager._table.free_slots),
        "prefixes": [digest.hex() for digest, _ in prefixes],
    }
    return {"meta": meta, "tensors": tensors}


def load_manager(manager: "KVCacheManager", state: Mapping[str, Any]) -> None:
    """Take over a state of a manager of the same spec and sizes.

    Raises:
        SnapshotError: Not such a state, or one that contradicts itself. Nothing has changed.
    """
    meta, tensors = check_state("KVCacheManager", state, _spec(manager))
    allocator = BlockAllocator(manager._table.allocator.blocks)
    blocks: dict[str, Any] = {"meta": meta.get("allocator"), "tensors": {}}
    allocator.load_state_dict(blocks)
    for name, tensor in _storage(manager):
        got = tensors.get(name)
        if got is None or got.shape != tensor.shape or got.dtype != tensor.dtype:
            found = "none" if got is None else f"{list(got.shape)} {got.dtype}"
            raise SnapshotError(
                f"tensor {name!r} of the state must be {list(tensor.shape)} {tensor.dtype}, got "
                f"{found}; load a state that was not edited"
            )
    try:
        requests = _requests(manager, meta, allocator)
        prefixes = _prefixes(manager, meta, tensors, allocator)
        free = [slot for slot in meta["free_slots"] if 0 <= slot < manager._table.slots]
        used = [record.slot for record in requests.values()]
        if sorted(free + used) != list(range(manager._table.slots)):
            raise ValueError(f"slots {sorted(used)} used and {sorted(free)} free")
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(
            "meta of the state must have requests, free_slots and prefixes that fit each other, "
            f"got {error!r}; load a state that was not edited"
        ) from error
    with torch.no_grad():
        for name, tensor in _storage(manager):
            tensor.copy_(tensors[name])
    manager._table.allocator.load_state_dict(blocks)
    manager._table.records, manager._table.free_slots = requests, free
    for digest in manager._prefixes.digests():
        manager._prefixes.drop(digest)
    for digest, layers in prefixes.items():
        manager._prefixes.put(digest, layers)


def _storage(manager: "KVCacheManager") -> Iterator[tuple[str, Tensor]]:
    for layer, (state, pool) in enumerate(zip(manager.states, manager.pools, strict=True)):
        found = state.tensors() | (pool.tensors() if pool is not None else {})
        for name, tensor in found.items():
            yield f"{layer}.{name}", tensor


def _spec(manager: "KVCacheManager") -> dict[str, Any]:
    sizes = {"kind": "KVCacheManager", "slots": manager._table.slots}
    sizes |= {"blocks": manager._table.allocator.blocks, "max_len": manager.max_len}
    return {**sizes, "hybrid": manager.spec.to_json()}


def _requests(
    manager: "KVCacheManager", meta: Mapping[str, Any], allocator: BlockAllocator
) -> dict[Hashable, RequestRecord]:
    found: dict[Hashable, RequestRecord] = {}
    for request, *fields, blocks in meta["requests"]:
        record = RequestRecord(**dict(zip(_FIELDS, fields, strict=True)), blocks=list(blocks))
        numbers = [getattr(record, name) for name in _FIELDS]
        whole = all(isinstance(number, int) and number >= 0 for number in numbers)
        needed = manager.spec.blocks_for(max(record.length, record.stored))
        if not whole or len(blocks) != (needed if manager.spec.kinds else 0):
            raise ValueError(f"request {request!r} of {numbers} with {len(blocks)} blocks")
        if not all(request in allocator.owners(block) for block in blocks):
            raise ValueError(f"request {request!r} with blocks {blocks} that it does not hold")
        found[request] = record
    held = sum(allocator.count(block) for block in range(1, allocator.blocks))
    if held != sum(len(record.blocks) for record in found.values()):
        raise ValueError(f"{held} blocks held, others in the requests")
    return found


def _prefixes(
    manager: "KVCacheManager",
    meta: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    allocator: BlockAllocator,
) -> dict[bytes, LayerStates]:
    found: dict[bytes, LayerStates] = {}
    for index, digest in enumerate(map(bytes.fromhex, meta["prefixes"])):
        if allocator.lookup(digest) is None:
            raise ValueError(f"state of prefix {digest.hex()[:12]}, which no block holds")
        found[digest] = []
        for layer, state in enumerate(manager.states):
            layers = {}
            # what a capture of this layer looks like, from a slot of our own
            for name, like in state.capture(0, manager.spec.block_tokens).items():
                got = tensors[f"prefix.{index}.{layer}.{name}"]
                fits = got.shape[1:] == like.shape[1:] and len(got) >= len(like)
                if got.dtype != like.dtype or not fits:
                    raise ValueError(f"prefix.{index}.{layer}.{name} of {list(got.shape)}")
                layers[name] = got.to(manager.device).clone()
            found[digest].append(layers)
    return found
