"""Save states to one file each, atomically, and refuse files that are not such a state."""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kv_core.errors import SnapshotError, SpecError

State = dict[str, Any]  # {"meta": a JSON-able dict, "tensors": a dict of name and tensor}

_META = "kv_core.state"
_VERSION = "kv_core.version"


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a state to ``path`` so that the file is always either the old one or the new one.

    The bytes go to a temporary file in the same folder, which is flushed to the disk and then
    renamed over ``path``. Tensors of any device, dtype and strides are written bit for bit.

    Args:
        path: File to make or replace; its folder must exist.
        state: ``{"meta": dict, "tensors": dict}`` as ``state_dict()`` returns. ``meta`` must be
            made of what JSON has: dicts with string keys, lists, strings, finite numbers, bools.

    Raises:
        SnapshotError: ``state`` is not of this form, or the file could not be written. What was at
            ``path`` before is untouched, and no temporary file is left.
    """
    target = Path(path)
    meta, tensors = _parts("state", state)
    try:
        text = json.dumps(meta, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SnapshotError(
            f"meta of the state must be JSON, got a value that is not: {error}; keep it to dicts, "
            "lists, strings, finite numbers and bools, and put tensors under 'tensors'"
        ) from error
    partial = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        partial.touch(exist_ok=False)
        mode = partial.stat().st_mode
        save_file(_writable(tensors), partial, metadata={_META: text, _VERSION: "1"})
        partial.chmod(mode)  # safetensors makes a file that only its owner may read
        _flush(partial)
        os.replace(partial, target)
        if os.name != "nt":  # a folder cannot be opened there
            _flush(target.parent)
    except KeyError as error:  # how safetensors says it
        raise SnapshotError(
            f"tensors of the state must have dtypes that safetensors stores, got {error.args[0]}; "
            "view or convert them"
        ) from error
    except (OSError, SafetensorError) as error:
        raise SnapshotError(
            f"{target} could not be written: {error}; what was there before is untouched, so make "
            "room or choose another folder and save again"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _writable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors dense, on the host, and each in memory of its own."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        host = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        storage = host.untyped_storage().data_ptr()
        result[name] = host.clone() if storage in seen else host
        seen.add(storage)
    return result


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> State:
    """Read a state that ``save`` wrote.

    Args:
        path: The file.
        device: Where the tensors are put.

    Returns:
        ``{"meta": dict, "tensors": dict}``. Tuples inside ``meta`` have become lists.

    Raises:
        SnapshotError: There is no such file, or it is cut short, damaged or something else.
    """
    target = Path(path)
    if not target.is_file():
        raise SnapshotError(f"{target} is not a file; pass the path that a state was saved to")
    try:
        with safe_open(target, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get(_VERSION) != "1" or _META not in metadata:
                raise SnapshotError(
                    f"{target} is a safetensors file but not a saved state of version 1; pass a "
                    "file that kv_core.save wrote, with a kv-core that knows its version"
                )
            meta = json.loads(metadata[_META])
            # clone: what safetensors returns is mapped from the file, which may go away
            tensors = {name: file.get_tensor(name).clone().to(device) for name in file.keys()}
    except (OSError, SafetensorError, ValueError) as error:
        raise SnapshotError(
            f"{target} is not a whole saved state (cut short, damaged or another kind of file): "
            f"{error}; save the state again or use an earlier file"
        ) from error
    return {"meta": meta, "tensors": tensors}


def spec_hash(spec: Mapping[str, Any]) -> str:
    """Return the SHA-256 of ``spec`` as JSON, in hexadecimal; the order of keys does not matter.

    Raises:
        SpecError: ``spec`` holds something that JSON does not have.
    """
    try:
        text = json.dumps(spec, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"spec must be JSON, got a value that is not: {error}; keep it to dicts with string "
            "keys, lists, strings, finite numbers and bools"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()


def check_state(
    what: str, state: object, spec: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return meta and tensors of ``state`` if ``meta["spec"]`` equals ``spec``.

    Args:
        what: What the state is loaded into, for messages.
        state: Anything.
        spec: What the state must have been made with.

    Raises:
        SnapshotError: Not a state, or one made with another spec; the message names what differs.
    """
    meta, tensors = _parts("state", state)
    try:  # through JSON and back, so that a state counts the same before and after a file
        theirs = json.loads(json.dumps(meta.get("spec")))
    except (TypeError, ValueError):
        theirs = None
    if not isinstance(theirs, dict):
        raise SnapshotError(
            f"state for a {what} must have a JSON dict meta['spec'], got "
            f"{type(meta.get('spec')).__name__}; pass what state_dict() returned"
        )
    found = list(_differences("", json.loads(json.dumps(spec)), theirs))
    if found:
        raise SnapshotError(
            f"state was made by another {what}: {'; '.join(found[:8])}; build the {what} with the "
            "state's values, or load the state that belongs to this one"
        )
    return meta, tensors


def _parts(name: str, state: object) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not isinstance(state, Mapping) or set(state) != {"meta", "tensors"}:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise SnapshotError(
            f"{name} must be a dict with the keys 'meta' and 'tensors', got {got}; pass what "
            "state_dict() returned"
        )
    meta, tensors = state["meta"], state["tensors"]
    if not isinstance(meta, Mapping):
        raise SnapshotError(
            f"meta of the {name} must be a dict, got {type(meta).__name__}; pass what "
            "state_dict() returned"
        )
    if not isinstance(tensors, Mapping):
        raise SnapshotError(
            f"tensors of the {name} must be a dict, got {type(tensors).__name__}; pass what "
            "state_dict() returned"
        )
    for key, tensor in tensors.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise SnapshotError(
                f"tensors of the {name} must map strings to tensors, got {key!r}: "
                f"{type(tensor).__name__}; keep everything else under 'meta'"
            )
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            raise SnapshotError(
                f"tensor {key!r} of the {name} must be dense and hold data, got layout "
                f"{tensor.layout} on {tensor.device}; convert it with to_dense()"
            )
    return dict(meta), dict(tensors)


def _differences(path: str, ours: object, theirs: object) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from _differences(
                f"{path}.{key}" if path else key, ours.get(key), theirs.get(key)
            )
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(f"{path}[{index}]", mine, other)
    elif ours != theirs:
        yield f"{path} is {_short(ours)} here and {_short(theirs)} in the state"


def _short(value: object) -> str:
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return f"a list of {len(value)}"
    return repr(value)
