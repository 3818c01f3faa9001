"""Lay the stand-in out as an installation: distributions with versions, found by a child's PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

FAKES = Path(__file__).resolve().parent
PREBUILT = """\
from pathlib import Path

__version__ = "{version}"


def {function}():
    return str(Path(__file__).parent / "modules")
"""


def write_distribution(folder: Path, name: str, version: str) -> None:
    """Make ``importlib.metadata`` find ``name`` at ``version``."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def install(
    folder: Path, version: str, fault: str = "", jit_cache: str = "", cubin: str = ""
) -> dict[str, str]:
    """The environment in which flashinfer is the stand-in for ``version``, with what goes wrong.

    ``jit_cache`` and ``cubin`` install those packages at a version; kernels are built under ``folder``.
    """
    site = folder / "site"
    write_distribution(site, "flashinfer-python", version)
    for name, function, packaged in (
        ("flashinfer-jit-cache", "get_jit_cache_dir", jit_cache),
        ("flashinfer-cubin", "get_cubin_dir", cubin),
    ):
        if packaged:
            write_distribution(site, name, packaged)
            module = PREBUILT.format(version=packaged, function=function)
            (site / f"{name.replace('-', '_')}.py").write_text(module)
    return {
        "PYTHONPATH": f"{site}:{FAKES}",
        "PYTEST_EP_FAKE_FLASHINFER": version,
        "PYTEST_EP_FAKE_FAULT": fault,
        "FLASHINFER_WORKSPACE_BASE": str(folder),
    }
