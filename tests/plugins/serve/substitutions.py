"""How the commands of the pages of the page are made small."""

REPLACED = [
    (r"^serve\b.*", "serve --help", "it serves until it is stopped"),
]
