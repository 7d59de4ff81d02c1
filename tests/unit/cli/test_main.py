"""Exit codes, warnings, and what `--help` imports."""

import io
import os
import shlex
import signal
import subprocess
import sys

import pytest

from gigamask import plugin
from gigamask.cli import main
from gigamask.cli.commands.verify import VerifyCommand
from gigamask.errors import GigamaskError
from tests.commands import refusal

COMMANDS = """
import contextlib, io, sys
from gigamask.cli.main import main
for line in sys.stdin.read().splitlines():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        with contextlib.redirect_stderr(io.StringIO()) as err:
            main(line.split())
    imported = {"torch", "numpy"} & sys.modules.keys()
    print(line, len(out.getvalue()) > 100, err.getvalue().strip(), *imported, sep="\\t")
"""
MAIN = "import sys; from gigamask.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_quietly():
    """As with `| head -1`: no traceback, and the exit code of a shell."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "--help"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (main.PIPE_CLOSED, b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    "streams, code, line",
    [
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 2, "an output: No space left on device; check"),
    ],
)
def test_streams_that_are_missing_or_full(tmp_path, streams, code, line):
    command = f"{shlex.quote(sys.executable)} -m gigamask synth out --images 2 {streams}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, line in done.stderr) == (code, True)
    assert (tmp_path / "out" / "sa_000000.tar").exists()


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main.main(["index", "a.tar", "--out", "x"]) == 2
    assert "gigamask: the working directory: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "number, times",
    [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2), (signal.SIGUSR1, 2)],
)
def test_a_signal_is_one_line_and_leaves_no_file(tmp_path, monkeypatch, capsys, number, times):
    """Also if a batch system repeats it while files are removed."""
    handler, unlink = signal.getsignal(number), os.unlink

    def twice(path):
        for _ in range(times - 1):
            signal.raise_signal(number)
        unlink(path)

    monkeypatch.setattr(
        "gigamask.synthetic.scenes.record", lambda *_, **__: signal.raise_signal(number)
    )
    monkeypatch.setattr(os, "unlink", twice)
    assert main.main(f"synth {tmp_path}/out --images 2".split()) == 128 + number
    printed = capsys.readouterr().err.lstrip()  # rich before 14.3.4 leaves an empty line
    assert printed == f"gigamask: stopped by {number.name}; run the same command again\n"
    assert not list((tmp_path / "out").iterdir())
    assert signal.getsignal(number) == handler


def test_a_signal_during_clean_up_does_not_hide_the_failure(monkeypatch, capsys):
    """As when torchrun stops the processes that fail since another was killed."""

    def failing(arguments):
        try:
            raise GigamaskError("another process ended")
        finally:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(main, "run_command", failing)
    assert main.main(["train"]) == 128 + signal.SIGTERM
    stopped = "gigamask: stopped by SIGTERM; run the same command again\n"
    assert capsys.readouterr().err == f"gigamask: another process ended\n{stopped}"


def test_names_that_standard_output_cannot_encode_are_escaped(monkeypatch):
    """As in a file or a pipe on Windows, and for names of files that are not UTF-8."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    monkeypatch.setattr(sys, "argv", ["gigamask", "index"])
    monkeypatch.setattr(main, "run_command", lambda _: print("\u732b\udcff.jpg") or 0)
    assert main.main() == 0
    assert written.getvalue() == b"\\u732b\\udcff.jpg\n"


def test_another_broken_pipe_is_an_error(monkeypatch):
    def broken(arguments):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(main, "run_command", broken)
    with pytest.raises(BrokenPipeError):
        main.main(["--help"])


def imported_by(lines: list[str]) -> list[list[str]]:
    """Run commands one after the other in a new process.

    Returns:
        Of each, the line, whether it wrote help, its error, and which of torch and NumPy are
        imported after it.
    """
    process = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    return [row.split("\t") for row in process.stdout.splitlines()]


@pytest.mark.slow
def test_help_imports_neither_torch_nor_numpy():
    trainings = [each for record in plugin.installed() for each in record.trainings]
    shown = [*main.commands(), *trainings, "train sam_vit_b", "plan tiny"]
    lines = ["--help", *(f"{each} --help" for each in shown)]
    assert imported_by(lines) == [[line, "True", ""] for line in lines]


