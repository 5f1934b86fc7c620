"""The flags that say what `kernels_cpu` measures: two of them are refused."""

from itertools import combinations

import pytest

from benchmark.kernels import kernels_cpu

FLAGS = {"--dtype": ["bfloat16"], "--quantized": [], "--against-torch": []}


@pytest.mark.parametrize("pair", [*combinations(FLAGS, 2)], ids="".join)
def test_only_one_kind_of_products_is_measured(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels_cpu, "_measure", lambda options: pytest.fail("it was measured"))
    with pytest.raises(SystemExit) as ended:
        kernels_cpu.main([word for flag in pair for word in (flag, *FLAGS[flag])])
    assert ended.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert all(flag in message for flag in pair)
