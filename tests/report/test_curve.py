import math

import pytest

from tunix.report.curve import BLOCKS, save_curve, sparkline, terminal_curve


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([0.0, 1.0]) == BLOCKS[0] + BLOCKS[-1]
    assert sparkline([0.0, math.nan, 1.0]) == f"{BLOCKS[0]} {BLOCKS[-1]}"
    long = sparkline([float(i) for i in range(1000)], width=16)
    assert len(long) == 16
    assert list(long) == sorted(long)
    assert sparkline([2.0, 2.0]).isprintable()
    assert sparkline([0.0, 1.0], ascii_only=True).isascii()


@pytest.mark.parametrize("ascii_only", [False, True])
def test_terminal_curve_has_its_size_and_labels(ascii_only):
    points = [(0.0, 0.3), (10.0, 0.5), (20.0, math.nan), (40.0, 0.8)]
    text = terminal_curve(points, 50, 8, "success", ascii_only=ascii_only)
    lines = text.splitlines()
    assert lines[0] == "success"
    assert len(lines) == 10
    assert all(len(line) == 60 for line in lines[1:-1])
    assert "0.8" in lines[1]
    assert "0.3" in lines[8]
    assert lines[-1].split() == ["0", "40"]
    assert text.isascii() == ascii_only


def test_terminal_curve_rises_from_lower_left_to_upper_right():
    rows = terminal_curve([0.0, 1.0, 2.0, 3.0], 20, 6, ascii_only=True).splitlines()
    assert rows[0].endswith("*")
    assert rows[5][10] == "*"


def test_terminal_curve_of_little():
    assert "no finite values" in terminal_curve([math.nan], title="x")
    assert "no finite values" in terminal_curve([])
    assert terminal_curve([0.5], 20, 5)
    assert terminal_curve([0.5, 0.5], 20, 5)


def test_save_curve(tmp_path):
    path = tmp_path / "curve.png"
    save_curve(
        path,
        {"success": [(0.0, 0.1), (1.0, 0.4)], "empty": []},
        bands={"success": [(0.0, 0.2), (0.3, 0.5)]},
        title="t",
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
