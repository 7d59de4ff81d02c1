"""The web page: annotate, try a model, browse data, watch runs; FastAPI and plain JavaScript."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="serve",
    commands={"serve": "gigamask.plugins.serve.command:ServeCommand"},
)
