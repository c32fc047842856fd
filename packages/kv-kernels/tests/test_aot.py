"""Every Triton kernel compiles for GPUs that this machine does not have."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kv_core.errors import SpecError
from kv_kernels import aot
from kv_kernels.triton_rules import rejects_interpreted

SHARED = {80: 163, 90: 227, 100: 227}  # KB that one program may have
LINE = re.compile(r"sm_(\d+) (.+): (\d+) bytes of shared memory, (\d+) warps, (\d+) bytes of code")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def test_every_kernel_compiles_for_ampere_hopper_and_blackwell(tmp_path: Path) -> None:
    # in its own process: where TRITON_INTERPRET is set, the interpreter replaces the compiler
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "kv_kernels.aot", *map(str, SHARED)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [LINE.match(line) for line in done.stdout.splitlines()]
    assert all(found)
    compiled = {(int(line[1]), line[2]) for line in found if line}
    names = [name for name, _ in aot.variants()]
    assert compiled == {(arch, name) for arch in SHARED for name in names}
    for line in found:
        assert line and int(line[3]) <= SHARED[int(line[1])] << 10, line[0]
        assert int(line[5]) > 1000, line[0]


def test_every_operation_has_a_kernel_among_them() -> None:
    from kv_kernels.registry import ROWS

    ours = {row.op for row in ROWS if row.backend == "triton"}
    names = {name.partition(" ")[0] for name, _ in aot.variants()}
    assert names == {op if op != "paged_decode_attention" else "attention" for op in ours}


def test_the_interpreter_is_refused_by_name() -> None:
    import torch
    from kv_core import KVFormat
    from kv_kernels.library import call_query

    int8, cpu = KVFormat.INT8, torch.device("cpu")
    query = call_query("gather", int8, int8, cpu, torch.float32, 16, True)
    if rejects_interpreted(query) is not None:
        pytest.skip("Triton compiles in this process")
    with pytest.raises(SpecError, match="TRITON_INTERPRET must not be set to compile"):
        aot.main(["90"])
