"""gzip -9 and xz -9e as yardsticks: how many bytes they need for the held-out text, cold and after reading as much of
the training text as their window holds.

A compressor that starts cold has to learn Python from the text it is given, which is no fair comparison with a model
that has read the library. Primed sizes are what the text adds to a stream that already holds the training text.
"""

import gzip
import lzma
import zlib
from collections.abc import Sequence

GZIP_WINDOW_BYTES = 32 * 1024  # what DEFLATE can look back; xz -9 looks back 64 MiB, more than the training text


def gzip_bytes(text: bytes) -> int:
    """Size of `gzip -9`, header and checksum included."""
    return len(gzip.compress(text, compresslevel=9, mtime=0))


def xz_bytes(text: bytes) -> int:
    """Size of `xz -9e`, header and checksum included."""
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def gzip_primed_bytes(texts: Sequence[bytes], priming: bytes) -> int:
    """Sum over texts of a raw DEFLATE stream whose window begins full of the end of `priming`."""
    size = 0
    for text in texts:
        stream = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, priming[-GZIP_WINDOW_BYTES:])
        size += len(stream.compress(text)) + len(stream.flush())
    return size


def xz_primed_bytes(text: bytes, priming: bytes) -> int:
    """What `text` adds to the xz stream of all of `priming`."""
    return xz_bytes(priming + text) - xz_bytes(priming)


def compression_bits_per_byte(held_out: Sequence[bytes], training: Sequence[bytes]) -> dict[str, float]:
    """Name of the variant -> bits per byte of the held-out texts."""
    joined, priming = b"".join(held_out), b"".join(training)
    sizes = {
        "gzip -9, each module alone": sum(gzip_bytes(text) for text in held_out),
        "gzip -9, all held-out modules in one stream": gzip_bytes(joined),
        "gzip -9, primed with 32 KiB of training text (its window)": gzip_primed_bytes(held_out, priming),
        "xz -9e, each module alone": sum(xz_bytes(text) for text in held_out),
        "xz -9e, all held-out modules in one stream": xz_bytes(joined),
        "xz -9e, primed with the whole training text": xz_primed_bytes(joined, priming),
    }
    return {name: 8 * size / len(joined) for name, size in sizes.items()}
