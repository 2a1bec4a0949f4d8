"""Downloads against a server on this machine: resumed, checked, and from hostile archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

import wball
from image_files import digits, idx, write_cifar10
from server import Server
from wball import data, fetch
from wball.data import (
    load_dataset,
    named,
)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def mnist_source(server: Server, *mirrors: str) -> data.DatasetInfo:
    images, labels = digits(50)
    for prefix in ("train", "t10k"):
        server.files[f"{prefix}-images-idx3-ubyte.gz"] = gzip.compress(idx(images), mtime=0)
        server.files[f"{prefix}-labels-idx1-ubyte.gz"] = gzip.compress(idx(labels), mtime=0)
    sums = {name: hashlib.md5(content).hexdigest() for name, content in server.files.items()}
    return replace(data.dataset_info("mnist"), mirrors=mirrors or (server.url,), files=sums)


def test_download_then_load_then_nothing_to_do(tmp_path: Path, server: Server) -> None:
    source = mnist_source(server)
    heard: list[tuple[str, int, int | None]] = []
    folder = wball.download(
        "mnist", tmp_path / "new", source=source, progress=lambda *a: heard.append(a)
    )
    assert sorted(p.name for p in folder.iterdir() if p.name != ".lock") == sorted(source.files)
    assert load_dataset("mnist", tmp_path / "new", "train")[0].shape == (50, 1, 28, 28)
    size = len(server.files["train-images-idx3-ubyte.gz"])
    assert ("train-images-idx3-ubyte.gz", size, size) in heard
    count = len(server.requests)
    wball.download("mnist", tmp_path / "new", source=source)
    assert len(server.requests) == count


def test_two_processes_fetch_a_set_once(tmp_path: Path, server: Server) -> None:
    source, held = mnist_source(server), threading.Event()
    answer = server.answer

    def slowly(request: BaseHTTPRequestHandler) -> None:
        held.wait(0.1)  # long enough for the others to come in between
        answer(request)

    server.answer = slowly  # type: ignore[method-assign]
    heard: list[Path] = []

    def one() -> None:
        heard.append(wball.download("mnist", tmp_path, source=source))

    threads = [
        threading.Thread(target=one) for _ in range(4)
    ]  # each opens the lock for itself, like a process
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == [tmp_path / "mnist"] * 4 and len(server.requests) == len(source.files)
    assert load_dataset("mnist", tmp_path, "train")[0].shape == (50, 1, 28, 28)


@pytest.mark.parametrize("ranges", [True, False])
def test_broken_transfer_is_resumed(tmp_path: Path, server: Server, ranges: bool) -> None:
    source = mnist_source(server)
    name = "train-images-idx3-ubyte.gz"
    server.break_after, server.ranges = 1000, ranges
    with pytest.raises(fetch.DownloadError, match=r"broke after 1000 of \d+ bytes.*resumed"):
        wball.download("mnist", tmp_path, source=source)
    folder = tmp_path / "mnist"
    assert [p.name for p in folder.glob("*.*") if p.name != ".lock"] == [f"{name}.part"]
    server.break_after = None
    wball.download("mnist", tmp_path, source=source)
    assert (name, "bytes=1000-") in server.requests
    assert (folder / name).read_bytes() == server.files[name]
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("length", [100, 10**6, None])
def test_any_partial_file_is_no_obstacle(
    tmp_path: Path, server: Server, length: int | None
) -> None:
    """Part of another file, shorter or longer than this one, or the complete file."""
    source, name = mnist_source(server), "train-images-idx3-ubyte.gz"
    (tmp_path / "mnist").mkdir()
    part = server.files[name] if length is None else bytes(length)
    (tmp_path / "mnist" / f"{name}.part").write_bytes(part)
    wball.download("mnist", tmp_path, source=source)
    assert len(load_dataset("mnist", tmp_path, "train")[1]) == 50


def test_a_full_disk_is_not_taken_for_a_dead_line(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mnist_source(server, server.url, server.url)

    usual = Path.open

    def full(path: Path, *args: object) -> object:
        if path.suffix == ".part":
            raise OSError(28, "No space left on device")
        return usual(path, *args)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        wball.download("mnist", tmp_path, source=source)
    assert error.value.errno == 28 and len(server.requests) == 1


def test_wrong_checksum_is_thrown_away_and_the_next_mirror_tried(
    tmp_path: Path, server: Server
) -> None:
    source = mnist_source(server, server.url + "bad/", server.url + "none/", server.url)
    for name in source.files:
        server.files[f"bad/{name}"] = b"<html>moved</html>"
    folder = wball.download("mnist", tmp_path, source=source)
    assert load_dataset("mnist", tmp_path)[0].shape[0] == 50
    for name in source.files:
        (folder / name).write_bytes(b"damaged on disk")
        del server.files[name]
    with pytest.raises(
        fetch.DownloadError, match=r"bad/.*: wrong checksum.*none/.*: HTTP Error 404"
    ):
        wball.download("mnist", tmp_path, source=source)
    assert not list(folder.glob("*.part"))


def test_offline_is_one_clear_message(tmp_path: Path, server: Server) -> None:
    source = mnist_source(server)
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(
        fetch.DownloadError, match=r"could not download .* of MNIST\. Are you offline\?.*by hand"
    ) as error:
        wball.download("mnist", tmp_path, source=source, timeout=2)
    assert "\n" not in str(error.value)


def tar(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return buffer.getvalue()


def cifar10_source(server: Server, archive: bytes) -> data.DatasetInfo:
    server.files["cifar-10-binary.tar.gz"] = archive
    sums = {"cifar-10-binary.tar.gz": hashlib.md5(archive).hexdigest()}
    return replace(data.dataset_info("cifar10"), mirrors=(server.url,), files=sums)


@pytest.fixture
def small_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    monkeypatch.setattr(named, "CIFAR10_RECORDS", 4)
    monkeypatch.setattr(fetch, "_CIFAR10_BATCH_BYTES", 4 * 3073)
    write_cifar10(tmp_path / "original", 4)
    return {
        f"cifar-10-batches-bin/{p.name}": p.read_bytes()
        for p in sorted((tmp_path / "original").iterdir())
    }


def test_cifar10_archive_cannot_write_elsewhere(
    tmp_path: Path, server: Server, small_cifar10: dict[str, bytes]
) -> None:
    evil = {
        "../escaped.bin": b"x",
        "/tmp/wball-escaped.bin": b"x",
        "cifar-10-batches-bin/../../up.bin": b"x",
    }
    source = cifar10_source(server, tar(evil | small_cifar10))
    root = tmp_path / "deep" / "root"
    folder = wball.download("cifar10", root, source=source)
    files = sorted(p.name for p in folder.iterdir())
    assert files == [".lock", *(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    assert [p.name for p in root.iterdir()] == ["cifar-10-batches-bin"]
    assert (
        not (tmp_path / "deep" / "escaped.bin").exists()
        and not Path("/tmp/wball-escaped.bin").exists()
    )
    assert load_dataset("cifar10", root, "train")[0].shape == (20, 3, 32, 32)
    count = len(server.requests)
    wball.download("cifar10", root, source=source)
    assert len(server.requests) == count


def test_bad_cifar10_archives(
    tmp_path: Path, server: Server, small_cifar10: dict[str, bytes]
) -> None:
    first = next(iter(small_cifar10))
    rest = {k: v for k, v in small_cifar10.items() if k != first}
    cases = (
        tar(rest),
        tar(rest | {first: b"short"}),
        tar(rest, links={first: "/etc/hostname"}),
    )
    for archive in cases:
        with pytest.raises(ValueError, match=f"it lacks {first} of 12292 bytes"):
            wball.download("cifar10", tmp_path / "root", source=cifar10_source(server, archive))


def test_known_sources_are_complete() -> None:
    for source in data.datasets().values():
        assert source.files and source.mirrors
        assert all(re.fullmatch(r"[0-9a-f]{32}", md5) for md5 in source.files.values())
        assert all(mirror.startswith("http") and mirror.endswith("/") for mirror in source.mirrors)


def test_what_is_there_needs_no_disk_that_can_be_written_to(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mnist_source(server)
    wball.download("mnist", tmp_path, source=source)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(fetch, "locked", read_only)
    assert wball.download("mnist", tmp_path, source=source) == tmp_path / "mnist"
