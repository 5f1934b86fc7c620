"""A pack holds the modules that a stage calls and lists them; the benchmark says which are missing.

Libraries are stand-ins: what FlashInfer loads is tested where a pack is built.
"""

import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark.gpu import bench_gpu, build_kernels, kernel_pack, packed_kernels
from benchmark.gpu.kernel_modules import MODULES, Build
from benchmark.gpu.session import Budget, Session


def build_of(folder: Path, name: str) -> Build:
    library = folder / f"library_of_{name}.so"
    library.write_text(name)
    return Build(name, library.stem, library, 1, 1, 0.0, 0.0)


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The unpacked pack of what `build_kernels` compiles unless it is told otherwise."""
    monkeypatch.setattr("sys.argv", ["build_kernels"])
    builds = [build_of(tmp_path, name) for name in build_kernels.parse_arguments().modules]
    monkeypatch.setattr(kernel_pack, "_copy_flashinfer", lambda wheels, site: site.mkdir())
    monkeypatch.setattr(kernel_pack, "_check_loads", lambda *given: "")
    monkeypatch.setattr(kernel_pack, "install_for_python", lambda *given: None)
    monkeypatch.setattr(kernel_pack, "tvm_ffi", SimpleNamespace(__version__="1"))
    monkeypatch.setattr(kernel_pack, "pins", lambda path: {"apache-tvm-ffi": "1"})
    archive = tmp_path / "site.tar.xz"
    kernel_pack.write_pack(tmp_path, tmp_path, builds, "3.12", archive)
    with tarfile.open(archive, "r:xz") as members:
        members.extractall(tmp_path / "site", filter="data")
    return tmp_path / "site"


def test_a_pack_holds_and_lists_every_module(packed: Path) -> None:
    listed = packed_kernels.read_list(packed)
    assert sorted(listed) == sorted(MODULES) and len(MODULES) == 12
    libraries = {path.stem: path for path in packed.glob("flashinfer/data/aot/*/*.so")}
    assert sorted(libraries) == sorted(listed.values())
    for name, library_name in listed.items():
        assert libraries[library_name].read_text() == name
        assert libraries[library_name].parent.name == library_name


def makers(*there: str) -> Callable[[], dict[str, Callable[[], Any]]]:
    """The modules, of which FlashInfer finds `there`."""
    return lambda: {name: partial(SimpleNamespace, is_aot=name in there) for name in MODULES}


def session_on(device: str) -> Session:
    return Session(torch.device(device), ["tiny"], [1], [0], Budget(1000.0, lambda: 0.0))


def test_what_the_pack_lacks_is_named_before_all_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = ["prefill-fa3-64", "decode-128-e4m3"]
    monkeypatch.setattr(packed_kernels, "module_makers", makers(*set(MODULES) - set(lacking)))
    monkeypatch.setattr(bench_gpu, "_measure_card", lambda session: session.say("the card"))
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    session = session_on("cuda")
    bench_gpu.run_parts(session, [])
    named = [(each.part, each.what, each.is_failure) for each in session.not_measured]
    assert named == [(packed_kernels.PART, f"what calls {name}", False) for name in lacking]
    printed = capsys.readouterr().out
    assert printed.index("what calls decode-128-e4m3") < printed.index("the card")


@pytest.mark.parametrize(("device", "may_compile"), [("cpu", False), ("cuda", True)])
def test_nothing_is_missing_where_none_is_needed_or_it_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, device: str, may_compile: bool
) -> None:
    monkeypatch.setattr(packed_kernels, "module_makers", makers())
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "" if may_compile else "1")
    session = session_on(device)
    packed_kernels.name_missing(session)
    assert session.not_measured == []


def test_without_flashinfer_the_rest_is_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> None:
        raise ImportError("no flashinfer")

    ran: list[str] = []
    monkeypatch.setattr(packed_kernels, "module_makers", none)
    monkeypatch.setattr(bench_gpu, "_measure_card", lambda session: None)
    monkeypatch.setattr(bench_gpu, "PARTS", {"stages": lambda session: ran.append(session.part)})
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    session = session_on("cuda")
    bench_gpu.run_parts(session, ["stages"])
    (missed,) = session.not_measured
    assert missed.is_failure and "no flashinfer" in missed.why
    assert ran == ["stages"]
