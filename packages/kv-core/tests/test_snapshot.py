"""States on disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_core import SnapshotError, SpecError, load, save, spec_hash
from safetensors.torch import save_file

STATE: dict[str, Any] = {"meta": {"a": [1, 2.5, None, True], "ü": {"x": "y"}}, "tensors": {}}


def special() -> dict[str, torch.Tensor]:
    """Tensors of every kind that a state may hold."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    return {
        "bf16 of all bits": bits.view(torch.bfloat16),
        "fp16 of all bits": bits.view(torch.float16),
        "int8": torch.arange(-128, 128).to(torch.int8),
        "int64": torch.tensor([2**63 - 1, -(2**63)]),
        "bool": torch.tensor([True, False]),
        "no rows": torch.zeros(2, 0, 4, dtype=torch.bfloat16),
        "scalar": torch.tensor(-0.0),
        "transposed": base.t(),
        "every other": base[::2, 1::3],
        "expanded": base[:1].expand(5, 8),
        "shares memory": base,
        "also shares": base[2:],
        "requires grad": base.clone().requires_grad_(),
        "nan": torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-45]),
    }


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path, raw: Callable) -> None:
    tensors = special()
    save(tmp_path / "state", {"meta": STATE["meta"], "tensors": tensors})
    back = load(tmp_path / "state")
    assert back["meta"] == STATE["meta"] and set(back["tensors"]) == set(tensors)
    for name, tensor in tensors.items():
        got = back["tensors"][name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        assert raw(got) == raw(tensor), name
        assert not got.requires_grad
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_what_was_loaded_does_not_need_the_file_or_its_neighbours(tmp_path: Path) -> None:
    x = torch.arange(6.0)
    save(tmp_path / "state", {"meta": {}, "tensors": {"a": x, "b": x + 1}})
    back = load(tmp_path / "state")["tensors"]
    (tmp_path / "state").write_bytes(b"\0" * 4096)
    back["a"].fill_(9)
    assert torch.equal(back["b"], x + 1)


def test_load_puts_tensors_where_asked(tmp_path: Path) -> None:
    save(tmp_path / "state", {"meta": {}, "tensors": {"a": torch.ones(2)}})
    assert load(tmp_path / "state", device="meta")["tensors"]["a"].device.type == "meta"


def fail_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)


def fail_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)


def fail_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kv_core.snapshot.save_file", half)


@pytest.mark.parametrize("fail", [fail_replace, fail_flush, fail_writing])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    fail: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    save(path, {"meta": {"n": 1}, "tensors": {"a": torch.ones(3)}})
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        fail(patch)
        with pytest.raises(SnapshotError, match=r"could not be written: .*Errno.*untouched"):
            save(path, {"meta": {"n": 2}, "tensors": {"a": torch.zeros(3)}})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    save(path, {"meta": {"n": 2}, "tensors": {"a": torch.zeros(3)}})
    assert load(path)["meta"] == {"n": 2}


def test_an_interrupt_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "state", STATE)
    assert not list(tmp_path.iterdir())


def test_the_data_is_on_disk_before_the_name_points_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, fsync, replace = [], os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"
        order.append(kind)
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        assert Path(source).parent == Path(target).parent
        order.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", replaced)
    save(tmp_path / "state", STATE)
    if os.path.exists("/proc/self/fd"):
        assert order == ["file", "replace", "folder"]


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    save(tmp_path / "state", STATE)
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_every_way_of_cutting_a_file_short_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save(path, {"meta": {"n": 1}, "tensors": {"a": torch.ones(40)}})
    whole = path.read_bytes()
    for kept in [0, 1, 7, 8, 9, 60, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:kept])
        with pytest.raises(
            SnapshotError, match=r"is not a whole saved state .*save the state again"
        ):
            load(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(SnapshotError, match="is not a whole saved state"):
        load(path)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    for content in (b"PK\x03\x04" + bytes(100), b"hello " * 20, bytes(200), b"\xff" * 64):
        foreign.write_bytes(content)
        with pytest.raises(SnapshotError, match="is not a whole saved state"):
            load(foreign)
    for metadata in (None, {"format": "pt"}, {"kv_core.state": "{}", "kv_core.version": "2"}):
        save_file({"a": torch.ones(2)}, foreign, metadata=metadata)
        with pytest.raises(SnapshotError, match="not a saved state of version 1; pass a file that"):
            load(foreign)
    save_file({}, foreign, metadata={"kv_core.state": "{", "kv_core.version": "1"})
    with pytest.raises(SnapshotError, match="is not a whole saved state"):
        load(foreign)


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(SnapshotError, match="is not a file; pass the path that a state was"):
            load(path)
    with pytest.raises(SnapshotError, match=r"could not be written.*another folder"):
        save(tmp_path / "none" / "state", STATE)
    with pytest.raises(SnapshotError, match="could not be written"):
        save(tmp_path, STATE)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"meta": {"x": {1, 2}}, "tensors": {}},
            "meta of the state must be JSON, got a value that",
        ),
        ({"meta": {"x": float("nan")}, "tensors": {}}, "meta of the state must be JSON"),
        ({"meta": {"x": torch.ones(1)}, "tensors": {}}, "put tensors under 'tensors'"),
        ({"meta": {}}, r"keys 'meta' and 'tensors', got \['meta'\]"),
        ({"meta": {}, "tensors": {"a": 1}}, "map strings to tensors, got 'a': int"),
        (
            {"meta": {}, "tensors": {"a": torch.ones(1, device="meta")}},
            "must be dense and hold data",
        ),
    ],
)
def test_what_is_no_state_is_not_saved(state: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=words):
        save(tmp_path / "state", state)
    assert not list(tmp_path.iterdir())


def test_a_spec_hash_does_not_depend_on_the_order_of_keys() -> None:
    spec = {"b": [1, {"y": None, "x": "ü"}], "a": 2.5}
    other = {"a": 2.5, "b": (1, {"x": "ü", "y": None})}
    assert spec_hash(spec) == spec_hash(other)
    # fixed, for files of one version must be readable by the next
    assert spec_hash({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert len({spec_hash(spec), spec_hash({**spec, "a": 2}), spec_hash({"a": 2.5})}) == 3
    with pytest.raises(SpecError, match="spec must be JSON, got a value that is not"):
        spec_hash({"a": object()})
