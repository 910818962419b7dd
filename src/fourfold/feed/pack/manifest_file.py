"""Manifest file: a pack's manifest, read. No torch, so that a pack that is not there is said at once."""

from pathlib import Path

from fourfold.feed.pack import layout
from fourfold.plan.decode import DecodeError, read_bounded
from fourfold.words.errors import DataError, Problem, os_error_text


def read_manifest(path: Path) -> layout.Manifest:
    """The manifest of a pack. Raises DataError if there is none, or it is damaged."""
    file = path / layout.MANIFEST_FILE
    try:
        content = read_bounded(file, max_bytes=layout.MAX_MANIFEST_BYTES)
    except DecodeError as error:
        problem = Problem(f"{file}: {error}", "the manifest of a pack", "the pack from its origin, or packed again")
        raise DataError(problem, where=str(path)) from error
    except OSError as error:
        packing = path.with_name(path.name + ".part")
        if not path.exists() and packing.is_dir():
            got, attempt = f"{path} is being packed, or its packing was cut off", "fourfold feed pack again, to go on"
        else:
            got, attempt = f"{file}: {os_error_text(error)}", "fourfold feed pack SOURCE DEST, which makes a pack"
        raise DataError(Problem(got, "a pack that is whole", attempt), where="the pack") from error
    return layout.decode_manifest(content, str(file))
