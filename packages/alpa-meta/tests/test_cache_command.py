"""The command `alpa cache`."""

from alpa_meta.cache_command import cache


def test_it_says_what_plans_take_and_removes_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ALPA_CACHE_DIR", str(tmp_path))
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "key.json").write_bytes(b"x" * 2**20)
    cache()
    assert "holds 1 plans, 1.0 of at most 256 MiB" in capsys.readouterr().out
    cache(clear=True)
    assert "removed 1 plans" in capsys.readouterr().out
    assert not list((tmp_path / "plans").iterdir())
