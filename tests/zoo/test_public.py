"""Public models: fetched from a pinned commit, checked before they are opened, served by a folder
without a network."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import wball
from server import Server
from wball.cli import main
from wball.fetch import DownloadError
from wball.zoo.public import PublicModel, models_folder, public_models

PINNED = "0123456789abcdef0123456789abcdef01234567"


def packed(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def tiny() -> dict[str, Any]:
    """Weights as the authors of such models pack them: a list of state dicts beside notes about the
    training."""
    torch.manual_seed(3)
    return {"state_dict": [wball.build_model("mnist-cnn").state_dict()], "epoch": 7, "err": 0.5}


class Authors(Server):
    """A repository of somebody else."""

    def publish(self, content: bytes, name: str = "somebody-mnist") -> PublicModel:
        path = "checkpoints/net.pth"
        self.files[f"owner/code/raw/{PINNED}/{path}"] = content
        known, digest = (
            public_models()["wong2019-mnist-standard"],
            hashlib.sha256(content).hexdigest(),
        )
        return replace(
            known,
            name=name,
            repository=f"{self.url}owner/code",
            commit=PINNED,
            path=path,
            sha256=digest,
        )


@pytest.fixture
def authors() -> Iterator[Authors]:
    with Authors() as running:
        yield running


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, PublicModel]:
    """The index, to which a test may add."""
    index = dict(public_models())
    for module in ("wball.zoo", "wball.zoo.public"):
        monkeypatch.setattr(f"{module}.public_models", lambda: index)
    return index


def test_a_model_is_downloaded_once_checked_and_loaded(
    authors: Authors, known: dict[str, PublicModel], tmp_path: Path
) -> None:
    content = tiny()
    entry = known["somebody-mnist"] = authors.publish(packed(content))
    model = wball.load_model("somebody-mnist", root=tmp_path)
    wanted = content["state_dict"][0]
    assert not model.training and all(
        torch.equal(v, wanted[k]) for k, v in model.state_dict().items()
    )
    wball.load_model("somebody-mnist", root=str(tmp_path))
    assert authors.requests == [(f"owner/code/raw/{PINNED}/{entry.path}", None)]
    assert (tmp_path / "somebody-mnist.pth").is_file() and not list(tmp_path.glob("*.part"))
    card = wball.model_card("somebody-mnist")
    assert card["url"] == entry.url and card["commit"] == PINNED and card["licence"]


def test_a_folder_serves_without_a_network(
    known: dict[str, PublicModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = packed(tiny())
    entry = replace(
        known["wong2019-mnist-standard"],
        name="mine",
        path="a.pth",
        sha256=hashlib.sha256(content).hexdigest(),
    )
    known["mine"] = entry
    (tmp_path / "mine.pth").write_bytes(content)
    monkeypatch.setattr(
        "wball.zoo.public.fetch_file", lambda *a: pytest.fail("the network was asked")
    )
    monkeypatch.setenv("WBALL_MODELS", str(tmp_path))
    tmp_path.chmod(0o500)  # nothing need be written
    try:
        by_variable, by_argument = wball.load_model("mine"), wball.load_model("mine", root=tmp_path)
    finally:
        tmp_path.chmod(0o700)
    assert all(map(torch.equal, by_variable.parameters(), by_argument.parameters()))


def test_another_file_than_the_published_one_is_never_opened(
    authors: Authors, known: dict[str, PublicModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = authors.publish(packed(tiny()))
    known["somebody-mnist"] = replace(
        entry, sha256=64 * "0"
    )  # the repository serves something else now
    monkeypatch.setattr("wball.zoo.load_weights", lambda *a: pytest.fail("opened"))
    with pytest.raises(DownloadError, match="wrong checksum"):
        wball.load_model("somebody-mnist", root=tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.suffix in (".pth", ".part")]
    known["somebody-mnist"] = entry
    half = tmp_path / "somebody-mnist.pth"
    half.write_bytes(packed(tiny())[:5000])  # somebody's own half-downloaded file
    asked = len(authors.requests)
    with pytest.raises(ValueError, match="half-downloaded or changed; delete it") as caught:
        wball.load_model("somebody-mnist", root=tmp_path)
    assert (
        str(half) in str(caught.value)
        and half.stat().st_size == 5000
        and len(authors.requests) == asked
    )


def test_offline_is_one_clear_line(
    known: dict[str, PublicModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry = known["wong2019-mnist-standard"]
    known["wong2019-mnist-standard"] = replace(
        entry, repository="http://127.0.0.1:9/locuslab/projected_sinkhorn"
    )
    monkeypatch.setenv("WBALL_MODELS", str(tmp_path))
    assert main(["evaluate", "wong2019-mnist-standard", "-d", "sample", "--eps", "0.1"]) == 5
    err = capsys.readouterr().err
    assert (
        err.count("\n") == 1
        and "Are you offline?" in err
        and "WBALL_MODELS" in err
        and "Traceback" not in err
    )


def test_unknown_names_list_both_kinds() -> None:
    with pytest.raises(
        ValueError, match=r"'mine.onnx' is a file.*wball.attacks.adapters.onnx.load"
    ):
        wball.load_model("mine.onnx")
    with pytest.raises(
        ValueError, match=r"unknown model 'wong'; the zoo has .*mnist-standard.*wong2019-mnist-linf"
    ):
        wball.load_model("wong")


def test_the_index_is_pinned_and_complete() -> None:
    assert len(public_models()) == 15 and not set(public_models()) & set(wball.list_models())
    for name, entry in public_models().items():
        assert re.fullmatch("[0-9a-f]{40}", entry.commit) and re.fullmatch(
            "[0-9a-f]{64}", entry.sha256
        )
        assert (
            entry.name == name
            and entry.url.startswith("https://github.com/")
            and entry.commit in entry.url
        )
        assert entry.architecture in wball.architectures() and entry.licence and entry.authors
    assert public_models()["levine2020-mnist-flow-0.01"].noise == 0.01


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WBALL_MODELS", raising=False)
    assert models_folder() == tmp_path / "wball" / "models" and models_folder("here") == Path(
        "here"
    )
    monkeypatch.setenv("WBALL_MODELS", "there")
    assert models_folder() == Path("there") and models_folder("here") == Path("here")
