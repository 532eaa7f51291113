import pytest

from omnistage.errors import RequestError
from omnistage.models.hunyuan_image3.sizes import Size, SizeTable, parse_size
from tests.models.hunyuan_image3.harness import REFERENCE

TABLES = REFERENCE["params"]["reso"]


@pytest.mark.parametrize("base", [256, 1024])
def test_table_and_picks_are_the_reference_ones(base: int) -> None:
    table = SizeTable.of(base, extended=True)
    assert [list(size) for size in table.sizes] == TABLES[str(base)]
    for width, height, drawn_width, drawn_height, index in TABLES[f"{base}_pick"]:
        assert table.index_of(height, width) == index
        assert table.nearest(height, width) == Size(drawn_height, drawn_width)


def test_base_checkpoints_have_no_common_sizes() -> None:
    assert len(SizeTable.of(1024, extended=False).sizes) == 33


def test_size_strings_are_width_first() -> None:
    assert parse_size("320x192") == (192, 320)


@pytest.mark.parametrize("size", ["", "320", "0x5", "-1x5", "axb", "320x", "1x2x3", "99999999x1", "320X192"])
def test_other_size_strings_are_refused(size: str) -> None:
    with pytest.raises(RequestError, match="WIDTHxHEIGHT"):
        parse_size(size)
