"""Everything that is done to this project more than once, as nox sessions; their docstrings are the help.

`python3 tools/bootstrap.py SESSION` runs one in the locked environment (`.venv`). Plain `nox -s SESSION` works too and makes
an environment of its own from the same lock.
"""
from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
LOCK = "requirements/dev.txt"
nox.options.sessions = ["lint", "typing", "lib", "ctest", "instructions", "unit", "integration", "models"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = False


def python_of(session: nox.Session) -> str:
    """The Python the session runs, with the lock installed in it."""
    if isinstance(session.virtualenv, nox.virtualenv.PassthroughEnv):
        return sys.executable
    session.install("--require-hashes", "-r", LOCK)
    return "python"


def schema_suite(session: nox.Session) -> str:
    """Folder of the public JSON-Schema test suite, fetched once; "" when it cannot be had, and then the tests that need it fail and say so."""
    return str(session.run(python_of(session), "tools/fetch_schema_suite.py", external=True, silent=True, stderr=None, success_codes=[0, 1])).strip()


def pytest(session: nox.Session, *what: str, **env: str) -> None:
    session.run(python_of(session), "-m", "pytest", *what, *session.posargs, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}, external=True)


@nox.session
def lib(session: nox.Session) -> None:
    """Build libpylloyal into the package. `-- cpu` builds the portable one, `-- cuda`, `-- vulkan` and `-- metal` those with an accelerator; `-- all`
    (or platforms by name) the portable ones of all platforms and their wheels, checked, with a table: tens of minutes the first time."""
    session.run(python_of(session), "tools/build_lib.py", *session.posargs, external=True)


@nox.session
def ctest(session: nox.Session) -> None:
    """The C and C++ tests, on the stub engine: no llama.cpp, seconds."""
    python = python_of(session)
    session.run(python, "tools/build_lib.py", "stub", "--test", external=True)


@nox.session
def instructions(session: nox.Session) -> None:
    """Instruction counts of fixed work against fixtures/instructions.json; without valgrind it says so and does nothing. `-- --update` after a change that is meant."""
    python = python_of(session)
    session.run(python, "tools/build_lib.py", "stub", "--no-install", external=True)
    session.run(python, "tools/instructions.py", *session.posargs, external=True)


@nox.session
def unit(session: nox.Session) -> None:
    """Python tests that need no model file: the stub engine, the tools, the processes that come and go."""
    pytest(session, "tests/unit", "tests/process", "tests/invariants/test_traces.py")


def sanitised(session: nox.Session, preset: str, runtimes: tuple[str, ...], *what: str, **env: str) -> None:
    """The Python suites on a sanitised library. Python itself is not sanitised, so the runtimes are loaded before it."""
    found = [str(session.run("c++", f"-print-file-name=lib{name}.so", external=True, silent=True)).strip() for name in runtimes]
    # --capture=sys: a report goes to the file descriptor, past pytest. Left out: what a library for users may need, environments that pip
    # makes, and tens of thousands of templates rendered, which is the engine's own code, not sanitised, allocating under a slow allocator for an hour.
    left_out = ("--deselect", "tests/unit/test_drift.py::test_library_needs_nothing_but_the_runtime", "--ignore=tests/integration/test_templates.py", "--ignore=tests/process/test_bootstrap.py")
    pytest(session, "--capture=sys", *left_out, *what,
           LD_PRELOAD=" ".join(found), PYLLOYAL_LIBRARY=str(ROOT / "build" / preset / "libpylloyal.so"), **env)


@nox.session
def asan(session: nox.Session) -> None:
    """Our code under AddressSanitizer and UBSan: the C and C++ tests with leaks, then the Python suites. GCC or Clang on Linux."""
    session.run(python_of(session), "tools/build_lib.py", "asan", "--test", env={"ASAN_OPTIONS": "detect_leaks=1"}, external=True)
    # Leaks are off in Python's processes: the interpreter keeps much of its own until it is gone.
    sanitised(session, "asan", ("asan", "ubsan"), "tests/unit", "tests/process", "tests/invariants/test_traces.py", "tests/integration", "tests/aborts/test_fuzz.py", ASAN_OPTIONS="detect_leaks=0",
              PYLLOYAL_SCHEMA_SUITE=schema_suite(session))


