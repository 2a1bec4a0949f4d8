"""Download data sets and weights: resumable, and complete with the right checksum or absent."""

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from wball.data import CIFAR10_RECORDS, DatasetInfo, dataset_info
from wball.storage.files import PathLike, locked

Progress = Callable[[str, int, int | None], None]
"""Called as ``progress(file name, bytes so far, bytes in all if known)``."""

_BLOCK = 1 << 16
_CIFAR10_BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_CIFAR10_BATCH_BYTES = CIFAR10_RECORDS * 3073
_FAILED = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    ValueError,
)
"""Errors of a server or of the network: the next mirror is tried. Errors of the disk are raised."""


class DownloadError(OSError):
    """No mirror has the file. The message lists the response of each mirror, and what to do."""


def download(
    name: str,
    root: PathLike,
    *,
    source: DatasetInfo | None = None,
    progress: Progress | None = None,
    timeout: float = 30.0,
) -> Path:
    """Put a data set where ``load_dataset(name, root)`` finds it, and return its folder.

    Complete files are kept. The next call resumes a broken transfer. A file appears under its name
    after its checksum was verified. Only one process downloads at a time.

    Args:
        name: ``mnist``, ``fashion-mnist`` or ``cifar10``.
        root: the folder that holds the data sets; created if needed.
        source: another source, such as the same files on a mirror of your own.
        progress: called while bytes arrive.
        timeout: seconds without an answer after which the next mirror is tried.
    """
    info = source or dataset_info(name)
    folder = Path(root) / info.folders[0]
    if _complete(info, folder):  # no lock: the disk may be read-only
        return folder
    with locked(folder, wait=True):
        if _complete(info, folder):  # another process was faster
            return folder
        for file, md5 in info.files.items():
            urls = [mirror + file for mirror in info.mirrors]
            what, by_hand = f"{file} of {info.title}", f"put the file into {folder} by hand"
            fetched = fetch_file(urls, folder / file, md5, what, by_hand, progress, timeout)
            if fetched.suffixes == [".tar", ".gz"]:
                _unpack_cifar10(fetched, folder)
                fetched.unlink()
    return folder


def _complete(info: DatasetInfo, folder: Path) -> bool:
    if any(file.endswith(".tar.gz") for file in info.files):
        batches = [folder / name for name in _CIFAR10_BATCHES]
        return all(b.is_file() and b.stat().st_size == _CIFAR10_BATCH_BYTES for b in batches)
    return all(_is_whole(folder / file, md5) for file, md5 in info.files.items())


def _is_whole(path: Path, digest: str) -> bool:
    return path.is_file() and _digest(path, digest) == digest


def fetch_file(
    urls: Sequence[str],
    target: Path,
    digest: str,
    what: str,
    otherwise: str,
    progress: Progress | None = None,
    timeout: float = 30.0,
) -> Path:
    """Download the file with this MD5 or SHA-256 from the first URL that has it.

    ``otherwise`` is the advice of the error message if none has.
    """
    if _is_whole(target, digest):
        return target
    part, failures = target.with_name(f"{target.name}.part"), []
    for url in urls:
        try:
            resumed = _transfer(url, part, progress, timeout)
            # The partial file may belong to a different file.
            if resumed and _digest(part, digest) != digest:
                part.unlink()
                _transfer(url, part, progress, timeout)
            if _digest(part, digest) == digest:
                os.replace(part, target)
                return target
            part.unlink()
        except _FAILED as error:
            failures.append(f"{url}: {error}")
            continue
        failures.append(f"{url}: wrong checksum, so the file was deleted")
    raise DownloadError(
        f"could not download {what}. Are you offline? Tried {'; '.join(failures)}. "
        f"Try again later (a broken transfer is resumed), or {otherwise}"
    )


def _transfer(url: str, part: Path, progress: Progress | None, timeout: float) -> bool:
    """Append the rest of ``url`` to ``part``, or start over if the server cannot resume.

    Returns whether it resumed.
    """
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(
        url, headers={"User-Agent": "wball", **({"Range": f"bytes={have}-"} if have else {})}
    )
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        # Nothing is left to send: the file is complete, or it is another file. The checksum
        # decides.
        error.close()
        return True
    with response:
        resumed = response.status == 206
        done = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        with part.open("ab" if resumed else "wb") as file:
            while block := response.read(_BLOCK):
                file.write(block)
                done += len(block)
                if progress is not None:
                    progress(part.stem, done, total)
        if total is not None and done < total:
            raise ConnectionError(f"the connection broke after {done} of {total} bytes")
    return resumed


def _digest(path: Path, like: str) -> str:
    """The file's digest of the same kind as ``like``."""
    digest = hashlib.sha256() if len(like) == 64 else hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _unpack_cifar10(archive: Path, folder: Path) -> None:
    """Copy the six known files out of the archive. Member names never become paths."""
    wanted = {f"cifar-10-batches-bin/{name}": folder / name for name in _CIFAR10_BATCHES}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.name not in wanted or not member.isfile():
                continue
            content = tar.extractfile(member)
            assert content is not None
            with content, wanted[member.name].open("wb") as file:
                shutil.copyfileobj(content, file)
            if member.size == _CIFAR10_BATCH_BYTES:
                del wanted[member.name]
    if wanted:
        raise ValueError(
            f"{archive} is not CIFAR-10's binary version: it lacks {', '.join(wanted)} of "
            f"{_CIFAR10_BATCH_BYTES} bytes"
        )
