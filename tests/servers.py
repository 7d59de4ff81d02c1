"""A real HTTP server of a folder's files, well behaved or not: `with FileServer(folder, busy=2) as
server: ...server.url...`; an S3 server; and one that speaks the Hugging Face Hub's protocol.
"""

import hashlib
import json
import logging
import os
import re
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit
from urllib.request import Request, urlopen

import fsspec

PIECE = 2**16


class Asked(NamedTuple):
    """One request as it arrived; `range` is the header's text or None."""

    method: str
    path: str
    range: str | None


class FileServer:
    """Serves the files under a folder on this machine until the `with` ends; `url` ends without a
    slash.

    Misbehaviour, each may be changed while it runs: `ranges=False` answers 200 with the whole file
    to every request; `busy=n` answers the first n requests with 503 (n < 0: all); `status` answers
    that to every request; `drop_after=n` closes the connection after n bytes of a body, for the
    first `drops` bodies that are longer (all by default); `redirect=True` sends every path to
    `/moved/...` first, "relative" by a relative address, "loop" again and again; `wrong_length=n`
    states n bytes more than it sends; `head=False` refuses HEAD with 403 as presigned links do;
    `sizes=False` never states a file's length or version; `shift=n` answers a range with one that
    begins n bytes later, `most=n` with n bytes of it at most; `kind` is the content's type;
    `delay_s` waits before each answer, `piece_s` before each 64 KiB of a body.

    Counted: `asked` (every request in order), `bytes_sent` (of bodies), `most_at_once` (answers
    under way at the same time)."""

    def __init__(
        self,
        folder: str | Path,
        *,
        ranges: bool = True,
        busy: int = 0,
        status: int | None = None,
        drop_after: int | None = None,
        drops: int = -1,
        redirect: bool | str = False,
        wrong_length: int = 0,
        head: bool = True,
        sizes: bool = True,
        shift: int = 0,
        most: int = 0,
        kind: str = "application/x-tar",
        encoding: str = "",
        delay_s: float = 0.0,
        piece_s: float = 0.0,
    ) -> None:
        self.folder, self.encoding = Path(folder), encoding
        self.ranges, self.busy, self.status, self.redirect = ranges, busy, status, redirect
        self.drop_after, self.drops, self.wrong_length = drop_after, drops, wrong_length
        self.head, self.sizes, self.delay_s = head, sizes, delay_s
        self.shift, self.most, self.kind, self.piece_s = shift, most, kind, piece_s
        self.asked: list[Asked] = []
        self.bytes_sent, self.most_at_once, self.at_once = 0, 0, 0
        self.lock = threading.Lock()
        self._server = _Listener(("127.0.0.1", 0), type("Answer", (_Answer,), {"served": self}))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FileServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def requests(self) -> int:
        """How many requests arrived."""
        return len(self.asked)

    def forget(self) -> None:
        """Sets the counters to zero."""
        with self.lock:
            self.asked.clear()
            self.bytes_sent = self.most_at_once = 0


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no error of the server's."""


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    served: FileServer

    def do_GET(self) -> None:
        self._counted(body=True)

    def do_HEAD(self) -> None:
        self._counted(body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _counted(self, body: bool) -> None:
        served = self.served
        with served.lock:
            served.asked.append(
                Asked(self.command, unquote(urlsplit(self.path).path), self.headers["Range"])
            )
            served.at_once += 1
            served.most_at_once = max(served.most_at_once, served.at_once)
        try:
            time.sleep(served.delay_s)
            self._answer(body)
        finally:
            with served.lock:
                served.at_once -= 1

    def _answer(self, body: bool) -> None:
        served, path = self.served, unquote(urlsplit(self.path).path)
        with served.lock:
            busy = served.busy != 0
            served.busy -= served.busy > 0
        if busy or served.status:
            return self._plain(served.status or 503)
        if not (body or served.head):
            return self._plain(403)
        if served.redirect and (served.redirect == "loop" or not path.startswith("/moved/")):
            return self._plain(
                302,
                {
                    "Location": (
                        f"{'' if served.redirect == 'relative' else served.url}/moved{quote(path)}"
                    )
                },
            )
        file = served.folder / path.removeprefix("/moved/").lstrip("/")
        if file.is_dir():
            held = sorted(each.name + "/" * each.is_dir() for each in file.iterdir())
            page = "".join(f'<a href="{quote(name)}">{name}</a>\n' for name in held).encode()
            return self._plain(200, {"Content-Type": "text/html"}, page)
        if not file.is_file():
            return self._plain(404)
        return self._file(file, body)

    def _plain(self, status: int, headers: dict[str, str] | None = None, page: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(page))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page)

    def _file(self, file: Path, body: bool) -> None:
        served, held = self.served, file.stat()
        tag = f'"{held.st_mtime_ns:x}-{held.st_size:x}"'
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        partial = bool(wanted) and served.ranges and self.headers.get("If-Range", tag) == tag
        start = int(wanted[1]) + served.shift if partial else 0
        stop = min(int(wanted[2]) + 1, held.st_size) if partial and wanted[2] else held.st_size
        if partial and served.most:
            stop = min(stop, start + served.most)
        if partial and start >= held.st_size:
            return self._plain(416, {"Content-Range": f"bytes */{held.st_size}"})
        self.send_response(206 if partial else 200)
        self.send_header("Content-Type", served.kind)
        if served.encoding:
            self.send_header("Content-Encoding", served.encoding)
        if served.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if served.sizes:
            self.send_header("ETag", tag)
            self.send_header("Last-Modified", self.date_time_string(int(held.st_mtime)))
        if partial:
            self.send_header(
                "Content-Range", f"bytes {start}-{stop - 1}/{held.st_size if served.sizes else '*'}"
            )
        if served.sizes or partial:
            self.send_header("Content-Length", str(stop - start + served.wrong_length))
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        if body:
            self._body(file, start, stop)
        return None

    def _body(self, file: Path, start: int, stop: int) -> None:
        served, dropped = self.served, False
        with served.lock:
            if (
                served.drop_after is not None
                and served.drops != 0
                and stop - start > served.drop_after
            ):
                stop, dropped = start + served.drop_after, True
                served.drops -= served.drops > 0
        with open(file, "rb") as opened:
            while start < stop:
                time.sleep(served.piece_s)
                piece = os.pread(opened.fileno(), min(PIECE, stop - start), start)
                with served.lock:  # before the client can have it, and ask for the number
                    served.bytes_sent += len(piece)
                self.wfile.write(piece)
                start += len(piece)
        self.close_connection |= dropped or served.wrong_length != 0