@pytest.mark.slow
def test_a_wrong_path_is_found_before_torch_is_imported(scenes):
    """Which takes seconds; also a wrong name, and weights and images that are missing."""
    nothing = "no such"
    lines = {
        "train tiny --data nowhere --out r": nothing,
        "train sam_vit_b --data nowhere --out r": nothing,
        "train tiny --data nowhere.json --images nowhere --out r": nothing,
        "train compact --data pyproject.toml --masks nowhere --out r": nothing,
        f"train tiny --data {scenes} --init nowhere --out r": nothing,
        "train tiny": "--data is required",
        "pretrain mae_vit_b --data nowhere --out r": nothing,
        "evaluate nowhere --data gigamask": nothing,
        "evaluate starter --data nowhere": nothing,
        "evaluate starter --data": "--data needs a value",
        "segment nowhere a.png --out o": nothing,
        "segment starter nowhere.png --out o": nothing,
        "export nowhere --to onnx --out o": nothing,
        "index nowhere --out o": nothing,
        "verify nowhere": nothing,
        "stats nowhere": nothing,
        "masks nowhere --out o": nothing,
        "convert nowhere.json --images nowhere --out o": "nowhere: is not a folder",
        "follow nowhere.tar:1": nothing,
        "plan tiny --gpu nowhere": "no GPU is called",
        "benchmark davis starter --data nowhere": nothing,
    }
    lines = {line: said for line, said in lines.items() if line.split()[0] in main.commands()}
    rows = imported_by([*lines])
    assert [row[0] for row in rows] == [*lines]
    for (line, expected), row in zip(lines.items(), rows, strict=True):
        assert expected in row[2], line
        assert "torch" not in row[3:], line


@pytest.mark.slow
def test_a_command_says_what_it_does_before_it_begins(scenes, tmp_path, capsys):
    """Of many paths, or one that would move the cursor, a part and as text."""
    assert main.main(["verify", str(scenes)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"verify {scenes}: {VerifyCommand.__doc__}"
    assert main.main(["verify", "\x1b[2J", *["nowhere.tar"] * 1000]) == 2
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(r"verify \x1b[2J nowhere.tar nowhere.tar")
    assert len(first) < 300
    assert main.main(["verify", str(scenes), "--progress", "none"]) == 0
    assert capsys.readouterr().out.startswith("1 tar: ")


def test_a_command_of_a_plugin_that_was_deleted_names_it(monkeypatch, capsys):
    monkeypatch.setattr("gigamask.plugin.installed", lambda: ())
    assert "plugin formats, which is not installed" in refusal(capsys, "extract in --out out")


TWICE = ["--data", "--ignore", "--classes", "--freeze", "--data-weights", "--lr"]


@pytest.mark.parametrize("flag", TWICE)
def test_values_that_are_typed_twice_are_refused(monkeypatch, capsys, flag):
    words = f"gigamask train tiny {flag} 1 {flag.replace('lr', 'optimizer.lr')}=2 --out never"
    monkeypatch.setattr(sys, "argv", words.split())
    assert main.main() == 2
    assert f"{flag} is given twice; give it once" in capsys.readouterr().err
    assert main.main([*words.split()[1:], "--print-config"]) == 0  # of a program: the last counts


def test_files_of_flags_may_be_typed_one_by_one(tmp_path, monkeypatch, capsys):
    words = ["gigamask", "train", "tiny", "--print-config"]
    for flag in ("steps: 7", "seed: 3"):
        path = tmp_path / flag[:4]
        path.write_text(flag)
        words += ["--config", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    assert main.main() == 0
    printed = capsys.readouterr().out
    assert "steps: 7\n" in printed
    assert "seed: 3\n" in printed


def test_every_command_has_a_line_in_the_overview():
    lines = main.overview().splitlines()
    for command in main.commands():
        (line,) = (line for line in lines if line.startswith(f"  {command:9} "))
        assert len(line) <= 102


@pytest.mark.slow
def test_help_lists_a_command_s_own_flags_before_inherited_ones(capsys):
    for words in (["segment"], ["evaluate"], ["train", "tiny"]):
        with pytest.raises(SystemExit):
            main.main([*words, "--help"])
        out = capsys.readouterr().out
        own = "--data" if words == ["evaluate"] else "--out" if words == ["segment"] else "--epochs"
        assert 0 < out.index(f" {own} ") < out.index(" --submit ")
