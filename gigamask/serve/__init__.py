"""The web page: try a model on a photograph, look at data and at runs. FastAPI behind, one page of plain JavaScript in front."""
