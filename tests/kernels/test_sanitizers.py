"""The C code under AddressSanitizer and UndefinedBehaviorSanitizer, over random sizes."""

import shutil
import subprocess

import pytest

from gradgate import _native
from tests.kernels.test_library import ROOT, hatch_build

LEVELS = range(1 if _native.library is None else _native.LEVELS.index(_native.library.level) + 1)
"""Those that this processor runs."""

SANITIZERS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def builds(folder):
    """Tell whether the compiler of this machine has the sanitizers."""
    (folder / "empty.c").write_text("int main(void) { return 0; }")
    command = ["cc", *SANITIZERS, str(folder / "empty.c"), "-o", str(folder / "empty")]
    return shutil.which("cc") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_no_kernel_reads_or_writes_beyond_its_buffers(level, tmp_path):
    if not builds(tmp_path):
        pytest.skip("there is no C compiler with sanitizers")
    command = ["cc", *hatch_build.flags_for(["cc"]), *SANITIZERS, *hatch_build.LEVELS[level], "-O1"]
    command += ["-Wall", "-Wextra", "-Werror"]
    command += [f"-DLEVEL={level}", "-DROUNDS=300", "-DGRADGATE_KERNELS=1", "-I", str(hatch_build.FOLDER)]
    command += [str(ROOT / "tests" / "kernels" / "driver.c"), "-o", str(tmp_path / "driver"), "-lm", "-lpthread"]
    subprocess.run(command, check=True)
    done = subprocess.run([tmp_path / "driver"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
