"""What the compiler makes of the kernel: registers, spills, and the order of loads and stores.

Eight 16-byte loads per lane must be in flight before the first store, or a link is half idle; the
compiler gives no other sign when it decides otherwise. So the machine code is read.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest

from tests.cuda_toolchain import ARCHITECTURES, CSRC, Workshop, binary_tool, nvcc, run

pytestmark = pytest.mark.cuda

KERNELS = [
    f"vkvmap_{direction}_u{variant}_{pairs}"
    for direction in ("store", "load")
    for variant in ("8_stream", "8_plain", "4_stream")
    for pairs in ("buffer", "params")
]

#: Loads of metadata go through the read-only path, loads of data never do.
DATA_LOAD = re.compile(r"\bLDG\.E(?!\S*CONSTANT)\S*\.128\b")
DATA_STORE = re.compile(r"\bSTG\.E\S*\.128\b")


def compile_for(architecture: int, workshop: Workshop) -> tuple[Path, str]:
    """The cubin, and what the assembler said about it."""

    def build(draft: Path) -> None:
        draft.mkdir()
        said = run(
            *(nvcc(), "-std=c++17", "-O3", "-I", CSRC, "-cubin", f"-arch=sm_{architecture}"),
            *("-Xptxas", "-v", CSRC / "cuda_kernels.cu", "-o", draft / "kernel.cubin"),
        )
        (draft / "assembler.txt").write_text(said)

    made = workshop.once(f"cubin-{architecture}", build)
    return made / "kernel.cubin", (made / "assembler.txt").read_text()


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory)


def functions_of(sass: str) -> dict[str, list[str]]:
    """Instructions by function, in order, without addresses and encodings."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in sass.splitlines():
        if start := re.match(r"\.text\.(\w+):", line):
            current = found.setdefault(start[1], [])
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+([^;]+);", line):
            current.append(instruction[1].strip())
    return found


def faults_of(instructions: list[str], unroll: int) -> list[str]:
    """What is wrong with the machine code of one kernel, in words."""
    faults = []
    sequence = [
        "load" if DATA_LOAD.search(i) else "store"
        for i in instructions
        if DATA_LOAD.search(i) or DATA_STORE.search(i)
    ]
    runs = [(kind, len(list(members))) for kind, members in groupby(sequence)]
    batches = 8 // unroll  # a tile of 4 KiB is eight units per lane
    if runs != [("load", unroll), ("store", unroll)] * batches:
        faults.append(f"128-bit data accesses come as {runs}, not {unroll} loads, {unroll} stores")
    for instruction in instructions:
        if re.search(r"\b(LDL|STL)\b", instruction):
            faults.append(f"local memory: {instruction}")
        # Calls to labels and to the warp barrier's slow path are the compiler's own.
        if re.search(r"\bCALL\b", instruction) and not re.search(r"\.L_x_|warpsync", instruction):
            faults.append(f"a subroutine: {instruction}")
        if re.search(r"_div_|_rem_|\bMUFU\.RCP64", instruction):
            faults.append(f"a division: {instruction}")
    return faults


def loop_of(instructions: list[str]) -> list[str]:
    """From the first wide data load to the last wide data store: one pass over an item."""
    wide = [n for n, i in enumerate(instructions) if DATA_LOAD.search(i) or DATA_STORE.search(i)]
    return instructions[wide[0] : wide[-1] + 1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_spills_and_registers_leave_room_for_512_threads(
    architecture: int, workshop: Workshop
) -> None:
    _, said = compile_for(architecture, workshop)
    entries = re.findall(
        r"Compiling entry function '(\w+)'.*?\n"
        r"(?:.*\n)*?\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*?Used (\d+) registers",
        said,
    )
    assert sorted(name for name, *_ in entries) == sorted(KERNELS)
    for name, stack, stores, loads, registers in entries:
        assert (int(stack), int(stores), int(loads)) == (0, 0, 0), f"{name} spills"
        assert int(registers) <= 128, f"{name} uses {registers} registers"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_loads_of_a_batch_precede_its_first_store(
    architecture: int, workshop: Workshop
) -> None:
    cubin, _ = compile_for(architecture, workshop)
    functions = functions_of(run(binary_tool("nvdisasm"), "-c", cubin))
    assert sorted(functions) == sorted(KERNELS)
    faults = {
        name: found
        for name, instructions in functions.items()
        if (found := faults_of(instructions, int(re.search(r"_u(\d)_", name)[1])))
    }
    assert faults == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_loop_over_items_does_not_divide(architecture: int, workshop: Workshop) -> None:
    cubin, _ = compile_for(architecture, workshop)
    for name, instructions in functions_of(run(binary_tool("nvdisasm"), "-c", cubin)).items():
        reciprocals = [i for i in loop_of(instructions) if "MUFU" in i or "I2F" in i]
        assert reciprocals == [], name


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda code: [*code[:5], code[9], *code[5:9], *code[10:]], "128-bit data accesses come"),
        (lambda code: code[1:], "128-bit data accesses come"),
        (lambda code: [c.replace(".128", ".64") for c in code], "128-bit data accesses come"),
        (lambda code: [*code, "LDL.64 R4, [R1]"], "local memory"),
        (lambda code: [*code, "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_u64)"], "a subrou"),
    ],
)
def test_the_reader_of_machine_code_sees_faults(edit, fault: str) -> None:
    good = [
        *(f"@!P{n % 6} LDG.E.NA.128 R{4 * n}, desc[UR8][R14.64]" for n in range(8)),
        "LDG.E.128.CONSTANT R40, desc[UR8][R56.64]",
        *(f"@!P{n % 6} STG.E.EF.128 desc[UR8][R14.64], R{4 * n}" for n in range(8)),
    ]
    assert faults_of(good, 8) == []
    assert any(f.startswith(fault) for f in faults_of(edit(good), 8))
