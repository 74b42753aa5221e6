"""Files to pixels. Of a JPEG only the wanted region is decoded, which is most of the speed.

nvimgcodec decodes a region without computing the rest of the image. It has no wheel for macOS:
there, simplejpeg decodes the whole image. Either way, the pixels of a region are those that Pillow
gives the whole image.
"""

import contextlib
import importlib
import importlib.util
import io
import os
import tempfile
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def fastest_decoder() -> str:
    """The fastest of the decoders that are installed; a run says at its start which it is."""
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvimgcodec"):
        return "nvimgcodec"
    return "simplejpeg" if importlib.util.find_spec("simplejpeg") else "Pillow"


DECODER = fastest_decoder()

Box = tuple[int, int, int, int]
"""Top, left, height, width."""
Pixels = NDArray[np.uint8]
"""[H, W, 3], RGB."""


class BrokenImageError(ValueError):
    """A file that is not an image, or not complete."""


def dimensions(content: bytes) -> tuple[int, int]:
    """Height and width of an encoded image; its orientation tag is ignored, as by torchvision.

    Raises:
        BrokenImageError: it is not an image, or a JPEG that ends early.
    """
    header = _jpeg_header(content)
    if header:
        return header[:2]
    with _opened(content) as image:
        return image.height, image.width


def decode(content: bytes, box: Box) -> Pixels:
    """Decode a region of an image to RGB.

    Args:
        content: a file of any format that Pillow knows; of a JPEG, only the region is decoded.
        box: the region.

    Returns:
        [height, width, 3].

    Raises:
        BrokenImageError: it is not an image, or not complete.
    """
    top, left, rows, columns = box
    header = _jpeg_header(content)
    # CMYK (4 components): libraries differ in how they convert it, and Pillow is the reference.
    if header is None or header[2] == 4 or DECODER == "Pillow":
        return _by_pillow(content)[top : top + rows, left : left + columns]
    if DECODER == "simplejpeg":
        return _by_simplejpeg(content)[top : top + rows, left : left + columns]
    library, decoder, parameters = _decoders.get()
    # The first column alone would get colours that do not depend on the next column's.
    right = max(left + columns, min(2, header[1]))
    region = library.Region(top, left, top + rows, right)
    stream = library.CodeStream(content).get_sub_code_stream(region=region)
    decoded = decoder.decode(stream, params=parameters)
    if decoded is None:
        raise BrokenImageError("its JPEG data are damaged")
    return np.asarray(decoded)[:, :columns]


def _by_simplejpeg(content: bytes) -> Pixels:
    simplejpeg: Any = importlib.import_module("simplejpeg")
    try:
        return simplejpeg.decode_jpeg(content, colorspace="RGB")
    except ValueError:  # damaged, in a way that may leave pixels: Pillow is the reference
        return _by_pillow(content)


def _by_pillow(content: bytes) -> Pixels:
    with _opened(content) as image:
        try:
            return _eight_bits(image)
        except (OSError, SyntaxError, ValueError) as error:
            raise BrokenImageError(str(error)) from None


def _eight_bits(image: Image.Image) -> Pixels:
    """All of an image as RGB. Grey of 16 bits is scaled by its range: Pillow would cut it off.

    Raises:
        BrokenImageError: pixels of 32 bits, whose range is not known.
    """
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        raise BrokenImageError("its pixels have 32 bits, of unknown range: convert it to 8 or 16")
    if not image.mode.startswith("I"):
        return np.asarray(image.convert("RGB"))
    grey = (np.asarray(image).astype(np.uint32) * 255 + 32767) // 65535  # rounded
    return np.repeat(grey.astype(np.uint8)[:, :, np.newaxis], 3, axis=2)


def _jpeg_header(content: bytes) -> tuple[int, int, int] | None:
    """Height, width and components of a JPEG (ITU-T T.81, annex B); None for another format.

    Raises:
        BrokenImageError: it ends before its end marker: decoders would fill the rest with grey.
    """
    if not content.startswith(b"\xff\xd8\xff"):
        return None
    position, size = 2, (0, 0, 0)
    while content[position : position + 1] == b"\xff" and position + 9 < len(content):
        marker = content[position + 1]
        if marker == 0xFF:  # padding
            position += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # start of frame
            rows = int.from_bytes(content[position + 5 : position + 7])
            columns = int.from_bytes(content[position + 7 : position + 9])
            size = rows, columns, content[position + 9]
        if marker == 0xDA:  # the pixels follow: a marker in them can only be a real one
            if min(size) == 0:
                break
            if content.rfind(b"\xff\xd9", position) == -1:
                raise BrokenImageError("it is truncated")
            return size
        position += 2 + int.from_bytes(content[position + 2 : position + 4])
    raise BrokenImageError("it is truncated or damaged: a JPEG without pixels")


def _opened(content: bytes) -> Image.Image:
    if not content:
        raise BrokenImageError("it is empty")
    try:
        return Image.open(io.BytesIO(content))
    except Image.DecompressionBombError:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise BrokenImageError(f"it has more than {most:,} pixels: make it smaller") from None
    except (OSError, SyntaxError, ValueError):
        raise BrokenImageError("it is not an image") from None


class _Decoders(threading.local):
    """A decoder per thread and process: it has threads, which a forked process does not inherit."""

    made_in = 0
    made: tuple[Any, Any, Any] = (None, None, None)

    def get(self) -> tuple[Any, Any, Any]:
        """The library, a decoder, its parameters."""
        if self.made_in != os.getpid():
            with _quiet():  # it reports missing GPU libraries, which are not needed here
                nvimgcodec: Any = importlib.import_module("nvidia.nvimgcodec")
                parameters = nvimgcodec.DecodeParams(apply_exif_orientation=False)
                decoder = nvimgcodec.Decoder(
                    device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
                    max_num_cpu_threads=1,
                    backends=[nvimgcodec.Backend(nvimgcodec.CPU_ONLY)],
                    # Where a file keeps fewer colours than pixels, those between are interpolated,
                    # as by Pillow; with 0, colours would be repeated.
                    options=":fancy_upsampling=1",
                )
            self.made, self.made_in = (nvimgcodec, decoder, parameters), os.getpid()
        return self.made


_decoders = _Decoders()
_stderr = threading.Lock()


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Send what native code writes to standard error to a file that nobody reads."""
    with _stderr, tempfile.TemporaryFile() as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
