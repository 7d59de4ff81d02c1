"""`gigamask serve`: a web page for models, data and runs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from gigamask import plugin
from gigamask.errors import GigamaskError
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.parser import FLAT
from gigamask.pixels import WindowOptions
from gigamask.plugins.serve.photographs import folder_of_images

if TYPE_CHECKING:
    from gigamask.inference.text_predictor import TextPredictor
    from gigamask.plugins.serve.app import AppState
    from gigamask.plugins.serve.project_routes import ProjectState
    from gigamask.plugins.serve.session import Session

MIN_TOKEN_LENGTH = 16
"""Minimum number of letters and digits; shorter tokens could be guessed."""


@dataclass(frozen=True)
class ServeCommand(WindowOptions):
    """serve a web page: annotate photographs, try a model, browse data and samplers, watch runs"""

    needs_flags: ClassVar = {"images": "project"}

    weights: str | None = None
    """model to try: a run folder, a checkpoint, an official .pth, a .safetensors, a Hugging Face
    folder, or starter, the small model in this package, which is also the default if there is
    nothing else to show"""
    data: tuple[str, ...] = ()
    """data to browse: tars, folders of tars, globs, or an index"""
    runs: str | None = None
    """folder of runs to watch, finished or in training"""
    compare: str | None = None
    """second model, whose masks are shown beside those of --weights for the same prompts"""
    project: str | None = None
    """project folder to annotate in; it is made if it does not exist"""
    images: str | None = None
    """folder of the images of a new --project, or where they are now"""
    grounding: str | None = None
    """run folder of 'gigamask ground train', to find masks by text; without --weights, its
    segmenter is the model to try"""
    host: str = "127.0.0.1"
    """address to listen on; any but localhost can be reached from other machines"""
    port: int = 8000
    """port to listen on; 0 picks a free one"""
    token: str | None = None
    """secret in the page's URL, which a browser needs once; by default a new one is generated"""
    no_token: bool = False
    """let every account of this machine use the page; only with --host localhost"""
    allow_host: tuple[str, ...] = ()
    """additional host names of the page, such as that of a reverse proxy"""
    root_path: str = ""
    """path that a reverse proxy puts before those of the page and does not remove, such as
    /user/me/proxy/absolute/8000"""
    cache: str | None = None
    """folder to cache image embeddings in across restarts"""
    device: str = "auto"
    """cpu, cuda, cuda:N or mps; auto uses cuda if available"""
    trust: bool = False
    """run code that a run folder names, such as file.py:Class, and that is not built in"""
    masks: Annotated[AutomaticMaskConfig, FLAT] = field(default_factory=AutomaticMaskConfig)
    """how masks are generated: the arguments of SamAutomaticMaskGenerator"""
    json: str | None = None
    """write the results to this JSON file when the server stops"""

    def run(self) -> dict[str, Any]:
        """Serve the page until Ctrl-C, and return its address."""
        self._check()
        from gigamask.plugins.serve import server
        from gigamask.plugins.serve.lost_images import notice

        with ExitStack() as stack:
            listener = stack.enter_context(server.bind(self.host, self.port))
            access = self.host, self.token, self.allow_host, self.no_token
            port = listener.getsockname()[1]
            policy = server.security_policy(*access, port, self.root_path)
            state = self._state(stack)
            address = server.page_url(listener, self.host, policy)
            print(f"{address}\npress Ctrl-C to stop", flush=True)
            if state.project:
                told = state.project.rounds.notice, notice(state.project.annotator.project)
                for line in filter(None, told):
                    print(line, flush=True)
            try:
                server.serve(state, policy, listener)
            finally:
                state.stop()
        return {"address": address}

    def _check(self) -> None:
        """Raise `GigamaskError` if a flag is invalid or a package is not installed."""
        from importlib.util import find_spec

        if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
            raise GigamaskError(
                f"the page needs {' and '.join(missing)}; run pip install 'gigamask[web]'"
            )
        from gigamask.models.weight_paths import check_weights_exist

        for weights in filter(None, (self.weights, self.compare)):
            check_weights_exist(weights)
        if self.data:
            from gigamask.data.index import find_shards

            find_shards(self.data)
        if not 0 <= self.port < 2**16:
            raise GigamaskError(
                f"--port must be 0 to {2**16 - 1}; 0 picks a free one (got {self.port})"
            )
        if self.images is not None:
            folder_of_images(self.images)
        token = self.token
        short = token is not None and len(token) < MIN_TOKEN_LENGTH
        if token is not None and (short or not token.isascii() or not token.isalnum()):
            raise GigamaskError(
                f"--token must be at least {MIN_TOKEN_LENGTH} characters of A-Z, a-z and 0-9 "
                f"(got {len(token)} characters); leave it out to generate one"
            )

    def _state(self, stack: ExitStack) -> AppState:
        """Return the state of the page; the stack keeps a temporary index open."""
        from pathlib import Path

        from gigamask import config_files
        from gigamask.models.embedding_cache import EmbeddingCache
        from gigamask.models.weight_paths import STARTER
        from gigamask.plugins.serve.app import AppState
        from gigamask.plugins.serve.dataset_view import DatasetView
        from gigamask.plugins.serve.runs_view import RunsView
        from gigamask.plugins.serve.session import Session
        from gigamask.training.checkpoint import load_model
        from gigamask.workflows.open_data import open_or_build_temporary

        runs = RunsView(Path(self.runs)) if self.runs else None
        index = stack.enter_context(open_or_build_temporary(self.data)) if self.data else None
        text_model = self._text_model() if self.grounding else None
        model = text_model.segmenter if text_model else None
        weights = self.weights
        others = self.data or self.runs or self.grounding
        needs_model = self.project or self.compare or not others
        if not weights and needs_model and not self.grounding:
            weights = STARTER
        config_of = partial(config_files.config_of_weights, trust=self.trust)
        if weights:
            model = load_model(weights, self.device, config_of)
        other = load_model(self.compare, self.device, config_of) if self.compare else None
        for each in (model, other):
            if each:
                each.set_window(self.window, self.percentiles)
        cache = EmbeddingCache(Path(self.cache)) if self.cache else None
        session = Session(model, text_model, self.masks, cache) if model else None
        project = self._project(stack, session, weights or self.grounding or "")
        return AppState(
            session=session,
            dataset=DatasetView(index) if index else None,
            runs=runs or (project.rounds.runs if project else None),
            project=project,
            weights=weights or self.grounding,
            compared=Session(other) if other else None,
            compared_weights=self.compare,
        )

    def _project(
        self, stack: ExitStack, session: Session | None, weights: str
    ) -> ProjectState | None:
        """Return the project; the stack keeps it open."""
        from gigamask.plugins.serve.annotator import Annotator
        from gigamask.plugins.serve.project import Project
        from gigamask.plugins.serve.project_routes import ProjectState
        from gigamask.plugins.serve.proposals import Proposals
        from gigamask.plugins.serve.rounds import Rounds

        if self.project is None or session is None:
            return None
        project = stack.enter_context(Project.open(self.project, self.images))
        given = WindowOptions(window=self.window, percentiles=self.percentiles)
        if changed := project.keep_window(given):
            print(changed, flush=True)
        annotator = Annotator(project, session)
        rounds = Rounds(annotator, weights, self.device)
        return ProjectState(annotator, Proposals(annotator, self.masks), rounds)

    def _text_model(self) -> TextPredictor:
        """Return what finds masks by text, which a plugin opens."""
        known = plugin.merged("text_predictors")
        if not known:
            raise GigamaskError("--grounding needs the plugin grounding, which is not installed")
        return plugin.load(next(iter(known.values())))(self.grounding, self.device, self.trust)
