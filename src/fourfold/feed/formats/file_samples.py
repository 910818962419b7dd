"""A file per sample: images, or arrays of numpy.

class  of images: a folder directly below the root; labels are the classes' numbers, in the order of their names
Law: an image goes into a pack as its file is, byte for byte.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from fourfold.feed.formats.arrays import read_array_file
from fourfold.feed.formats.positioned import file_size
from fourfold.feed.pack.schema import PAIR, EncodedImage
from fourfold.feed.unpacked import check_fits


class FileSamples:
    """Records of one file each. `labels`: by file, the numbers of their classes; then records are pairs."""

    noun, files = "", None

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        read_record: Callable[[str], dict[str, Any]],
        *,
        classes: Sequence[str] | None = None,
        labels: Sequence[int] | None = None,
    ) -> None:
        for path in paths:
            file_size(path)
        self.name, self.shard_sizes, self.classes = name, [1] * len(paths), classes
        self.paths, self._read_record, self._labels = paths, read_record, labels

    def read(self, file: int, records: Sequence[int]) -> list[dict[str, Any]]:
        found = self._read_record(self.paths[file])
        if self._labels is not None:
            found = {PAIR[0]: found["image"], PAIR[1]: self._labels[file]}
        return [found] * len(records)


def array_files(name: str, paths: Sequence[str]) -> FileSamples:
    """Samples {array: its values}; pairs, if the arrays of a file are named so."""
    return FileSamples(name, paths, read_array_file)


def images(name: str, paths: Sequence[str]) -> FileSamples:
    """Samples {image: encoded}; in folders by class, pairs (image, label)."""
    root = name if os.path.isdir(name) else os.path.commonpath([os.path.dirname(path) for path in paths])
    folders = [os.path.relpath(path, root).rpartition("/")[0].partition("/")[0] for path in paths]
    if not all(folders):
        return FileSamples(name, paths, _read_image)
    label_of = {folder: label for label, folder in enumerate(sorted(set(folders)))}
    labels = [label_of[folder] for folder in folders]
    return FileSamples(name, paths, _read_image, classes=list(label_of), labels=labels)


def _read_image(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        check_fits(size, "a file")
        content = file.read(size)
    if len(content) < size:
        raise OSError(f"it ends after {len(content)} of {size} bytes")
    return {"image": EncodedImage(content)}
