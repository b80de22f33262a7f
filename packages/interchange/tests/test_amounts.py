import pytest

from alpa_interchange.amounts import format_bytes, format_duration, format_seconds, parse_bytes


def test_bytes_and_seconds_are_written_for_people():
    assert format_bytes(512) == "512 B"
    assert format_bytes(1.5 * 2**20) == "1.5 MiB"
    assert format_seconds(0.0032) == "3.2 ms"
    assert format_seconds(None) == "unknown"
    assert format_seconds(0) == "0 s"
    assert format_duration(125) == "2 min 05 s"


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("16GiB", 16 * 2**30),
        ("500 MB", 5e8),
        ("1e9", 1e9),
        ("2k", None),
        ("-1GB", None),
        ("x", None),
    ],
)
def test_amounts_of_memory_are_read(text, bytes_):
    if bytes_ is None:
        with pytest.raises(ValueError, match="an amount of memory"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == bytes_
