"""Compare variants of a recipe: same data and budget, several seeds, one table of scores."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="ablate",
    commands={"ablate": "gigamask.plugins.ablate.command:AblateCommand"},
)
