"""The command line: what it accepts, how it refuses, and that it starts light."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from gradexporter import __version__
from gradexporter.cli import main, parser

WITHOUT_HEAVY = "import sys; sys.modules.update(torch=None, sklearn=None); from gradexporter.cli import main; "


def commands() -> dict[str, argparse.ArgumentParser]:
    grammar = parser()
    (choices,) = [action.choices for action in grammar._actions if isinstance(action, argparse._SubParsersAction)]
    return {"": grammar, **choices}


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **environ}
    )


def test_options_are_added_and_removed_on_purpose(golden):
    """A removed or renamed option breaks somebody's script: the golden file makes it a decision."""
    lines = []
    for command, grammar in commands().items():
        for action in grammar._actions:
            if isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)):
                continue
            names = ", ".join(action.option_strings) or action.dest
            choices = f" {{{','.join(action.choices)}}}" if action.choices else ""
            lines.append(f"gradexporter {command} {names}{choices}".replace("  ", " "))

    golden("cli_options.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("command", [name for name in commands() if name])
def test_every_command_explains_itself_with_an_example_and_its_exit_status(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])

    text = capsys.readouterr().out
    assert f"\n  gradexporter {command}" in text
    assert "exit status:" in text


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["bundle", "--help"]])
def test_help_needs_neither_torch_nor_scikit_learn(arguments):
    done = run_python(WITHOUT_HEAVY + f"main({arguments})")

    assert done.returncode == 0, done.stderr


def test_rules_are_written_without_torch(tmp_path):
    done = run_python(WITHOUT_HEAVY + f"sys.exit(main(['bundle', '--only', 'rules', '--output', {str(tmp_path)!r}]))")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "alerts" / "rules.yaml").exists()


def test_what_was_written_is_up_to_date_until_somebody_edits_it(tmp_path, capsys):
    bundle = ["bundle", "--only", "rules", "--output", str(tmp_path)]
    assert main(bundle) == 0
    assert main([*bundle, "--json"]) == 0
    assert main([*bundle, "--check"]) == 0
    (tmp_path / "alerts" / "rules.yaml").write_text("groups: []\n")

    assert main([*bundle, "--check"]) == 1
    assert main([*bundle, "--check", "--json"]) == 1

    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[:3] == ["written alerts/rules.yaml", '{"written": []}', "every generated file is up to date"]
    assert lines[3] == "stale alerts/rules.yaml"
    assert lines[-1] == '{"stale": ["alerts/rules.yaml"]}'
    assert "rewrite with: gradexporter bundle" in told.err


def test_a_folder_that_cannot_be_written_is_one_line_and_no_traceback(tmp_path, capsys):
    (tmp_path / "alerts").write_text("a file where a folder should be")

    assert main(["bundle", "--only", "rules", "--output", str(tmp_path)]) == 1

    told = capsys.readouterr().err
    assert told.startswith("gradexporter: ")
    assert str(tmp_path / "alerts") in told
    assert told.count("\n") == 1


def test_the_module_is_the_command_line_too():
    done = subprocess.run([sys.executable, "-m", "gradexporter", "--version"], capture_output=True, text=True)

    assert done.stdout == f"gradexporter {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--scenario", "spike"], "argument --scenario: invalid choice: 'spike'"),
        (["demo", "--seed", "one"], "argument --seed: cannot be 'one': give a whole number from 0"),
        (["demo", "--seed", "-1"], "argument --seed: cannot be '-1': give a whole number from 0"),
        (["demo", "--seeds", "9-0"], "argument --seeds: cannot be '9-0': give a range such as 0-9 or a list"),
        (["demo", "--seeds", "1,,2"], "argument --seeds: cannot be '1,,2': give a range such as 0-9 or a list"),
        (["demo", "--seeds", "0-1000000000"], "cannot be '0-1000000000': give at most 10000 seeds, such as 0-9"),
        (["demo", "--seeds", "0-9999,10000"], "cannot be '0-9999,10000': give at most 10000 seeds, such as 0-9"),
        (["demo", "--seeds", "2147483648"], "2147483648 is too large, the largest seed is 2147483647"),
        (["demo", "--seed", "1", "--seeds", "2"], "argument --seeds: not allowed with argument --seed"),
        (["demo", "--steps", "0"], "argument --steps: cannot be '0': give a whole number from 1"),
        (["demo", "--step-seconds", "nan"], "argument --step-seconds: cannot be 'nan': give seconds from 0"),
        (["demo", "--hold", "forever"], "argument --hold: cannot be 'forever': give seconds from 0 to 2147483647"),
        (["demo", "--hold", "1e12"], "argument --hold: cannot be '1e12': give seconds from 0 to 2147483647"),
        (["demo", "--port", "65536"], "argument --port: cannot be '65536': give a whole number from 0 to 65535"),
        (["demo", "--seeds", "0-9", "--port", "9000"], "--port has no use with --seeds, whose runs are not served"),
        (["demo", "--seeds", "0-9", "--hold", "5"], "--hold has no use with --seeds, whose runs are not served"),
        (["bundle", "--only", "alerts"], "argument --only: invalid choice: 'alerts'"),
    ],
)
def test_a_wrong_option_is_refused_with_what_it_was_and_what_to_do(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)

    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in commands() if name])
def test_an_option_that_does_not_exist_is_answered_with_the_usage_of_its_command(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, "--bogus"])

    told = capsys.readouterr().err
    assert told.startswith(f"usage: gradexporter {command} ")
    assert told.endswith(f"gradexporter {command}: error: unrecognized arguments: --bogus\n")


def test_a_missing_scikit_learn_names_the_extra_to_install():
    done = run_python(
        "import sys; sys.modules['sklearn'] = None; from gradexporter.cli import main; sys.exit(main(['demo']))"
    )

    assert done.returncode == 1
    assert done.stderr == (
        "gradexporter: the demo needs scikit-learn, the extra 'demo': "
        "pip install 'gradexporter[demo]', or in a checkout '.[demo]'\n"
    )
    assert done.stdout == ""


def test_a_disabled_monitor_is_said_rather_than_shown_as_an_empty_run():
    done = run_python(
        "import sys; from gradexporter.cli import main; sys.exit(main(['demo']))", GRADEXPORTER_DISABLED="1"
    )

    assert done.returncode == 1
    assert "GRADEXPORTER_DISABLED is set" in done.stderr


def test_a_reader_that_goes_away_is_no_traceback():
    command = f"{sys.executable} -m gradexporter demo --port 0 | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)

    assert done.stdout.startswith("gradexporter demo: spike_cascade, seed 1")
    assert "Traceback" not in done.stderr
