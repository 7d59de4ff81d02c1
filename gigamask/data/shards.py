"""Bytes by offset: a tar's number, an offset and a length enter, those bytes leave; or an index's rows enter, their jpgs and jsons leave.

Local tars are read by one positioned read an entry, an image of a folder is opened, read and closed. Remote tars are asked for everything a call
wants at once, neighbours by one request.
A reader may be pickled, forked or handed to a worker at any time: files are opened when first read, and positioned reads share no file position.
It belongs to one thread.

Not here: where entries lie (`data.index`), servers, their errors and trying again (`data.store`).
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from gigamask.data import image_folder, storage
from gigamask.data.index import Index
from gigamask.data.storage import ByteRange
from gigamask.errors import CorruptSampleError

MAX_GAP_BYTES = 2**16
"""Two members this close are fetched by one read; between neighbours lie a header and padding, at most 1,535 bytes in ustar."""
MAX_JOINED_BYTES = 2**23
"""Entries that follow each other are joined into one request up to here: several of SA-1B's; above it, several at once are faster."""

EntryBytes = tuple[bytes, bytes | None]


class ShardSpan(NamedTuple):
    """A stretch of one tar, by the tar's number."""

    shard: int
    start: int
    stop: int


class ShardReader:
    """Reads from a fixed list of tars and folders; of tars at most `open_files` are held open, the least recently used let go first.

    With `read_ahead` > 0, `read_entries` fetches remote tars in aligned blocks of so many bytes and keeps the last `blocks` of them, which is what
    an order wants that goes through a tar. Local files have the page cache.
    """

    def __init__(
        self, paths: Sequence[str], open_files: int = 64, read_ahead: int = 0, blocks: int = 4
    ) -> None:
        self._descriptors: OrderedDict[int, int] = OrderedDict()
        self._held: OrderedDict[ShardSpan, bytes] = OrderedDict()
        self.paths = tuple(paths)
        self.open_files, self.read_ahead, self.blocks = open_files, read_ahead, blocks
        self._remote = tuple(map(storage.is_remote, self.paths))

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Returns `size` bytes of a tar from `offset` on; raises CorruptSampleError where they are not to be had."""
        place = ByteRange(self.paths[shard], offset, size)
        if self._remote[shard]:
            return storage.read(*place)
        try:
            data = storage.read_at(self._descriptor(shard), place)
        except OSError as error:
            raise storage.read_error(place, error) from error
        if isinstance(data, CorruptSampleError):
            raise data
        return data

    def read_entry(self, index: Index, row: int) -> EntryBytes:
        """Returns the jpg and the json of one row (None without a json), by one read where they are neighbours; raises CorruptSampleError."""
        [entry] = self.read_entries(index, [row])
        if isinstance(entry, CorruptSampleError):
            raise entry
        return entry

    def read_entries(
        self, index: Index, rows: Sequence[int], jsons: bool = True
    ) -> list[EntryBytes | CorruptSampleError]:
        """Returns each row's jpg and json (None without one, or without `jsons`), or why they are not to be had."""
        spans = [_members(index, row, jsons) for row in rows]
        read = self._read_spans(
            index, [span for jpg, json in spans if jpg.start for span in _together(jpg, json)]
        )
        # In a tar a header comes before each file, so what lies at its very beginning is a file of a folder.
        return [
            _cut(jpg, json, read) if jpg.start else self._read_file(index, row, jpg)
            for row, (jpg, json) in zip(rows, spans, strict=True)
        ]

    def close(self) -> None:
        """Closes every tar and lets go of what was read ahead; a later read opens its tar again."""
        self._held.clear()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _read_file(self, index: Index, row: int, jpg: ShardSpan) -> EntryBytes | CorruptSampleError:
        """Returns an image of a folder, which has no json."""
        read = image_folder.read_file(
            os.path.join(self.paths[jpg.shard], os.fsdecode(index.images["name"][row])), jpg.stop
        )
        return read if isinstance(read, CorruptSampleError) else (read, None)

    def _read_spans(
        self, index: Index, spans: list[ShardSpan]
    ) -> dict[ShardSpan, bytes | CorruptSampleError]:
        """Returns the bytes of each span."""
        read: dict[ShardSpan, bytes | CorruptSampleError] = {}
        for span in spans:
            if not self._remote[span.shard]:
                try:
                    read[span] = self.read(span.shard, span.start, span.stop - span.start)
                except CorruptSampleError as bad:
                    read[span] = bad
        afar = sorted({span for span in spans if self._remote[span.shard]})
        if self.read_ahead > 0:
            for group in self._fitting(afar):
                read |= self._read_blocks(index, group)
        rest = [span for span in afar if not isinstance(read.get(span), bytes)]
        joined = _joined(rest)
        for whole, data in self._fetch(list(joined)).items():
            for span in joined[whole]:
                read[span] = (
                    data
                    if isinstance(data, CorruptSampleError)
                    else data[span.start - whole.start : span.stop - whole.start]
                )
        # One broken stretch must not take its neighbours along.
        alone = [
            span
            for whole, held in joined.items()
            for span in held
            if len(held) > 1 and isinstance(read[span], CorruptSampleError)
        ]
        return read | self._fetch(alone)

    def _fetch(self, spans: list[ShardSpan]) -> dict[ShardSpan, bytes | CorruptSampleError]:
        """Returns the bytes of remote spans, asked for at once."""
        places = [
            ByteRange(self.paths[span.shard], span.start, span.stop - span.start) for span in spans
        ]
        return dict(zip(spans, storage.read_ranges(places), strict=True))

    def _fitting(self, spans: list[ShardSpan]) -> list[list[ShardSpan]]:
        """Cuts sorted spans into groups of which each touches no more blocks than may be held; a span that touches more by itself is left out."""
        groups: list[list[ShardSpan]] = [[]]
        touched: set[tuple[int, int]] = set()
        for span in spans:
            blocks = {
                (span.shard, number)
                for number in range(span.start // self.read_ahead, -(-span.stop // self.read_ahead))
            }
            if len(blocks) > self.blocks:
                continue
            if len(touched | blocks) > self.blocks:
                groups.append([])
                touched = set()
            groups[-1].append(span)
            touched |= blocks
        return groups

    def _read_blocks(
        self, index: Index, spans: list[ShardSpan]
    ) -> dict[ShardSpan, bytes | CorruptSampleError]:
        """Returns spans cut from blocks, those that are not held fetched at once; never more than `blocks` of them are in memory."""
        ahead = self.read_ahead
        wanted: dict[ShardSpan, list[ShardSpan]] = {}
        for span in spans:
            ends = index.manifest.parts[span.shard].tar.bytes
            starts = range(span.start // ahead * ahead, span.stop, ahead)
            wanted[span] = [
                ShardSpan(span.shard, start, min(start + ahead, ends)) for start in starts
            ]
        needed = dict.fromkeys(block for blocks in wanted.values() for block in blocks)
        for block in needed:
            if block in self._held:
                self._held.move_to_end(block)
        missing = [block for block in needed if block not in self._held]
        while len(self._held) > self.blocks - len(missing):
            self._held.popitem(last=False)
        for block, data in self._fetch(missing).items():
            if isinstance(data, bytes):
                self._held[block] = data
        read: dict[ShardSpan, bytes | CorruptSampleError] = {}
        for span, blocks in wanted.items():
            if all(block in self._held for block in blocks):
                pieces = (
                    self._held[block][max(span.start - block.start, 0) : span.stop - block.start]
                    for block in blocks
                )
                read[span] = b"".join(pieces)
        return read

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
        return ShardReader, (self.paths, self.open_files, self.read_ahead, self.blocks)

    def __del__(self) -> None:
        self.close()


def _members(index: Index, row: int, jsons: bool) -> tuple[ShardSpan, ShardSpan | None]:
    """Returns where a row's jpg and, if wanted, json lie."""
    shard, jpg, jpg_bytes, json, json_bytes = (
        int(index.images[column][row])
        for column in ("shard", "jpg_offset", "jpg_bytes", "json_offset", "json_bytes")
    )
    return ShardSpan(shard, jpg, jpg + jpg_bytes), None if json < 0 or not jsons else ShardSpan(
        shard, json, json + json_bytes
    )


def _together(jpg: ShardSpan, json: ShardSpan | None) -> list[ShardSpan]:
    """Returns one span of both where they are neighbours, else each."""
    if json is None:
        return [jpg]
    start, stop = min(jpg.start, json.start), max(jpg.stop, json.stop)
    near = stop - start <= jpg.stop - jpg.start + json.stop - json.start + MAX_GAP_BYTES
    return [ShardSpan(jpg.shard, start, stop)] if near else [jpg, json]


def _cut(
    jpg: ShardSpan, json: ShardSpan | None, read: dict[ShardSpan, bytes | CorruptSampleError]
) -> EntryBytes | CorruptSampleError:
    """Returns the jpg and the json from what was read."""
    spans = _together(jpg, json)
    first, last = read[spans[0]], read[spans[-1]]
    if isinstance(first, CorruptSampleError):
        return first
    if isinstance(last, CorruptSampleError):
        return last
    image = first[jpg.start - spans[0].start : jpg.stop - spans[0].start]
    return image, None if json is None else last[
        json.start - spans[-1].start : json.stop - spans[-1].start
    ]


def _joined(spans: list[ShardSpan]) -> dict[ShardSpan, list[ShardSpan]]:
    """Returns sorted spans under the stretches to ask for: neighbours share one, up to a bound."""
    joined: dict[ShardSpan, list[ShardSpan]] = {}
    last, held = None, []
    for span in spans:
        if (
            last is not None
            and last.shard == span.shard
            and span.start - last.stop <= MAX_GAP_BYTES
        ):
            both = ShardSpan(last.shard, last.start, max(last.stop, span.stop))
            if both.stop - both.start <= MAX_JOINED_BYTES:
                del joined[last]
                last, held = both, [*held, span]
                joined[last] = held
                continue
        last, held = span, [span]
        joined[last] = held
    return joined
