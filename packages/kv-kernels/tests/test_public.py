"""The surface of the package: names, and what importing it costs."""

import pkgutil
import subprocess
import sys

import kv_kernels


def test_importing_loads_neither_triton_nor_a_compiler_nor_cuda() -> None:
    code = (
        "import sys, kv_kernels, torch; "
        "heavy = ('triton', 'torch._dynamo', 'torch._inductor'); "
        "print([m for m in sys.modules if m.startswith(heavy)], torch.cuda.is_initialized())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[] False"


def test_no_exported_name_hides_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(kv_kernels.__path__)}
    assert not modules & set(kv_kernels.__all__)
    assert all(hasattr(kv_kernels, name) for name in kv_kernels.__all__)
    assert {"slot_attention", "SegmentMask", "find", "explain"} <= set(kv_kernels.__all__)
