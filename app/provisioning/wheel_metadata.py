"""Read what a wheel on an index asks for, without fetching the wheel, which may have gigabytes."""

from __future__ import annotations

import contextlib
import io
import zipfile
from email.parser import BytesParser
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import InvalidRequirement, Requirement

from agents.shared.packages.package_index import IndexedFile, IndexUnreachable, PackageIndex

_MAX_METADATA_BYTES = 4 << 20
_MAX_SKIPPED_BYTES = 32 << 20
"""Maximum that is read only to be skipped, where a server sends no part of a file."""


def requirements_of(index: PackageIndex, file: IndexedFile) -> tuple[Requirement, ...]:
    """Return the requirements that a wheel states, those of its extras included.

    Raises:
        IndexUnreachable: the server does not answer, or what it sends is no wheel.
    """
    message = BytesParser().parsebytes(_metadata_of(index, file), headersonly=True)
    try:
        return tuple(map(Requirement, message.get_all("Requires-Dist", [])))
    except InvalidRequirement as error:
        raise IndexUnreachable(file.url, f"{file.name} states a wrong requirement") from error


def _metadata_of(index: PackageIndex, file: IndexedFile) -> bytes:
    """Return METADATA of a wheel: as its server offers it beside it (PEP 658), else out of it."""
    is_local = file.url.startswith("file:")
    if not is_local:
        with contextlib.suppress(IndexUnreachable):
            return _read(index, file.url + ".metadata", 0, _MAX_METADATA_BYTES)
    try:
        with zipfile.ZipFile(_local_path(file) if is_local else _RemoteFile(index, file)) as wheel:
            (name,) = (
                one
                for one in wheel.namelist()
                if one.count("/") == 1 and one.endswith(".dist-info/METADATA")
            )
            with wheel.open(name) as opened:
                return opened.read(_MAX_METADATA_BYTES)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise IndexUnreachable(file.url, f"{file.name} is no wheel") from error


def _local_path(file: IndexedFile) -> str:
    return url2pathname(urlsplit(file.url).path)


def _read(index: PackageIndex, url: str, start: int, size: int) -> bytes:
    """Return up to `size` bytes of a file from an offset on."""
    got = bytearray()
    with index.opened(url, start) as (blocks, offset):
        skipped = start - offset
        if skipped > _MAX_SKIPPED_BYTES:
            raise IndexUnreachable(url, "it sends no part of a file, and no metadata beside it")
        for block in blocks:
            got += block
            if len(got) >= skipped + size:
                break
    return bytes(got[skipped : skipped + size])


class _RemoteFile(io.RawIOBase):
    """A file of a server that is read in parts."""

    def __init__(self, index: PackageIndex, file: IndexedFile) -> None:
        super().__init__()
        size = file.size_bytes if file.size_bytes is not None else index.size_of(file.url)
        if size is None:
            raise IndexUnreachable(file.url, f"it does not say how large {file.name} is")
        self._index = index
        self._url = file.url
        self._size = size
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError("before the beginning of the file")  # as zipfile expects it
        self._at = start + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = self._size - self._at
        wanted = rest if size is None or size < 0 else min(size, rest)
        got = _read(self._index, self._url, self._at, wanted) if wanted > 0 else b""
        self._at += len(got)
        return got
