"""RAPL counters of a machine, in files laid out as ``powercap.rst`` of the Linux kernel says."""

from __future__ import annotations

from pathlib import Path

import pytest

from energylens.meter.host import host_capabilities


@pytest.fixture
def rapl(tmp_path: Path) -> Path:
    """The root of a machine with one package and its memory."""
    names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram"}
    for path, name in names.items():
        folder = tmp_path / "sys/class/powercap" / path
        folder.mkdir(parents=True)
        (folder / "name").write_text(name + "\n")
        (folder / "energy_uj").write_text("1000000\n")
    return tmp_path


def test_packages_and_memory_are_named_and_not_the_parts_of_a_package(rapl: Path) -> None:
    package, memory = host_capabilities(rapl)
    assert (package.uuid, package.scope) == ("package-0", "cpu_pkg")
    assert (memory.uuid, memory.scope) == ("dram-0", "dram")
    assert {package.state, memory.state} == {"supported"}


def test_without_permission_there_is_a_reason(rapl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def denied(path: Path, *arguments: str, **more: str) -> str:
        if path.name == "energy_uj":
            raise PermissionError
        return read_text(path, *arguments, **more)

    monkeypatch.setattr(Path, "read_text", denied)  # root may read whatever the mode says
    found = host_capabilities(rapl)
    assert {c.state for c in found} == {"no_permission"}
    assert {c.reason for c in found} == {"no permission to read RAPL; ask for read access to it"}


def test_a_counter_that_holds_no_number_is_told(rapl: Path) -> None:
    (rapl / "sys/class/powercap/intel-rapl:0/energy_uj").write_text("\n")
    package, _ = host_capabilities(rapl)
    assert package.state == "not_supported"
    assert "cannot be read" in (package.reason or "")


def test_a_machine_without_rapl_has_no_counter(tmp_path: Path) -> None:
    assert host_capabilities(tmp_path) == ()
