"""Run commands on a cluster: `--submit slurm`, and the same plan on this machine."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="cluster",
    launchers={
        "training": "gigamask.plugins.cluster.launchers:SubmitTraining",
        "parts": "gigamask.plugins.cluster.launchers:SubmitParts",
    },
)
