"""A model has one digest wherever and however it lies; other numbers give another."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.weight_files import sharded_model, whole_model, write_config, write_weights

from sgl_pipeline.cluster.model_digest import digest_difference, model_digest
from sgl_pipeline.cluster.tensor_samples import WHOLE_BYTES
from sgl_pipeline.errors import CheckpointError, ConfigurationError

SMALL = bytes(range(64))
LARGE = bytes(range(256)) * 1024
TENSORS = {"norm": SMALL, "embedding": LARGE, "head": LARGE[::-1]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    assert len(SMALL) <= WHOLE_BYTES < len(LARGE)
    return whole_model(tmp_path / "model", TENSORS)


def changed(content: bytes, place: int) -> bytes:
    """One byte is another."""
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def digest_of(directory: Path, load_format: str = "safetensors") -> str:
    return model_digest(str(directory), load_format)


def test_a_copy_has_the_same(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    (copy / "README.md").write_text("of the copy alone")
    (copy / "generation_config.json").write_text('{"temperature": 0.1}')
    assert digest_of(copy) == digest_of(model)


def test_the_same_tensors_in_other_files_and_another_order_have_the_same(
    model: Path, tmp_path: Path
) -> None:
    shards = [{"head": TENSORS["head"], "norm": SMALL}, {"embedding": LARGE}]
    sharded = sharded_model(tmp_path / "sharded", *shards)
    # No stage loads it: it is not in the index.
    write_weights(sharded / "consolidated.safetensors", {"norm": LARGE})
    assert digest_of(sharded) == digest_of(model)
    turned = whole_model(tmp_path / "turned", dict(reversed(TENSORS.items())))
    assert digest_of(turned) == digest_of(model)


@pytest.mark.parametrize(
    "other",
    [
        TENSORS | {"norm": changed(SMALL, 33)},
        TENSORS | {"embedding": changed(LARGE, 0)},
        TENSORS | {"embedding": changed(LARGE, len(LARGE) - 1)},
        TENSORS | {"embedding": bytes(len(LARGE) // 4) + LARGE[len(LARGE) // 4 :]},
        TENSORS | {"embedding": TENSORS["head"], "head": LARGE},
    ],
    ids=["a_small_one", "first_byte", "last_byte", "a_quarter", "two_exchanged"],
)
def test_equal_shapes_with_other_values_have_another(
    model: Path, tmp_path: Path, other: dict[str, bytes]
) -> None:
    two = digest_of(whole_model(tmp_path / "other", other)), digest_of(model)
    assert two[0] != two[1]
    assert digest_difference(*two) == "tensors of the same names and shapes have other values"


def test_a_tensor_of_another_name_dtype_or_length_is_another_model(
    model: Path, tmp_path: Path
) -> None:
    renamed = {"gain" if name == "norm" else name: one for name, one in TENSORS.items()}
    shorter = TENSORS | {"norm": SMALL[:-1]}
    more = TENSORS | {"bias": b""}
    digests = {digest_of(model)}
    for number, tensors in enumerate((renamed, shorter, more)):
        digests.add(digest_of(whole_model(tmp_path / str(number), tensors)))
    write_weights(model / "model.safetensors", TENSORS, dtype="I8")
    digests.add(digest_of(model))
    assert len(digests) == 5
    for other in digests - {digest_of(model)}:
        words = "the names, dtypes or shapes of tensors differ"
        assert digest_difference(other, digest_of(model)) == words


def test_the_config_counts_and_who_wrote_it_does_not(model: Path) -> None:
    digest = digest_of(model)
    write_config(model, transformers_version="5.0", _name_or_path="/home/somebody")
    assert digest_of(model) == digest
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    assert digest_of(model) == digest
    for change in ({"rms_norm_eps": 1e-5}, {"quantization_config": {"quant_method": "fp8"}}):
        write_config(model, **change)
        assert digest_of(model) != digest
        assert digest_difference(digest_of(model), digest) == "config.json differs"


def test_made_up_weights_follow_from_the_config_and_need_no_file(tmp_path: Path) -> None:
    one, same, other = tmp_path / "one", tmp_path / "same", tmp_path / "other"
    write_config(one)
    whole_model(same, TENSORS)
    write_config(other, hidden_size=128)
    assert digest_of(one, "dummy") == digest_of(same, "dummy") != digest_of(other, "dummy")
    assert digest_of(same, "dummy") != digest_of(same)
    assert "--load-format dummy" in digest_difference(digest_of(same, "dummy"), digest_of(same))
    words = digest_difference(digest_of(one, "dummy"), digest_of(other, "dummy"))
    assert words == "config.json differs"


def test_weights_that_are_missing_or_cut_short_are_named(model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    deep = b'{"norm": ' + b"[" * 100_000
    for broken in (
        whole[:-1],
        whole[:100],
        whole[:4],
        b"\xff" * 8 + whole[8:],
        whole.replace(b"norm", b"nor\xff"),
        len(deep).to_bytes(8, "little") + deep,
    ):
        weights.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*corrupt"):
            digest_of(model)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        digest_of(model)
    sharded = sharded_model(tmp_path / "sharded", {"norm": SMALL}, {"head": LARGE})
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is missing"):
        digest_of(sharded)
    (model / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"holds no config\.json"):
        digest_of(model)


@pytest.mark.multiproc
def test_neither_torch_nor_safetensors_is_imported() -> None:
    script = "import sys, sgl_pipeline.cluster.model_digest as _; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert not {b"torch", b"safetensors", b"numpy"} & {*modules.stdout.split()}
