"""Notices and SBOM, made from the table for a made-up source tree; tests/integration/test_linked.py holds the table against the real one."""
from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import third_party
from llama_source import read_pin

ROOT = Path(__file__).resolve().parents[2]
MIT = (ROOT / "libsrc" / "licences" / "MIT.txt").read_text(encoding="utf-8")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """As much of llama.cpp's tree as the table asks for."""
    folder = tmp_path / "llama.cpp"
    for name, text in {"LICENSE": f"MIT License\n\nCopyright (c) the authors\n\n{MIT}", "licenses/LICENSE-jsonhpp": f"MIT License\n\nCopyright (c) another\n\n{' '.join(MIT.split())}\n",
                       "ggml/CMakeLists.txt": "set(GGML_VERSION_MAJOR 1)\nset(GGML_VERSION_MINOR 2)\nset(GGML_VERSION_PATCH 3)\n",
                       "vendor/nlohmann/json.hpp": "#define NLOHMANN_JSON_VERSION_MAJOR 4\n#define NLOHMANN_JSON_VERSION_MINOR 5\n#define NLOHMANN_JSON_VERSION_PATCH 6\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libpylloyal.so"
    path.write_bytes(b"\x7fELF libstdc++.so.6\0")
    return path


def made(source: Path, library: Path, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"engine_commit": read_pin()["commit"], "compiler": "GNU 1.2", "cpu": "portable", "threads": "blocking", "attention": "shared", "models": []}
    return third_party.sbom(source, library, changes.pop("processor", "x86_64"), **(given | changes))


def named(document: dict[str, Any], name: str) -> dict[str, Any]:
    entry, = (entry for entry in document["components"] if entry["name"] == name)
    return dict(entry)


def test_notices_hold_everybody_and_each_licence_once(source: Path) -> None:
    text = third_party.notices(source, "x86_64")
    for row in third_party.components("x86_64"):
        assert f"==== {row.name} (" in text
        assert row.copyright in text
    assert " ".join(text.split()).count("The above copyright notice and this permission notice shall be included in all copies") == 1
    for name in ("MIT-CMU.txt", "Unicode-3.0.txt"):
        assert (ROOT / "libsrc" / "licences" / name).read_text(encoding="utf-8") in text
    assert "Copyright (c) another" not in text, "the head of a licence file is another project's"
    assert text == third_party.notices(source, "x86_64")
    assert str(source) not in text


def test_rows_for_other_processors_stay_out(source: Path) -> None:
    assert "OpenVINO" not in third_party.notices(source, "x86_64")
    assert "OpenVINO" in third_party.notices(source, "aarch64")
    assert "OpenVINO" in third_party.notices(source, "ARM64")


def test_a_licence_that_is_nowhere_is_an_error(source: Path) -> None:
    (source / "licenses" / "LICENSE-jsonhpp").unlink()
    with pytest.raises(third_party.ThirdPartyError, match=r"JSON for Modern C\+\+: the licence licenses/LICENSE-jsonhpp is neither"):
        third_party.notices(source, "x86_64")


def test_the_engine_is_named_by_commit_and_archive(source: Path, library: Path) -> None:
    pin, engine = read_pin(), named(made(source, library), "llama.cpp")
    assert engine["version"] == pin["commit"]
    assert engine["purl"] == f"pkg:github/ggml-org/llama.cpp@{pin['commit']}"
    reference, = engine["externalReferences"]
    assert reference["hashes"] == [{"alg": "SHA-256", "content": pin["sha256"]}]
    assert f"{pin['package']} {pin['version']}" in reference["comment"]


@pytest.mark.parametrize("commit", [read_pin()["commit"], "LLAMA_CPP_DIR"])
@pytest.mark.parametrize(("threads", "attention", "edits"), [("blocking", "shared", {"edit_barrier", "edit_attention"}), ("blocking", "stock", {"edit_barrier"}),
                                                             ("spinning", "shared", {"edit_attention"}), ("openmp", "stock", set())])
def test_the_edits_that_were_made_are_named_and_no_others(source: Path, library: Path, commit: str, threads: str, attention: str, edits: set[str]) -> None:
    document = made(source, library, engine_commit=commit, threads=threads, attention=attention)
    pedigree = named(document, "llama.cpp").get("pedigree", {})
    assert set(re.findall(r"edit_\w+", json.dumps(pedigree))) == edits
    assert pedigree.get("patches") != []
    properties = {entry["name"]: entry["value"] for entry in named(document, "libpylloyal")["properties"]}
    assert (properties["pylloyal:threads"], properties["pylloyal:attention"]) == (threads, attention)


def test_a_tree_of_the_users_own_claims_no_pin(source: Path, library: Path) -> None:
    document = made(source, library, engine_commit="LLAMA_CPP_DIR")
    pin = read_pin()
    assert "LLAMA_CPP_DIR" in named(document, "llama.cpp")["version"]
    assert pin["sha256"] not in json.dumps(document)
    assert pin["commit"] not in json.dumps(document)


def test_versions_are_read_from_the_source(source: Path, library: Path) -> None:
    document = made(source, library)
    assert named(document, "ggml")["version"] == "1.2.3"
    assert named(document, "JSON for Modern C++")["purl"] == "pkg:github/nlohmann/json@4.5.6"
    (source / "ggml" / "CMakeLists.txt").write_text("nothing of the kind", encoding="utf-8")
    with pytest.raises(third_party.ThirdPartyError, match="ggml: its version is no longer"):
        made(source, library)


def test_what_the_wheel_asks_for_is_in_it(source: Path, library: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    document = made(source, library)
    for requirement in project["dependencies"]:
        entry = named(document, re.match(r"[\w-]+", requirement)[0])  # type: ignore[index]
        assert entry["scope"] == "required"
        assert entry["properties"][0]["value"] == requirement
    for requirement in project["optional-dependencies"]["media"]:
        assert named(document, re.match(r"[\w-]+", requirement)[0])["scope"] == "optional"  # type: ignore[index]


def test_every_reference_is_a_component(source: Path, library: Path, tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    document = made(source, library, models=[model])
    refs = [document["metadata"]["component"]["bom-ref"], *(entry["bom-ref"] for entry in document["components"])]
    assert len(set(refs)) == len(refs)
    assert sorted(entry["ref"] for entry in document["dependencies"]) == sorted(refs)
    below = {entry["ref"]: entry.get("dependsOn", []) for entry in document["dependencies"]}
    assert {ref for wanted in below.values() for ref in wanted} == set(refs) - {refs[0]}, "everything but the wheel itself is somebody's part"
    assert "llama.cpp" in below["libpylloyal"]
    assert "tiny.gguf" in below[refs[0]]


def test_the_install_tree_has_two_libraries_and_no_python_packages(source: Path, library: Path, tmp_path: Path) -> None:
    static = tmp_path / "libpylloyal.a"
    static.write_bytes(b"!<arch>\n")
    library.write_bytes(b"\x7fELF libc.so.6\0")  # with a C++ runtime of its own, which an archive never has
    document = made(source, library, static=static, python=False)
    refs = [document["metadata"]["component"]["bom-ref"], *(entry["bom-ref"] for entry in document["components"])]
    below = {entry["ref"]: entry.get("dependsOn", []) for entry in document["dependencies"]}
    assert sorted(below) == sorted(set(refs)) == sorted(refs)
    assert below[refs[0]] == ["libpylloyal", "libpylloyal-static"]
    assert below["libpylloyal"] == [*below["libpylloyal-static"], "cxx-runtime"]
    assert named(document, "libpylloyal")["hashes"] != named(document, "libpylloyal (static)")["hashes"]
    assert not any("pkg:pypi" in entry.get("purl", "") for entry in document["components"])
    assert "purl" not in document["metadata"]["component"]


def test_package_addresses_are_as_their_standard_has_them(source: Path, library: Path) -> None:
    """Of GitHub in small letters; those of the index as its names are normalised."""
    purls = [entry["purl"] for entry in made(source, library)["components"] if "purl" in entry]
    assert len(purls) > 8
    for purl in purls:
        assert re.fullmatch(r"pkg:(github/[a-z0-9-]+/[a-z0-9._-]+|pypi/[a-z0-9-]+)(@[a-zA-Z0-9.]+)?", purl), purl


def test_a_cxx_runtime_is_a_component_only_when_it_is_linked_in(source: Path, library: Path) -> None:
    def runtimes(document: dict[str, Any]) -> list[str]:
        return [entry["licenses"][0]["expression"] for entry in document["components"] if entry["bom-ref"] == "cxx-runtime"]

    assert runtimes(made(source, library)) == []
    assert {"name": "pylloyal:cxx-runtime", "value": "libstdc++.so, of the system"} in named(made(source, library), "libpylloyal")["properties"]
    library.write_bytes(b"\x7fELF libc.so.6\0")
    assert runtimes(made(source, library)) == ["GPL-3.0-or-later WITH GCC-exception-3.1"]
    assert runtimes(made(source, library, compiler="Clang 18.1")) == ["Apache-2.0 WITH LLVM-exception"]


def test_same_contents_same_bytes(source: Path, library: Path, tmp_path: Path) -> None:
    command = ["sbom", "--source", str(source), "--processor", "x86_64", "--library", str(library), "--engine-commit", read_pin()["commit"], "--out"]
    written = []
    for name in ("a.json", "deep/er/b.json"):
        assert third_party.main([*command, str(tmp_path / name)]) == 0
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    assert str(tmp_path).encode() not in written[0]
    library.write_bytes(b"\x7fELF libstdc++.so.6\0 changed")
    assert made(source, library)["serialNumber"] != json.loads(written[0])["serialNumber"]


def test_the_command_line_says_what_is_missing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert third_party.main(["sbom", "--source", str(source), "--processor", "x86_64", "--library", str(tmp_path / "none.so"), "--out", str(out)]) == 1
    assert "none.so" in capsys.readouterr().err
    assert not out.exists()
