"""Versions that loaded libraries tell of themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_ep.results.libraries import cuda_driver
from pytest_ep.results.libraries import nccl_loaded

MAPS = """\
7f00-7f01 r--p 00000000 fe:00 11 /env/nvidia/nccl/lib/libnccl.so.2
7f01-7f02 r-xp 00001000 fe:00 11 /env/nvidia/nccl/lib/libnccl.so.2
7f02-7f03 r-xp 00000000 fe:00 12 /opt/carried/lib/libnccl.so.2.30.7
7f03-7f04 r-xp 00000000 fe:00 13 /env/nccl_ep/lib/libnccl_ep.so
7f04-7f05 r-xp 00000000 fe:00 14 /opt/libnccl-net.so
7f05-7f06 rw-p 00000000 00:00 0
"""
VERSIONS = {"/env/nvidia/nccl/lib/libnccl.so.2": 22809, "/opt/carried/lib/libnccl.so.2.30.7": 23007}


def test_each_mapped_nccl_is_asked_once_and_what_extends_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "maps").write_text(MAPS)
    asked: list[tuple[str, str]] = []

    def ask(library: str, function: str) -> int:
        asked.append((library, function))
        return VERSIONS[library]

    assert nccl_loaded(tmp_path / "maps", ask) == ["2.28.9", "2.30.7"]
    assert asked == [(library, "ncclGetVersion") for library in VERSIONS]


@pytest.mark.parametrize(("number", "version"), [(2804, "2.8.4"), (20903, "2.9.3"), (22809, "2.28.9")])
def test_both_of_nccl_s_ways_to_number_versions_are_read(tmp_path: Path, number: int, version: str) -> None:
    (tmp_path / "maps").write_text("7f-80 r-xp 0 0 1 /opt/rocm/lib/librccl.so.1.0\n")
    assert nccl_loaded(tmp_path / "maps", lambda library, function: number) == [version]


def test_a_library_that_is_not_loaded_is_not_loaded_to_be_asked(tmp_path: Path) -> None:
    (tmp_path / "maps").write_text("7f-80 r-xp 0 0 1 /nowhere/libnccl.so.2\n")
    assert nccl_loaded(tmp_path / "maps") == []
    assert nccl_loaded(tmp_path / "none") == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_library_in_this_process_answers_and_a_copy_elsewhere_is_not_asked(tmp_path: Path) -> None:
    code = "int ncclGetVersion(int *v) { *v = 23007; return 0; }"
    library = tmp_path / "libnccl.so.2"
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=code, text=True, check=True)
    (tmp_path / "maps").write_text(f"7f-80 r-xp 0 0 1 {library}\n")  # as of another process
    program = (
        "import ctypes; from pathlib import Path; from pytest_ep.results.libraries import nccl_loaded;"
        f"before = nccl_loaded(Path({str(tmp_path / 'maps')!r}));"
        f"held = ctypes.CDLL({str(library)!r}); print(before, nccl_loaded())"
    )
    run = [sys.executable, "-c", program]
    said = subprocess.run(
        run, capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert said.stdout == "[] ['2.30.7']\n"


def test_the_driver_s_cuda_is_two_numbers_and_null_without_a_driver() -> None:
    assert cuda_driver(lambda library, function: 13010) == "13.1"
    assert cuda_driver(lambda library, function: None) is None
