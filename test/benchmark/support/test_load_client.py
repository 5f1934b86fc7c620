"""What our client adds to SGLang's runs: the memory of the server after each."""

from pathlib import Path

import pytest

from benchmark.support import load_client
from benchmark.support.load_client import MEMORY_OF, THEN


def test_memory_is_taken_after_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    load_client.install_torchvision_shim()
    from sglang.benchmark import serving

    path, seen = tmp_path / "memory", []
    sizes = iter([10.0, 20.25])

    def run() -> None:
        seen.append((load_client.sys.argv[1:], path.read_text() if path.exists() else ""))

    monkeypatch.setattr(load_client.sys, "argv", ["load_client"])
    monkeypatch.setattr(serving, "cli_main", run)
    monkeypatch.setattr(load_client, "add_llama_server", lambda module: None)
    monkeypatch.setattr(load_client.psutil, "Process", lambda pid: pid)
    monkeypatch.setattr(load_client, "tree_pss_mib", lambda server: server + next(sizes))
    load_client.main([MEMORY_OF, "7", str(path), "--one", THEN, "--two"])
    assert seen == [(["--one"], ""), (["--two"], "17.0\n")]
    assert path.read_text() == "17.0\n27.2\n"