@nox.session
def tsan(session: nox.Session) -> None:
    """Our code under ThreadSanitizer: the C and C++ tests, threads on a tiny real model, then the Python suites. GCC or Clang on Linux."""
    python = python_of(session)
    session.run(python, "tools/build_lib.py", "tsan", "--test", external=True)
    session.run(python, "tools/build_lib.py", "tsan-llama", "--no-install", external=True)
    build = ROOT / "build" / "tsan-llama"
    session.run(python, "tools/tiny_models.py", str(build / "tiny"), "--only", "tiny-llama", external=True)
    options = f"suppressions={ROOT / 'libsrc' / 'tests' / 'tsan.supp'} atexit_sleep_ms=0 allocator_may_return_null=1"
    parallel = (str(build / "tests" / "test_parallel"), str(build / "tiny" / "tiny-llama.gguf"))
    session.run(*parallel, external=True)  # one engine thread to a store: nothing has to be suppressed
    session.run(*parallel, "2", env={"TSAN_OPTIONS": options}, external=True)
    # It does not support threads after a fork of several, and it holds signals back: test_fork and test_interrupt cannot run. Of every
    # thread's stack it takes 0.8 MB for itself: a stack of 512 kB is none.
    sanitised(session, "tsan-llama", ("tsan",), "tests/unit", "tests/process", "--ignore=tests/process/test_fork.py", "--ignore=tests/process/test_interrupt.py", "tests/integration",
              "--deselect", "tests/integration/test_schema.py::test_on_a_small_stack",
              TSAN_OPTIONS=options, PYLLOYAL_SCHEMA_SUITE=schema_suite(session))


@nox.session
def coverage(session: nox.Session) -> None:
    """Which lines and branches of the library and the package the tests run: one table, and the kernel's lines that none does. GCC."""
    python = python_of(session)
    build = ROOT / "build" / "coverage"
    for old in (*build.glob("**/*.gcda"), *build.glob("python.dat*")):
        old.unlink()
    session.run(python, "tools/build_lib.py", "coverage", "--test", external=True)
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COVERAGE_FILE": str(build / "python.dat"), "PYLLOYAL_LIBRARY": str(build / "libpylloyal.so"),
           "PYLLOYAL_SCHEMA_SUITE": schema_suite(session)}
    session.run(python, "-m", "coverage", "run", "-m", "pytest", "tests/unit", "tests/process", "tests/invariants", "tests/integration", "tests/aborts", *session.posargs, external=True, env=env)
    session.run(python, "-m", "coverage", "combine", "--quiet", external=True, env=env)  # with what child processes left
    session.run(python, "tools/coverage_report.py", str(build), external=True)


@nox.session
def integration(session: nox.Session) -> None:
    """Tests on tiny models of random weights, made on the spot, and on the public JSON-Schema test suite (fetched once); and what kills or
    deceives the engine, in child processes."""
    pytest(session, "tests/integration", "tests/aborts", "tests/invariants/test_traces_on_tiny.py", PYLLOYAL_SCHEMA_SUITE=schema_suite(session))


@nox.session
def traces(session: nox.Session) -> None:
    """100,000 random operations against the reference, others every time; they print the seed that repeats them. Minutes."""
    pytest(session, "tests/invariants/test_traces.py", PYLLOYAL_TRACE_OPERATIONS=os.environ.get("PYLLOYAL_TRACE_OPERATIONS", "100000"))


