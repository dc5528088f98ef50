"""The contract of every command: exit 2 and exactly one line on standard error for bad input."""

import pytest

BAD = [
    ("", "tide: no command; try tide help"),
    ("plans", "tide: 'plans': no such command; try tide help"),
    ("help plans", "tide help: 'plans': no such command"),
    ("info x", "tide info: 'x': unexpected argument"),
    ("info --nodes 2", "tide info: --nodes: no such flag; see tide help info"),
    ("info --json=1", "tide info: --json: takes no value"),
    ("info -z", "tide info: -z: no such flag; see tide help info"),
]


@pytest.mark.parametrize("words, line", BAD, ids=[b[0] or "nothing" for b in BAD])
def test_bad_words(tide, words, line):
    result = tide(*words.split())
    assert (result.code, result.out, result.err) == (2, "", line + "\n")


def test_control_characters_stay_on_one_line(tide):
    result = tide("info", "a\nb\x1b")
    assert (result.code, result.err) == (2, "tide info: 'a?b?': unexpected argument\n")


def test_full_output_device_is_an_error(tide):
    import subprocess
    from command import TIDE

    with open("/dev/full", "w") as full:
        done = subprocess.run([str(TIDE), "info"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "tide info: standard output: No space left on device\n")


def test_help_names_every_command(tide):
    result = tide("help")
    assert result.code == 0 and result.err == ""
    names = [line.split()[0] for line in result.out.splitlines() if line.startswith("  ")]
    assert {"info", "help"} <= set(names)
    for name in names:
        one = tide("help", name)
        assert one.code == 0 and one.out.startswith(f"usage: tide {name}")
        assert tide(name, "--help").out == one.out
