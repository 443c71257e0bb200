"""Export records to one file, and import them on another machine.

The file is a zip of ``<device>/<record>.json`` with a manifest of the SHA-256 of each. It comes
from elsewhere: all of it is checked before any of it is written.
"""

import hashlib
import io
import json
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tinyllama.harness.machine.device import slug
from tinyllama.harness.machine.files import MOST_BYTES, read_regular, write_new
from tinyllama.harness.machine.parsed import json_of
from tinyllama.harness.records import results

MANIFEST = "manifest.json"
FORMAT = 1
MOST_FILES = 10_000
MOST_BYTES_IN_ALL = 1024 * 2**20
_NAME = re.compile(r"[a-z0-9-]{1,200}/[A-Za-z0-9][A-Za-z0-9._+-]{0,250}\.json")


def export(paths: Iterable[Path], output: Path) -> None:
    """Pack records into a new zip, whole or not at all.

    Raises ValueError for a file that is not a record, FileExistsError where ``output`` exists.
    """
    contents = {}
    for path in paths:
        text = read_regular(path)
        record = results.parse(text, str(path))
        contents[f"{slug(record.device)}/{path.name}"] = text
    manifest = {"format": FORMAT, "records": {n: _digest(t) for n, t in contents.items()}}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
        for name, text in contents.items():
            archive.writestr(name, text)
    write_new(output, packed.getvalue())


@dataclass(frozen=True)
class Imported:
    """The records that were written, and those that were there already with the same content."""

    written: list[Path]
    present: list[Path]


def load(archive: Path, root: Path) -> Imported:
    """Write the records of an export under ``root``: all or none, and never over another record.

    Raises ValueError that names the member where the file is not a valid export, or where a record
    of that name has other content.
    """
    contents = read(archive)
    present = []
    for name, text in contents.items():
        path = root / name
        if path.exists():
            if read_regular(path) != text:
                raise ValueError(f"{path} exists with other content; rename or remove it first")
            present.append(path)
    new = {root / name: text for name, text in contents.items() if root / name not in present}
    _write(new)
    return Imported(list(new), present)


def read(archive: Path) -> dict[str, bytes]:
    """The checked records of an export, by their name in it. Raises ValueError."""
    try:
        packed = io.BytesIO(read_regular(archive, MOST_BYTES_IN_ALL))
        with zipfile.ZipFile(packed) as members:
            contents = _members(members)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise ValueError(f"{archive} is not an export of records: {error}") from error
    hashes = _manifest(archive, contents.pop(MANIFEST, None))
    if wrong := sorted(contents.keys() ^ hashes.keys()):
        raise ValueError(f"{archive}: its manifest and content differ in {wrong[0]!r}")
    for name, text in contents.items():
        if _digest(text) != hashes[name]:
            raise ValueError(f"{archive}: {name} was changed: it is not what the manifest says")
        record = results.parse(text, f"{archive}: {name}")
        if name.partition("/")[0] != slug(record.device):
            raise ValueError(f"{archive}: {name} is a record of {record.device!r}")
    return contents


def _members(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """The content of a zip, read only after names and sizes were found to be those of records."""
    members = archive.infolist()
    if len(members) > MOST_FILES or sum(m.file_size for m in members) > MOST_BYTES_IN_ALL:
        raise zipfile.BadZipFile(f"more than {MOST_FILES} files or {MOST_BYTES_IN_ALL} bytes")
    counts = Counter(member.filename for member in members)
    for member in members:
        name = member.filename
        if name != MANIFEST and not _NAME.fullmatch(name):
            raise zipfile.BadZipFile(f"the name {name!r:.300} is not that of a record")
        if counts[name] > 1:
            raise zipfile.BadZipFile(f"{name} is in it twice")
        if member.file_size > MOST_BYTES:
            raise zipfile.BadZipFile(f"{name} has {member.file_size} bytes")
    return {name: archive.read(name) for name in counts}


def _manifest(archive: Path, text: bytes | None) -> dict[str, str]:
    if text is None:
        raise ValueError(f"{archive} is not an export of records: it has no {MANIFEST}")
    try:
        data = json_of(text)
        hashes = data["records"]
        if data["format"] != FORMAT or not isinstance(hashes, dict) or not hashes:
            raise ValueError(f"format {FORMAT} with records is wanted")
        return hashes
    except (TypeError, LookupError, ValueError) as error:
        raise ValueError(f"{archive}: {MANIFEST} cannot be used: {error}") from error


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _write(contents: dict[Path, bytes]) -> None:
    """Write files that do not exist yet: all of them, or none where one fails."""
    written: list[Path] = []
    made: list[Path] = []
    try:
        for path, text in contents.items():
            for folder in [f for f in reversed(path.parents) if not f.exists()]:
                folder.mkdir()
                made.append(folder)
            write_new(path, text)
            written.append(path)
    except BaseException:
        for path in written:
            path.unlink()
        for folder in reversed(made):
            folder.rmdir()
        raise
