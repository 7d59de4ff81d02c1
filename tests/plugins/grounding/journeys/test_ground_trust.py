"""A run of others of a grounding: no command runs code that it names, unless told to."""

from pathlib import Path

from gigamask.cli.main import commands as installed
from gigamask.cli.main import main
from tests.journeys import test_trust
from tests.journeys.test_trust import change_config
from tests.plugins.grounding import asked

marker = test_trust.marker


def test_a_grounding_run_needs_trust_for_its_recipe(described, tmp_path, marker):
    code = tmp_path / "site/evil.py"
    more = "from tests.plugins.grounding.asked import asking\n"
    code.write_text(code.read_text() + more)
    run = asked.run_in(tmp_path / "asked", described)
    change_config(Path(run.out), recipe=f"{tmp_path}/site/evil.py:asking")
    words = ["ground evaluate", "serve --port 0 --grounding"]
    for command in (each.split() for each in words if each.split()[0] in installed()):
        assert main([*command, run.out]) == 2
        assert not marker.exists()
