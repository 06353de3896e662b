"""The loader, importing without loading, and who may import or include whom.

Whatever loads (or must not load) the library runs in a child process, so that this one's library plays no part.
"""
from __future__ import annotations

import ast
import ctypes
import ctypes.util
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import pylloyal

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pylloyal"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="builds and reads ELF files")


def child(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh Python that is strict about warnings."""
    kept = {k: v for k, v in os.environ.items() if k != "PYLLOYAL_LIBRARY"} | {"PYTHONPATH": str(ROOT)} | env
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code), *args]
    return subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60, check=False)


def fine(code: str, *args: str, **env: str) -> str:
    """What the child printed; it must have ended well and in silence."""
    done = child(code, *args, **env)
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout}\n{done.stderr}"
    return done.stdout


def compile_library(path: Path, source: str, *options: str) -> Path:
    file = path.with_suffix(".c")
    file.write_text(source, encoding="utf-8")
    subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC", "-o", str(path), str(file), *options], check=True)
    return path


# ------------------------------------------------------------------------------------------------- libraries that are none

LOAD = """
import os
from pylloyal import errors
from pylloyal._ffi import load
try:
    load.library()
except errors.LibraryError as error:
    assert isinstance(error, ImportError) and isinstance(error, errors.PylloyalError)
    print(type(error).__name__)
    print(error)
assert load._library is None and load._path is None
"""


def refusal(library: Path | str) -> tuple[str, str]:
    """Name of the exception the loader raises, and its message."""
    kind, _, message = fine(LOAD, PYLLOYAL_LIBRARY=str(library)).partition("\n")
    return kind, message


def assert_says(message: str, *what: str) -> None:
    for text in (*what, "tools/bootstrap.py lib"):
        assert text in message, message
    assert "Traceback" not in message


def test_library_that_is_not_there(tmp_path: Path) -> None:
    kind, message = refusal(tmp_path / "nowhere.so")
    assert kind == "LibraryNotFoundError"
    assert_says(message, str(tmp_path / "nowhere.so"), "no such file")
    assert message.count("no such file") == 1, "with PYLLOYAL_LIBRARY set, nowhere else is looked"


def test_library_that_is_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("this is not a library\n" * 100, encoding="utf-8")
    kind, message = refusal(path)
    assert kind == "LibraryNotFoundError"
    assert_says(message, str(path), "not a library", platform.machine(), platform.system())
    assert re.search(r"invalid ELF header|not a mach-o|file too short", message), "the reason, in the words of the system"


def test_library_that_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.so"
    path.touch()
    kind, message = refusal(path)
    assert kind == "LibraryNotFoundError"
    assert_says(message, str(path), "not a library", platform.machine())


def test_library_that_is_a_folder(tmp_path: Path) -> None:
    """The build folder instead of the file in it: an easy slip, and no reason for a bare IsADirectoryError."""
    kind, message = refusal(tmp_path)
    assert kind == "LibraryNotFoundError"
    assert_says(message, str(tmp_path))


@linux_only
@pytest.mark.parametrize(("number", "name"), [(183, "arm64"), (62, "x86-64"), (243, "riscv64"), (8, "unknown")])
def test_library_for_another_machine(number: int, name: str, tmp_path: Path) -> None:
    if name == {"x86_64": "x86-64", "aarch64": "arm64"}.get(platform.machine()):
        pytest.skip("that is this machine")
    path = tmp_path / "foreign.so"
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, number, 1, 0, 64, 0, 0, 64, 56, 0, 64, 0, 0))
    assert path.stat().st_size == 64
    kind, message = refusal(path)
    assert kind == "LibraryNotFoundError"
    assert_says(message, str(path), "ELF", name, f"{platform.machine()} {platform.system()}")


@linux_only
def test_library_whose_own_libraries_are_missing(tmp_path: Path) -> None:
    compile_library(tmp_path / "libgone.so", "int gone(void) { return 1; }")
    path = compile_library(tmp_path / "needs.so", "int gone(void); int pyl_abi_version(void) { return gone(); }", "-L", str(tmp_path), "-lgone")
    (tmp_path / "libgone.so").unlink()
    kind, message = refusal(path)
    assert kind == "LibraryNotFoundError"
    assert_says(message, str(path), "libgone.so")


@linux_only
def test_real_library_that_is_not_ours() -> None:
    name = ctypes.util.find_library("m")
    assert name
    ctypes.CDLL(name)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    path = next(found for line in maps.splitlines() if (found := line.split()[-1]).endswith((f"/{name}", "/libm.so.6")))
    kind, message = refusal(path)
    assert kind == "ABIMismatchError"
    assert_says(message, path, "pyl_abi_version", "not libpylloyal")


@linux_only
def test_library_of_another_abi(tmp_path: Path) -> None:
    path = compile_library(tmp_path / "other.so", "int pyl_abi_version(void) { return 999; }")
    kind, message = refusal(path)
    assert kind == "ABIMismatchError"
    assert_says(message, str(path), "999", "needs 1")


@linux_only
@pytest.mark.slow
def test_library_that_claims_our_abi_but_lacks_functions(tmp_path: Path) -> None:
    """A build from a header in the middle of its making: the error says which function is missing, not a bare AttributeError."""
    path = compile_library(tmp_path / "half.so", "int pyl_abi_version(void) { return 1; }")
    kind, message = refusal(path)
    assert kind == "ABIMismatchError"
    assert_says(message, str(path), "pyl_abi_layout")


# ------------------------------------------------------------------------------------------------------------ libraries that are


@pytest.mark.slow
def test_opening_a_store_imports_no_more_than_it_needs() -> None:
    """Each of these is a megabyte or more in every process, and milliseconds of its start, for hardly anything."""
    code = """
    import sys, numpy, dataclasses
    before = set(sys.modules)
    import pylloyal
    with pylloyal.Model("stub:") as model, model.store(n_ctx=256, n_branches=2) as store:
        root = store.root()
        root.prefill([65])
        store.tick([root])
    print(sorted({"hashlib", "_hashlib", "secrets", "tempfile", "importlib.resources", "psutil", "argparse", "asyncio", "subprocess"} & (set(sys.modules) - before)))
    """
    assert fine(code).strip() == "[]"


@pytest.mark.slow
def test_loads_from_the_package_by_an_absolute_path(tmp_path: Path) -> None:
    code = """
    import os, sys, pathlib, pylloyal
    from pylloyal._ffi import load
    os.chdir(sys.argv[1])
    path = pathlib.Path(pylloyal.get_library())
    assert path.is_absolute() and path.is_file() and path == load.candidates()[-1], path
    assert load.library() is load.library()
    assert pylloyal.system_info()["library"] == str(path)
    print(path.parent.name)
    """
    assert fine(code, str(tmp_path)).strip() == f"{platform.system()}-{platform.machine()}".lower()


@pytest.mark.slow
def test_a_bare_name_is_a_path_and_not_searched_for(tmp_path: Path) -> None:
    """No search through the system's library paths: a stranger's library is never picked up by name."""
    name = ctypes.util.find_library("m")
    assert name
    kind, message = refusal(name)
    assert kind == "LibraryNotFoundError"
    assert_says(message, "no such file")
    library = fine("import pylloyal; print(pylloyal.get_library())").strip()
    (tmp_path / "here.so").symlink_to(library)
    code = """
    import os, sys
    os.chdir(sys.argv[1])
    os.environ["PYLLOYAL_LIBRARY"] = "here.so"
    import pylloyal
    print(pylloyal.get_library())
    """
    assert fine(code, str(tmp_path)).strip() == str(tmp_path / "here.so")


@pytest.mark.slow
def test_a_failed_load_is_tried_again(tmp_path: Path) -> None:
    code = """
    import os, sys
    import pylloyal
    for _ in range(2):
        os.environ["PYLLOYAL_LIBRARY"] = sys.argv[1]
        try:
            pylloyal.Model("stub:")
        except pylloyal.errors.LibraryNotFoundError:
            pass
        else:
            raise SystemExit("loaded what is not there")
    del os.environ["PYLLOYAL_LIBRARY"]
    with pylloyal.Model("stub:") as model:
        assert len(model.vocab) == 300
    """
    fine(code, str(tmp_path / "nowhere.so"))


def test_threads_that_load_at_once_get_one_library() -> None:
    code = """
    import threading
    from pylloyal._ffi import load
    start, got = threading.Barrier(8), []
    def body():
        start.wait()
        got.append(load.library())
    threads = [threading.Thread(target=body) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(got) == 8 and len({id(x) for x in got}) == 1
    assert all(f.errcheck for name, _, _, is_status in load.capi.PROTOTYPES if is_status for f in [getattr(got[0], name)])
    """
    fine(code)


@linux_only
@pytest.mark.slow
def test_a_foreign_engine_in_the_process_is_not_called(tmp_path: Path) -> None:
    """A library loaded before ours, for all to see, exports llama.cpp's names; ours must use its own copy."""
    names = ("llama_backend_init", "llama_log_set", "llama_print_system_info", "llama_model_default_params", "llama_model_load_from_file", "llama_free",
             "llama_decode", "llama_max_devices", "ggml_log_set", "ggml_time_init", "ggml_time_us", "ggml_init", "ggml_free", "ggml_abort",
             "ggml_backend_dev_count", "ggml_backend_dev_get", "ggml_backend_reg_count", "ggml_backend_reg_get", "ggml_backend_load_all",
             "ggml_backend_cpu_reg", "ggml_cpu_init", "gguf_init_from_file", "gguf_free", "mtmd_default_marker")
    decoy = compile_library(tmp_path / "decoy.so", "#include <stdlib.h>\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in names))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(200))
    code = """
    import ctypes, os, sys
    foreign = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
    assert foreign.llama_decode
    import pylloyal
    info = pylloyal.system_info()
    assert info["engine"]["name"] == "llama.cpp" or "stub" in info["engine"]["name"], info
    for path in (sys.argv[2], "nowhere.gguf"):
        try:
            pylloyal.Model(path)
        except pylloyal.PylloyalError as error:
            print(type(error).__name__)
    if model := os.environ.get("PYLLOYAL_TEST_MODEL"):
        with pylloyal.Model(model) as m, m.store(n_ctx=256) as s, s.root() as b:
            b.prefill("hello")
            assert b.logits().shape == (len(m.vocab),)
    """
    assert fine(code, str(decoy), str(tmp_path / "broken.gguf")).split() in (["FormatError", "KernelIOError"], ["UnsupportedOperationError"] * 2)


# -------------------------------------------------------------------------------------------------------- a quiet import

QUIET = """
import sys
import pylloyal
{then}
loaded = {{"numpy", "av", "PIL", "gguf", "psutil", "ctypes", "_ctypes", "rich", "importlib.metadata"}} & sys.modules.keys()
assert not loaded, loaded
own = {{name for name in sys.modules if name.startswith("pylloyal.")}}
assert own <= {allowed}, own
maps = ""
if sys.platform == "linux":
    with open("/proc/self/maps") as file:
        maps = file.read()
assert "pylloyal.so" not in maps and "pylloyal.dylib" not in maps and "_ctypes" not in maps, maps
"""


@pytest.mark.parametrize(("then", "allowed"), [
    ("", set()),
    ("dir(pylloyal); repr(pylloyal)", set()),
    ("hasattr(pylloyal, 'nothing_of_that_name')", set()),
    ("pylloyal.errors.ClosedError; pylloyal.PylloyalError", {"pylloyal.errors"}),
    ("pylloyal.get_include()", set()),
], ids=["import", "dir", "unknown name", "errors", "get_include"])
def test_import_loads_neither_packages_nor_the_library(then: str, allowed: set[str]) -> None:
    fine(QUIET.format(then=then, allowed=allowed or "set()"))


@pytest.mark.slow
def test_every_public_name_is_there_and_loads_no_library() -> None:
    """Names resolve to what they say, without opening the library: that waits for the first model."""
    code = """
    import sys, pylloyal
    for name in pylloyal.__all__:
        if name != "__version__":
            assert getattr(pylloyal, name) is not None
        assert name in dir(pylloyal)
    for name, home in pylloyal._HOME.items():
        assert getattr(pylloyal, name).__module__ == f"pylloyal.{home}", name
    from pylloyal import *
    assert Model is pylloyal.Model
    loaded = {"av", "PIL", "gguf", "psutil"} & sys.modules.keys()
    assert not loaded, loaded
    from pylloyal._ffi import load
    assert load._library is None
    """
    fine(code.replace("from pylloyal import *", "from pylloyal import Model"))


# ------------------------------------------------------------------------------------------------------------- Python's layers

# package -> (packages of ours it may import, third-party packages it may import); docs/architecture.md has the same table
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "_ffi": ({"errors"}, {"numpy"}),
    "kernel": ({"errors", "_ffi"}, {"numpy"}),
    "capacity": ({"errors"}, {"gguf", "psutil", "numpy"}),
    "sources": ({"errors", "kernel"}, {"numpy", "PIL", "av"}),
    "opening": ({"errors", "kernel", "capacity"}, set()),
    "bench": ({"errors", "_ffi", "kernel", "capacity"}, {"numpy"}),
    "agents": ({"errors", "kernel", "capacity", "opening"}, set()),
    "session": ({"errors", "kernel", "capacity", "sources", "opening"}, set()),
}
EVERYTHING = {"errors", "_ffi", "kernel", "capacity", "sources", "opening", "bench", "agents", "session", "cli"}
LAYERS |= {"cli": (EVERYTHING | {"get_include"}, {"rich", "numpy", "PIL"}), "__main__": (EVERYTHING, set()), "__init__": (EVERYTHING, set())}
IN_FUNCTIONS_ONLY = {"PIL", "av"}
CTYPES = {"_ffi"}


def modules() -> Iterator[tuple[str, Path]]:
    """(package or top-level module, file) of every Python file of ours."""
    for path in sorted(PACKAGE.rglob("*.py")):
        first = path.relative_to(PACKAGE).parts[0]
        yield first.removesuffix(".py"), path


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(absolute name, whether it is in a function or for type checkers only, line) of every import in a file."""
    here = ["pylloyal", *path.relative_to(PACKAGE).parent.parts]

    def walk(node: ast.AST, inner: bool) -> Iterator[tuple[str, bool, int]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, inner, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*(here[: len(here) - node.level + 1] if node.level else []), *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", inner, node.lineno) for alias in node.names)
        inner = inner or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for sub in ast.iter_child_nodes(node):
            yield from walk(sub, inner)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False)


def layer_problems(package: str, path: Path) -> list[str]:
    if package not in LAYERS:
        return [f"{package} is not in the table of layers"]
    own, third = LAYERS[package]
    found = []
    for name, in_function, line in imports(path):
        top, *rest = name.split(".")
        where = f"{path.relative_to(ROOT)}:{line}"
        if top == "pylloyal":
            layer = pylloyal._HOME.get(rest[0], rest[0]).split(".")[0] if rest else package
            if layer != package and layer not in own:
                found.append(f"{where}: {package} imports {layer}")
        elif top == "ctypes" and package not in CTYPES:
            found.append(f"{where}: only {CTYPES} may import ctypes")
        elif top not in sys.stdlib_module_names and top not in third:
            found.append(f"{where}: {package} imports {top}")
        elif top in IN_FUNCTIONS_ONLY and not in_function:
            found.append(f"{where}: {top} is to be imported in the function that needs it")
    return found


@pytest.mark.parametrize(("package", "path"), list(modules()), ids=lambda v: v.relative_to(PACKAGE).as_posix() if isinstance(v, Path) else v)
def test_python_layers(package: str, path: Path) -> None:
    assert layer_problems(package, path) == []


@pytest.mark.parametrize(("package", "text", "word"), [
    ("errors", "from .kernel import Store", "errors imports kernel"),
    ("_ffi", "from ..kernel.store import Store", "_ffi imports kernel"),
    ("_ffi", "from .. import kernel", "_ffi imports kernel"),
    ("_ffi", "from .. import Store", "_ffi imports kernel"),
    ("capacity", "def f():\n    from pylloyal import Model", "capacity imports kernel"),
    ("kernel", "import PIL.Image", "kernel imports PIL"),
    ("kernel", "def f():\n    from ctypes import byref", "ctypes"),
    ("kernel", "if TYPE_CHECKING:\n    from ..sources.text import Text", "kernel imports sources"),
    ("capacity", "from pylloyal._ffi import load", "capacity imports _ffi"),
    ("sources", "import av", "function that needs it"),
    ("nonsense", "import os", "not in the table"),
])
def test_the_layer_test_can_fail(package: str, text: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "pylloyal")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for name in LAYERS:
        (tmp_path / "pylloyal" / name).mkdir(parents=True, exist_ok=True)
    path = tmp_path / "pylloyal" / (f"{package}.py" if package == "errors" else f"{package}/module.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    [problem] = layer_problems(package, path)
    assert word in problem


# ---------------------------------------------------------------------------------------------------------------- C++'s layers

SRC = ROOT / "libsrc" / "src"
ENGINE_HEADER = re.compile(r"(?:.*/)?(?:(?:llama|ggml|gguf|mtmd|clip)[-\w]*\.h(?:pp)?|(?:common|chat|sampling|log|arg|json|json-schema-to-grammar|peg-parser)\.h"
                           r"|nlohmann/.*)")
MAY_INCLUDE = {  # folder -> folders whose headers it may include; "engine" is engine.hpp alone
    "core": {"core", "engine"},
    "engine": set(),
    "engine/stub": {"core", "engine", "engine/stub"},
    "engine/llama": {"core", "engine", "engine/llama"},
    "engine/ggml_cpu": set(),  # becomes a part of the engine
    "abi": {"abi", "core", "engine"},
}


def include_problems(path: Path, text: str) -> list[str]:
    folder = path.relative_to(SRC).parent.as_posix()
    if folder not in MAY_INCLUDE:
        return [f"{folder} is not in the table of layers"]
    found = []
    for kind, name in re.findall(r"^\s*#\s*include\s*([<\"])([^>\"]+)", text, re.M):
        if name == "pylloyal.h":
            continue
        if ENGINE_HEADER.fullmatch(name) and not (SRC / name).exists():
            if folder != "engine/llama":
                found.append(f"{path.name} includes the engine's {name}")
        elif kind == '"':
            target = Path(name).parent.as_posix()
            if not (SRC / name).is_file():
                found.append(f"{path.name} includes {name}, which is none of ours")
            elif target not in MAY_INCLUDE[folder]:
                found.append(f"{path.name} includes {name}")
    return found


SOURCES = sorted(p for p in SRC.rglob("*") if p.suffix in {".cpp", ".hpp", ".h", ".c"})


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(SRC).as_posix())
def test_cxx_layers(path: Path) -> None:
    assert include_problems(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("place", "text"), [
    ("core/store.cpp", '#include "abi/guard.hpp"'), ("core/store.cpp", '#include "llama.h"'), ("core/store.hpp", "#include <ggml.h>"),
    ("core/store.cpp", '# include "engine/llama/llama_parts.hpp"'), ("abi/store.cpp", '#include "mtmd.h"'),
    ("abi/store.cpp", '#include "engine/llama/llama_parts.hpp"'),
    ("engine/stub/stub.cpp", '#include "ggml-cpu.h"'), ("engine/stub/stub.cpp", '#include "abi/guard.hpp"'), ("engine/engine.hpp", '#include "core/store.hpp"'),
    ("engine/llama/model.cpp", '#include "abi/guard.hpp"'), ("abi/store.cpp", '#include "chat.h"'), ("core/json.cpp", "#include <nlohmann/json.hpp>"),
    ("media/image.cpp", ""),
    ("core/store.cpp", '#include "vendor/stb_image.h"'),
])
def test_the_include_test_can_fail(place: str, text: str) -> None:
    assert len(include_problems(SRC / place, text)) == 1


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 15
    assert len(list(modules())) > 10
    assert any("llama.h" in path.read_text(encoding="utf-8") for path in SOURCES)
    assert shutil.which(shlex.split(os.environ.get("CC", "cc"))[0])
