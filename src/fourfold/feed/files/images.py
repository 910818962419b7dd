"""Image folder: a file per sample, in a folder per class.

class  a folder directly below the root; labels are the classes' numbers, in the order of their names
Law: an image goes into a pack as its file is, byte for byte.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fourfold.feed.files.listing import Listing, read_file
from fourfold.feed.pack.schema import EncodedImage
from fourfold.feed.pack.values import decode_image
from fourfold.words.errors import DamagedSample, os_error_text


class ImageFolder:
    """Samples ({image: uint8 [3, height, width]}) or, in folders by class, pairs (image, label)."""

    thread_safe = True

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        has_classes = all("/" in name for name in listing.names)
        self.classes: Sequence[str] | None = None
        if has_classes:
            self.classes = sorted({name.partition("/")[0] for name in listing.names})
            label_of = {name: label for label, name in enumerate(self.classes)}
            self._labels = [label_of[name.partition("/")[0]] for name in listing.names]
        self.name = listing.root

    def __len__(self) -> int:
        return len(self._listing.names)

    def __getitem__(self, index: int, /) -> Any:
        return self._sample(index, self._pixels(index))

    def pack_sample(self, index: int) -> Any:
        """The sample with the file's content in place of its pixels."""
        return self._sample(index, EncodedImage(read_file(self._listing.path(index))))

    def sample_key(self, index: int) -> str:
        return self._listing.path(index)

    def _sample(self, index: int, image: Tensor | EncodedImage) -> Any:
        return {"image": image} if self.classes is None else (image, self._labels[index])

    def _pixels(self, index: int) -> Tensor:
        try:
            return decode_image(read_file(self._listing.path(index)))
        except OSError as error:
            raise DamagedSample(self.sample_key(index), os_error_text(error)) from error
        except ValueError as error:
            raise DamagedSample(self.sample_key(index), str(error)) from error
