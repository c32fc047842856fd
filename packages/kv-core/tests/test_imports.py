"""What importing the package does, and what it offers."""

import os
import subprocess
import sys
from pathlib import Path

import kv_core

SOURCE = Path(kv_core.__file__).parent


def test_import_loads_neither_triton_nor_cuda() -> None:
    code = (
        "import sys, kv_core, torch\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'triton'], 'triton'\n"
        "assert not torch.cuda.is_initialized(), 'CUDA'\n"
        "assert not [m for m in sys.modules if m.startswith(('kv_kernels', 'kv_rollout'))]\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists_and_hides_no_submodule() -> None:
    submodules = {path.stem for path in SOURCE.iterdir() if path.name != "__init__.py"}
    assert len(kv_core.__all__) == len(set(kv_core.__all__))
    assert not submodules & set(kv_core.__all__)
    for name in kv_core.__all__:
        assert getattr(kv_core, name).__doc__, name
