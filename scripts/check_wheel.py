"""check_wheel.py WHEEL: fail unless it carries one native module that needs the C library alone.

A CUDA library that is bundled, or that the module asks the loader for, would keep the wheel from
importing where that library is not, and would clash where another one is.
"""

from __future__ import annotations

import io
import sys
import zipfile

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

#: What every Linux has, which is also what manylinux allows.
SYSTEM = {
    "libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libgcc_s.so.1",
    "libstdc++.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip


def needed(raw: bytes) -> list[str]:
    """The libraries that the shared object asks the loader for."""
    found = ELFFile(io.BytesIO(raw))
    dynamic = [section for section in found.iter_sections() if isinstance(section, DynamicSection)]
    return [tag.needed for section in dynamic for tag in section.iter_tags("DT_NEEDED")]


def main() -> None:
    wheel = zipfile.ZipFile(sys.argv[1])
    objects = [name for name in wheel.namelist() if ".so" in name or name.endswith(".a")]
    if len(objects) != 1 or not objects[0].startswith("vkvmap/_C."):
        sys.exit(f"{sys.argv[1]}: one native module is expected, there are {objects}")
    libraries = needed(wheel.read(objects[0]))
    print(f"{objects[0]} needs {', '.join(libraries)}")
    if set(libraries) - SYSTEM:
        sys.exit(f"{sys.argv[1]}: {sorted(set(libraries) - SYSTEM)} are not on every machine")


if __name__ == "__main__":
    main()
