import pytest

from gigamask.plugins.download import links
from gigamask.plugins.download.links import Link
from tests.errors import error_line

TWO = [
    Link("sa_000020.tar", "https://cdn.example/a/b?oe=1&x=%2F"),
    Link("sa_000021.tar", "http://cdn.example/c"),
]


def listed(tmp_path, text: str | bytes):
    path = tmp_path / "links.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "file_name\tcdn_link\nsa_000020.tar\thttps://cdn.example/a/b?oe=1&x=%2F\nsa_000021.tar\thttp://cdn.example/c\n",
        "sa_000020.tar\thttps://cdn.example/a/b?oe=1&x=%2F\r\n\r\nsa_000021.tar\thttp://cdn.example/c",
        "\ufefffile_name  cdn_link\n# chosen\n  sa_000020.tar   "
        "https://cdn.example/a/b?oe=1&x=%2F\nhttp://cdn.example/c sa_000021.tar\n",
    ],
)
def test_metas_list_and_its_like(tmp_path, text):
    assert links.read(listed(tmp_path, text)) == TWO


def test_a_name_may_come_from_the_address(tmp_path):
    path = listed(
        tmp_path,
        "https://cdn.example/deep/sa%5F1.tar?sig=a/b.tar\nhttps://cdn.example/sa_2.tar\nhttps://cdn.example/sa_2.tar\n",
    )
    assert [link.name for link in links.read(path)] == ["sa_1.tar", "sa_2.tar"]


@pytest.mark.parametrize(
    "name", ["../x.tar", "a/b.tar", "..", ".hidden", "a\\b", "x" * 201, "a\x07b"]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    with error_line(r"line 1"):
        links.read(listed(tmp_path, f"{name}\thttp://cdn.example/c\n"))


@pytest.mark.parametrize(
    "url",
    [
        "http://cdn.example/",
        "http://cdn.example/%2e%2e",
        "http://cdn.example/a%2Fb",
        "http://cdn.example/%00",
    ],
)
def test_addresses_without_a_plain_name_are_refused(tmp_path, url):
    if url.endswith("a%2Fb"):
        assert links.read(listed(tmp_path, url))[0].name == "b"
        return
    with error_line(r"line 1 names a file "):
        links.read(listed(tmp_path, url))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", r"links.txt: holds no link"),
        ("file_name\tcdn_link\n", r"holds no link"),
        (
            "file_name\tcdn_link\na.tar\tnot a link\n",
            r"line 2 is not a name and an http address.*'a.tar\\tnot a link'",
        ),
        ("a.tar\tftp://cdn.example/a\n", r"line 1 is not a name and an http address"),
        (
            "a.tar\thttp://[bad/a.tar\n",
            r"line 1 .*address.*'http://\[bad/a.tar'",
        ),
        ("a.tar\thttp:///a.tar\n", r"line 1 .*address"),
        ("a.tar b.tar http://cdn.example/a\n", r"line 1 is not a name and an http address"),
        (
            "a.tar http://x/a\na.tar http://x/b\n",
            r"line 2 gives a.tar a second address; keep one of them",
        ),
        (
            b"\x1f\xff",
            r"links.txt: .*text.*\(invalid start byte at byte 1, in line 1\)",
        ),
    ],
)
def test_what_is_no_list_is_refused(tmp_path, text, message):
    with error_line(message):
        links.read(listed(tmp_path, text))


def test_a_list_that_is_not_there(tmp_path):
    with error_line(r"gone.txt.*No such file or directory"):
        links.read(tmp_path / "gone.txt")


def test_a_subset_by_name_and_by_count():
    many = [Link(f"sa_{number:06d}.tar", "http://x") for number in range(30)]
    assert links.choose(many) == many
    assert links.choose(many, count=2) == many[:2]
    assert links.choose(many, ("sa_000021.tar", "sa_00000?.tar"), 11) == [*many[:10], many[21]]
    with error_line(r"--names sa_000031.tar.*30.*sa_0000"):
        links.choose(many, ("sa_000001.tar", "sa_000031.tar"))
    with error_line(r"--count must be at least 1 .got 0"):
        links.choose(many, count=0)
