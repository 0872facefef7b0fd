"""Builds the native kernels: when the package is installed (a hatchling hook), or in place: `python hatch_build.py`.

Without a compiler there is no library; the package then runs on torch alone. `CC` names another compiler.
"""

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # in place, where hatchling is not installed
    BuildHookInterface = object

FOLDER = Path(__file__).parent / "src" / "gradgate" / "_native"
LIBRARY = FOLDER / "kernels.so"
FLAGS = [
    "-O2",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the same bits on every processor
    "-Wno-psabi",
]
# What -O3 does to loops; all of -O3 takes three times as long to compile. clang does it at -O2, and refuses the flags.
FLAGS_OF_GCC = ["-ftree-loop-vectorize", "-fvect-cost-model=dynamic"]
# One object file for each level of the processor; kernels.c says which level is which.
IS_X86 = platform.machine() in ("x86_64", "AMD64")
LEVELS = [["-O1"], ["-mavx2"], ["-mavx512bw", "-mavx512vl", "-mavx512dq"]] if IS_X86 else [[]]


def sources_version(folder: Path = FOLDER) -> int:
    """Give the number that a library and the sources beside it share; `_native/__init__.py` computes the same."""
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]")))
    return zlib.crc32(text) & 0x7FFFFFFF


def flags_for(compiler: list[str]) -> list[str]:
    """Give the flags that a compiler takes; OSError if it cannot be run."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return FLAGS if "clang" in version else [*FLAGS, *FLAGS_OF_GCC]


def build(library: Path = LIBRARY, flags: tuple[str, ...] = ()) -> str | None:
    """Compile the library; give None, or why there is none."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    library.unlink(missing_ok=True)
    with TemporaryDirectory() as scratch:
        objects = [f"{scratch}/level{level}.o" for level in range(len(LEVELS))]
        try:
            common = [*flags_for(compiler), f"-DGRADGATE_KERNELS={sources_version()}", *flags]
            commands = [
                [*compiler, *common, *extra, f"-DLEVEL={level}", "-c", str(FOLDER / "kernels.c"), "-o", objects[level]]
                for level, extra in enumerate(LEVELS)
            ]
            running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
            said = [process.communicate()[1] for process in running]
            if any(process.returncode for process in running):
                return f"{shlex.join(compiler)} failed: {''.join(said).strip()[:2000] or 'it says nothing'}"
            made = f"{scratch}/kernels.so"  # moved when it is whole, so that nobody loads half of it
            link = [*compiler, "-shared", *flags, *objects, "-o", made, "-lm", "-lpthread"]
            subprocess.run(link, check=True, capture_output=True, text=True)
            library.write_bytes(Path(made).read_bytes())
        except OSError as error:
            return f"{shlex.join(compiler)} cannot be run: {error}"
        except subprocess.CalledProcessError as error:
            return f"{shlex.join(compiler)} cannot link: {error.stderr.strip()[:2000]}"
    return None


class KernelsHook(BuildHookInterface):
    """Puts the library into the wheel, and into the source folder of an editable install."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Compile before the files of the wheel are collected."""
        reason = build()
        if reason is not None:
            self.app.display_warning(f"gradgate runs without native kernels: {reason}")
            return
        build_data["artifacts"].append("src/gradgate/_native/kernels.so")
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    why_not = build()
    sys.exit(why_not and f"no native kernels: {why_not}")