@nox.session
def models(session: nox.Session) -> None:
    """Tests on real models (SmolLM2-135M, fetched once), and beside a foreign llama.cpp in the same process."""
    python = python_of(session)
    foreign = ROOT / "build" / "foreign"
    session.run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps", "--upgrade",
                "--target", str(foreign), "-r", "requirements/models.txt", external=True)
    model = session.run(python, "tools/fetch_model.py", "smollm2", external=True, silent=True, stderr=None)
    pytest(session, "tests/models", PYLLOYAL_TEST_MODEL=str(model).strip(), PYLLOYAL_FOREIGN=str(foreign))


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the portable wheel twice, to the same bytes; install, use and uninstall it in empty environments of every Python there is."""
    session.run(python_of(session), "tools/check_wheel.py", *session.posargs, external=True)


@nox.session
def consumers(session: nox.Session) -> None:
    """The install tree and the programs of libsrc/examples that use it, in C, C++, Node, Rust and Python: they must print the same tokens.
    `-- c rust` builds these alone. Node needs npm (it fetches koffi), Rust cargo."""
    python = python_of(session)
    session.run(python, "tools/build_lib.py", external=True)
    session.run(python, "tools/consumers.py", *session.posargs, external=True)


@nox.session
def sdist(session: nox.Session) -> None:
    """Install the source archive with pip and the package index alone, use it and uninstall it. Needs the index; a minute."""
    session.run(python_of(session), "tools/check_wheel.py", "--from-sdist", external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, the generated files and the promise of the ABI against the header, and no stray addresses or paths in the repository."""
    python = python_of(session)
    session.run(python, "-m", "ruff", "check", ".", external=True)
    session.run(python, "tools/gen_capi.py", "--check", external=True)
    session.run(python, "tools/abi_ages.py", "--check", external=True)
    session.run(python, "tools/check_repo.py", external=True)


@nox.session
def typing(session: nox.Session) -> None:
    """mypy in strict mode over the package and the tools."""
    session.run(python_of(session), "-m", "mypy", external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the library beside the raw engine and its peers, on SmolLM2-135M and Gemma 3 270M (docs/benchmark.md). Hours on a quiet machine;
    `-- --only ticks --no-peers` measures less, `-- --quick --even-if-noisy` shows that it runs."""
    session.run(python_of(session), "tools/bench.py", *session.posargs, env={"PYTHONPATH": str(ROOT)}, external=True)


@nox.session
def demo(session: nox.Session) -> None:
    """Build, show the tiny vision model a picture and a clip, and question each from forks; nothing is fetched. With `-- document`, or when
    SmolLM2-135M is in the cache already, also read a chapter of Moby-Dick once and question it from eight forks."""
    python = python_of(session)
    session.run(python, "tools/build_lib.py", external=True)
    rest = [word for word in session.posargs if word != "document"]
    session.run(python, "-m", "pylloyal", "demo", *rest, env={"PYTHONPATH": str(ROOT)}, external=True)
    present = session.run(python, "tools/fetch_model.py", "smollm2", "--if-present", external=True, silent=True, stderr=None)
    if "document" not in session.posargs and not str(present).strip():
        return
    model = session.run(python, "tools/fetch_model.py", "smollm2", external=True, silent=True, stderr=None)
    questions = ["Who is telling the story?", "Why does he go to sea?", "What do the people of the city do on a Sunday afternoon?",
                 "Does he go as a passenger, a cook or a sailor?", "What does he say about water and meditation?",
                 "Who pays him, and what does he think of being paid?", "What does he say about the whale itself?", "Summarize the chapter in one sentence."]
    session.run(python, "-m", "pylloyal", "ask", str(model).strip(), "--document", "fixtures/texts/moby_dick_1.txt", "--seed", "1", "--max-tokens", "48",
                *questions, env={"PYTHONPATH": str(ROOT)}, external=True)


@nox.session
def examples(session: nox.Session) -> None:
    """The programs of docs/examples on SmolLM2-135M, each against the naive way. `-- beam_search resume` runs these alone."""
    python = python_of(session)
    model = session.run(python, "tools/fetch_model.py", "smollm2", external=True, silent=True, stderr=None)
    folder = ROOT / "docs" / "examples"
    for name in session.posargs or sorted(path.stem for path in folder.glob("[!_]*.py")):
        session.run(python, str(folder / f"{name}.py"), str(model).strip(), env={"PYTHONPATH": str(ROOT)}, external=True)