class Hub:
    """A server that answers as the Hugging Face Hub does, from folders below `root`: models in
    `ORG/NAME/REVISION`, data sets in `datasets/ORG/NAME/REVISION`. fsspec finds it by its own
    configuration, here and in new processes; models need `HF_ENDPOINT` in a new process. `asked`
    are the requests in order; `status` answers that to every request for a file."""

    def __init__(self, root: Path, status: int | None = None) -> None:
        self.root, self.status = root, status
        self.asked: list[Asked] = []
        self._server = _Listener(("127.0.0.1", 0), type("Answer", (_HubAnswer,), {"hub": self}))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        self._thread.start()
        self._before = dict(os.environ), dict(fsspec.config.conf)
        os.environ["FSSPEC_HF_ENDPOINT"] = self.endpoint
        fsspec.config.conf["hf"] = {"endpoint": self.endpoint}
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._before)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _HubAnswer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path, root, repo = unquote(urlsplit(self.path).path), self.hub.root, r"[\w.]+/[\w.]+"
        self.hub.asked.append(Asked(self.command, path, self.headers["Range"]))
        known = re.fullmatch(rf"/api/(?:models/)?((?:datasets/)?{repo})(?:/revision/(\w+))?", path)
        tree = re.fullmatch(rf"/api/(datasets/{repo}/)tree/(\w+)/?(.*)", path)
        file = re.fullmatch(rf"/((?:datasets/)?{repo}/)resolve/(\w+)/(.+)", path)
        if known and (root / known[1] / (known[2] or "main")).is_dir():
            found: Any = {"id": known[1].removeprefix("datasets/"), "siblings": []}
            return self._send(json.dumps(found).encode(), "", body)
        if tree and (folder := root / tree[1] / tree[2] / tree[3]).is_dir():
            below = folder.rglob("*") if "recursive=true" in self.path.lower() else folder.iterdir()
            entries = [self._entry(each, root / tree[1] / tree[2]) for each in below]
            return self._send(json.dumps(entries).encode(), "", body)
        held = root / f"{file[1]}{file[2]}/{file[3]}" if file else root
        if file and self.hub.status is None and held.is_file():
            return self._send(held.read_bytes(), file[1] + file[2], body)
        self.send_response(self.hub.status or 404 if file else 404)
        self.send_header("X-Error-Code", "RepoNotFound" if known else "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def _send(self, content: bytes, revision: str, body: bool) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        if wanted:
            self.send_header("Content-Range", f"bytes {wanted[1]}-{wanted[2]}/{len(content)}")
            content = content[int(wanted[1]) : int(wanted[2]) + 1]
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", hashlib.sha1(revision.encode()).hexdigest())
        self.end_headers()
        if body:
            self.wfile.write(content)

    @staticmethod
    def _entry(path: Path, root: Path) -> dict[str, Any]:
        content = path.read_bytes() if path.is_file() else b""
        kind = "file" if path.is_file() else "directory"
        oid = hashlib.sha1(content).hexdigest()
        name = path.relative_to(root).as_posix()
        return {"type": kind, "oid": oid, "size": len(content), "path": name}


def _restore(before: tuple[dict[str, str], dict[str, Any]]) -> None:
    """Sets the environment and fsspec's configuration as they were."""
    environment, configuration = before
    os.environ.clear()
    os.environ.update(environment)
    fsspec.config.conf.clear()
    fsspec.config.conf.update(configuration)


class ObjectStore:
    """A real S3 server on this machine with one empty bucket, which fsspec finds by its own
    configuration, here and in new processes."""

    bucket = "scenes"

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from moto.server import ThreadedMotoServer
        logging.getLogger("werkzeug").disabled = True
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self.url = f"s3://{self.bucket}"

    def __enter__(self) -> "ObjectStore":
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        told = {"endpoint_url": self.endpoint, "key": "any", "secret": "any"}
        self._before = dict(os.environ), dict(fsspec.config.conf)
        os.environ.update(
            {f"FSSPEC_S3_{name.upper()}": value for name, value in told.items()},
            AWS_DEFAULT_REGION="us-east-1",
        )
        fsspec.config.conf["s3"] = told
        urlopen(Request(f"{self.endpoint}/moto-api/reset", method="POST")).close()
        fsspec.filesystem("s3").mkdir(self.bucket)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._before)
        self._server.stop()

    def put(self, file: Path, key: str) -> str:
        """Stores a file and returns its URL."""
        fsspec.filesystem("s3").pipe_file(f"{self.bucket}/{key}", file.read_bytes())
        return f"{self.url}/{key}"
