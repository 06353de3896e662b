"""A library for CUDA, Vulkan or Metal that cannot be built here says all that is missing, before anything is compiled."""
from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: CMake looks at the compiler once."""
    return tmp_path_factory.mktemp("configured")


def refusal(folder: Path, accelerator: str, *options: str, **env: str) -> list[str]:
    """The lines of CMake's error that name what is missing."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        cmake = importlib.import_module("build_lib").program("cmake")
    finally:
        sys.path.remove(str(ROOT / "tools"))
    done = subprocess.run([cmake, "-S", str(ROOT / "libsrc"), "-B", str(folder), f"-DPYL_ACCELERATOR={accelerator}", *options], env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    assert "engine archives" not in done.stdout, "it refuses before it compiles"
    said = " ".join(done.stderr.split())
    head, _, listed = said.rpartition(f"PYL_ACCELERATOR={accelerator} cannot be built here. It needs: - ")
    return listed.partition(" Call Stack")[0].split(" - ") if head else [said]


@pytest.mark.slow
def test_cuda_without_a_toolkit(folder: Path) -> None:
    compiler, runtime, cublas = refusal(folder, "cuda", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON", "-DPYL_CUBLAS_INCLUDE=PYL_CUBLAS_INCLUDE-NOTFOUND", CUDACXX="/nowhere/nvcc")
    assert "nvcc" in compiler
    assert "CUDACXX" in compiler
    assert "libcudart" in runtime
    assert "cublas_v2.h" in cublas


@pytest.mark.slow
def test_vulkan_without_anything(folder: Path) -> None:
    headers, shaders, spirv = refusal(folder, "vulkan", "-DCMAKE_DISABLE_FIND_PACKAGE_Vulkan=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_SPIRV-Headers=ON", "-DVulkan_GLSLC_EXECUTABLE=Vulkan_GLSLC_EXECUTABLE-NOTFOUND")
    assert "libvulkan" in headers
    assert "glslc" in shaders
    assert "spirv-headers" in spirv


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="Metal is there")
def test_metal_away_from_a_mac(folder: Path) -> None:
    [said] = refusal(folder, "metal")
    assert "macOS" in said


@pytest.mark.slow
def test_an_accelerator_nobody_knows(folder: Path) -> None:
    [said] = refusal(folder, "abacus")
    assert "PYL_ACCELERATOR=abacus is none of" in said
