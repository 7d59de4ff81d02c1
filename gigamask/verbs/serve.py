"""`gigamask serve`: the page, until it is stopped."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import OmitArgPrefixes

from gigamask.faults import Fault
from gigamask.predict.settings import Settings

if TYPE_CHECKING:
    from gigamask.grounding.inference import GroundingPredictor
    from gigamask.serve.app import Rooms

LEAST_TOKEN = 16
"""Letters: fewer could be tried."""


@dataclass(frozen=True)
class Verb:
    """serves a page for the browser: try a model by clicks, boxes and words, look through data and samplers, watch runs"""

    weights: str | None = None
    """what answers clicks: a run folder, a checkpoint, an official .pth, a .safetensors, or a Hugging Face folder"""
    data: tuple[str, ...] = ()
    """tars, folders of tars, globs, or an index to look through"""
    runs: str | None = None
    """folder below which runs are shown, those that are being trained, too"""
    words: str | None = None
    """folder of a 'ground train', which finds masks by words; without --weights its segmenter answers clicks"""
    host: str = "127.0.0.1"
    """address to listen on; on another than this machine's own a token is asked for"""
    port: int = 8000
    """0 takes a free one"""
    token: str | None = None
    """what must be known to come in; made up and printed where --host is not this machine's own"""
    allow_host: tuple[str, ...] = ()
    """further names by which the page may be called, as those of a proxy in front of it"""
    cache: str | None = None
    """folder that keeps pictures' embeddings over restarts"""
    device: str = "auto"
    """auto is cuda when there is one"""
    masks: Annotated[Settings, OmitArgPrefixes] = field(default_factory=Settings)
    """of everything in a picture, what is asked and which masks stay; names and defaults are those of SamAutomaticMaskGenerator"""
    json: str | None = None
    """file for what was printed, as data, written when the page is closed"""

    def run(self) -> dict[str, Any]:
        self._check()
        from gigamask.serve import listening

        with ExitStack() as stack:
            door = listening.door(self.host, self.token, self.allow_host)
            listener = stack.enter_context(listening.bind(self.host, self.port))
            rooms = self._rooms(stack)
            address = listening.address(listener, self.host, door.token)
            print(f"{address}\nCtrl-C closes it", flush=True)
            listening.serve(rooms, door, listener)
        return {"address": address}

    def _check(self) -> None:
        """Raises `Fault` where there is nothing to show, or no way to."""
        from importlib.util import find_spec

        if not (self.weights or self.data or self.runs or self.words):
            raise Fault("there is nothing to show; give --weights WEIGHTS, --data PATH..., --runs DIR or --words RUN, or several of them")
        if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
            raise Fault(f"the page needs {' and '.join(missing)}; install them: pip install 'gigamask[web]'")
        if not 0 <= self.port < 2**16:
            raise Fault(f"--port is {self.port}, it must lie in 0 to {2**16 - 1}; 0 takes a free one")
        if self.token is not None and (len(self.token) < LEAST_TOKEN or not self.token.isascii() or not self.token.isalnum()):
            raise Fault(f"--token has {len(self.token)} letters; give {LEAST_TOKEN} or more, all of A-Z, a-z and 0-9, or leave it out: one is made")

    def _rooms(self, stack: ExitStack) -> Rooms:
        """Returns what the page shows."""
        from pathlib import Path

        from gigamask import arguments
        from gigamask.predict.cache import EmbeddingCache
        from gigamask.serve.app import Rooms
        from gigamask.serve.logbook import Logbook
        from gigamask.serve.orders import Orders
        from gigamask.serve.shelf import Shelf
        from gigamask.serve.studio import Studio
        from gigamask.train.checkpoint import load_model
        from gigamask.verbs.opening import opened

        logbook = Logbook(Path(self.runs)) if self.runs else None
        index = stack.enter_context(opened(self.data)) if self.data else None
        shelf, orders = (Shelf(index), Orders(index)) if index else (None, None)
        asker = self._predictor() if self.words else None
        model = load_model(self.weights, self.device, arguments.run_of) if self.weights else asker.mask_features.model if asker else None
        cache = EmbeddingCache(Path(self.cache)) if self.cache else None
        studio = Studio(model, asker, self.masks, cache) if model else None
        return Rooms(studio, shelf, orders, logbook, self.weights or self.words)

    def _predictor(self) -> GroundingPredictor:
        from gigamask.grounding.inference import GroundingPredictor
        from gigamask.verbs.ground import load_config

        words = self.words or ""
        return GroundingPredictor.from_checkpoint(load_config(words, None, self.device), words)
