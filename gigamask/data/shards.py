"""Bytes by offset: a tar's number, an offset and a length enter, those bytes leave, by one positioned read.

A reader may be pickled, forked or handed to a worker at any time: files are opened when first read, and positioned reads share no file position.
It belongs to one thread.

Not here: where entries lie (`data.index`), sequential streaming.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence

from gigamask.data.index import Index
from gigamask.faults import BadSample

MAX_GAP_BYTES = 2**16
"""Two members this close are fetched by one read; between neighbours lie a header and padding, at most 1,535 bytes in ustar."""


class Shards:
    """Reads from a fixed list of tars, of which at most `open_files` are held open, the least recently used let go first."""

    def __init__(self, paths: Sequence[str], open_files: int = 64) -> None:
        self.paths = tuple(paths)
        self.open_files = open_files
        self._descriptors: OrderedDict[int, int] = OrderedDict()

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Returns `size` bytes of a tar from `offset` on; raises BadSample where they are not to be had."""
        try:
            data = os.pread(self._descriptor(shard), size, offset)
        except OSError as error:
            raise BadSample(f"{self.paths[shard]}: {size} bytes at {offset} cannot be read ({error.strerror}); check the disk") from error
        if len(data) != size:
            raise BadSample(f"{self.paths[shard]}: {size} bytes were wanted at {offset}, {len(data)} are there; fetch the tar and index it again")
        return data

    def read_entry(self, index: Index, row: int) -> tuple[bytes, bytes | None]:
        """Returns the jpg and the json of one row (None without a json), by one read where they are neighbours."""
        shard, jpg, jpg_bytes, json, json_bytes = (
            int(index.images[column][row]) for column in ("shard", "jpg_offset", "jpg_bytes", "json_offset", "json_bytes")
        )
        if json < 0:
            return self.read(shard, jpg, jpg_bytes), None
        start, stop = min(jpg, json), max(jpg + jpg_bytes, json + json_bytes)
        if stop - start > jpg_bytes + json_bytes + MAX_GAP_BYTES:
            return self.read(shard, jpg, jpg_bytes), self.read(shard, json, json_bytes)
        both = self.read(shard, start, stop - start)
        return both[jpg - start : jpg - start + jpg_bytes], both[json - start : json - start + json_bytes]

    def close(self) -> None:
        """Closes every tar; a later read opens its tar again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _descriptor(self, shard: int) -> int:
        descriptor = self._descriptors.get(shard)
        if descriptor is None:
            descriptor = self._descriptors[shard] = os.open(self.paths[shard], os.O_RDONLY)
            if len(self._descriptors) > self.open_files:
                os.close(self._descriptors.popitem(last=False)[1])
        else:
            self._descriptors.move_to_end(shard)
        return descriptor

    def __reduce__(self) -> tuple:
        return Shards, (self.paths, self.open_files)

    def __del__(self) -> None:
        self.close()
