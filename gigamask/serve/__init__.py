"""The web page to try a model, and to browse datasets and runs: FastAPI and plain JavaScript."""
